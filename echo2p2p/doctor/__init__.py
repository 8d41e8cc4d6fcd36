"""Whether this machine can take part in a swarm: checks that change nothing, each with a deadline.

What needs torch, p2pd or a GPU runs in a child process (:mod:`echo2p2p.doctor.probe`): whatever hangs there, or dies,
takes the child with it and is a finding like any other.
"""
