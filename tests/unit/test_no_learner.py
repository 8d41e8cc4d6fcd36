"""A worker whose run line names a peer that is no learner says that in plain words, and goes on dialling."""

import random

from echo2p2p.rollout.session import LearnerSession
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.telemetry.events import EventLog


class Owner:
    """A worker that stops after its third attempt."""

    tried = 0
    version = -1

    def on_active(self, active):
        pass

    async def run_is_finished(self):
        self.tried += 1
        return self.tried == 3


def test_a_peer_that_is_no_learner_is_said_to_be_none_and_dialled_again():
    reasons = []

    async def main():
        async with MemorySwarm(seed=0) as swarm:
            door, worker = swarm.add_peer(), swarm.add_peer()
            events = EventLog(None, role="worker", peer=worker.peer_id, clock=worker.clock)
            events.subscribe(lambda event: reasons.append(event["reason"]))
            owner = Owner()
            await LearnerSession(
                worker, f"spark@{door.peer_id}", owner, events=events, rng=random.Random(0)
            ).run()
            return owner.tried

    assert run_virtual(main) == 3
    assert "is there, but no learner of protocol 1: compare --run with the line" in reasons[0]
    assert reasons[:2] == [reasons[0]] * 2
