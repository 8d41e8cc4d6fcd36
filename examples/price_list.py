"""What would a run cost? The capacity model, asked for an 8-billion-parameter policy and a price list.

python examples/price_list.py
"""

from echo2p2p.provisioning.activation import Candidate
from echo2p2p.provisioning.plan import Inputs, plan

# ECHO-2's set-up: 2,048 rollouts a step of about 1,600 s, 16.4 GB of weights to workers with 100 Mbit/s.
T_BCAST_S = 16.4e9 * 8 / 100e6


def main():
    market = [Candidate(f"rtx5090-{n}", price_per_hour=0.35, mu=0.25) for n in range(16)]
    market += [Candidate(f"a100-{n}", price_per_hour=3.06, mu=0.9) for n in range(4)]
    for staleness in (2, 3, 4, 6):
        chosen = plan(Inputs(2048, 1600, T_BCAST_S, staleness, gamma=1.1), market)
        if not chosen.feasible:
            print(f"S = {staleness}: cannot keep the learner busy: {chosen.why}")
            continue
        print(
            f"S = {staleness}: {len(chosen.workers):2} workers, ${chosen.price_per_hour:5.2f}/h, "
            f"${chosen.price_per_step:.2f}/step, staleness ≤ {chosen.delta_cons}"
        )


if __name__ == "__main__":
    main()
