"""Makes the seed policy that ships with echo2p2p: a tiny character model that is weakly able to reverse digits.

    python scripts/make_seed_policy.py echo2p2p/seed_policy
"""
