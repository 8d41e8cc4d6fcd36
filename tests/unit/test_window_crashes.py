"""Promise 1 through the real books: leases, admission, buffer, journal and checkpoints under any interleaving."""

import asyncio
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from echo2p2p.data.trajectory import Group, Trajectory, pack_logprobs
from echo2p2p.data.work import Lease, Submit, Verdict
from echo2p2p.learning.dispatcher import LEFT_THE_WINDOW, Dispatcher
from echo2p2p.learning.journal import Journal
from echo2p2p.learning.ledger import LedgerState, PromptLedger
from echo2p2p.learning.replay import staleness_histogram
from echo2p2p.learning.sessions import Session
from echo2p2p.settings import LearnerSettings
from echo2p2p.simulation.engine import ModelledScorer

SCORER = ModelledScorer()
WORKERS = ("a", "b", "c", "d")


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    async def offload(self, fn):
        return fn()


class Told(Session):
    """A session whose messages are kept, not sent."""

    def __init__(self, peer):
        super().__init__(SimpleNamespace(remote=peer), SimpleNamespace(price_per_hour=0.0, tokens_per_s=0.0))
        self.told = []
        self.active = True

    def tell(self, message):
        self.told.append(message)


class LearnerUnderChurn:
    """Workers that hold any versions and claim any, a learner that is killed anywhere; nothing else is modelled."""

    def __init__(self, folder, rng, *, journalled):
        self.folder, self.rng, self.journalled = folder, rng, journalled
        staleness, kappa, mode = (
            rng.randrange(5),
            rng.randrange(1, 4),
            rng.choice(["async", "async", "sequential"]),
        )
        self.settings = LearnerSettings(
            staleness=staleness, kappa=kappa, mode=mode, prompts_per_step=2, samples_per_prompt=2, lease_s=10
        )
        self.staleness, self.kappa = staleness, self.settings.publication_period
        self.clock = Clock()
        self.loop = asyncio.new_event_loop()
        self.published = {}  # version -> what led to it
        self.batches = {}  # version -> the batch that was trained on it, in any life
        self.out = []  # (worker, lease), as the workers remember them
        self.acked, self.lost = Counter(), Counter()
        self.saved = (LedgerState(0, ()), 0, ())
        self.trained = ()
        self.lives = 0
        self.live(resume=False)
        self.publish()

    def live(self, *, resume):
        self.lives += 1
        state, version, self.trained = self.saved
        self.ledger = PromptLedger(state, first_lease=self.lives * 10_000)
        journal = None
        if self.journalled:
            journal = Journal(self.folder, resume_from=version if resume else None)
        self.dispatcher = Dispatcher(
            self.settings,
            ledger=self.ledger,
            scorer=SCORER,
            clock=self.clock,
            events=SimpleNamespace(emit=lambda *_, **__: None),
            t_train_s=0.3,
            n_active=lambda: len(self.sessions),
            journal=journal,
        )
        self.journal = journal
        self.dispatcher.version = version
        self.sessions = {name: Told(name) for name in WORKERS}
        for session in self.sessions.values():
            self.dispatcher.add(session)
        self.counted = Counter()

    def publish(self):
        """A checkpoint, and then the version is known."""
        version = self.dispatcher.version
        self.dispatcher.captured(durable=self.saved[1])
        self.saved = (self.ledger.state(), version, self.trained)
        assert self.published.setdefault(version, self.trained) == self.trained or not self.journalled
        self.dispatcher.published = version
        self.listen_to_all()

    def listen_to_all(self):
        for session in self.sessions.values():
            self.listen(session)

    def listen(self, session):
        for message in session.told:
            if isinstance(message, Lease):
                self.out += [(session.peer, message, index) for index in message.indices]
            elif isinstance(message, Verdict):
                kind = message.reason or "accepted"
                self.counted[kind] += 1
                (self.lost if kind == LEFT_THE_WINDOW else Counter())[message.index] += 1
                self.acked[message.index] += not message.reason
        session.told.clear()

    def work(self):
        """Some install a version, most deliver: honestly, late, from another life, twice, or a lie."""
        rng = self.rng
        self.clock.now += rng.choice([0.1, 0.5, 2, 2, 12])
        for session in self.sessions.values():
            published = [v for v in sorted(self.published) if v <= self.dispatcher.published]
            version = rng.choice(published[-3:])
            if version > session.version and rng.random() < 0.7:
                session.prove(version)
        self.dispatcher.top_up()
        self.listen_to_all()
        rng.shuffle(self.out)
        for worker, lease, index in self.out[: rng.randrange(8)]:
            if rng.random() < 0.9:
                self.out.remove((worker, lease, index))
            self.submit(worker, lease, index)

    def submit(self, worker, lease, index):
        rng, session = self.rng, self.sessions[worker]
        honest = [v for v in session.proved if v >= lease.min_version]
        if not honest or rng.random() < 0.2:
            honest = range(self.dispatcher.version + 3)
        samples = []
        for _ in range(2):
            # A trajectory may have been begun with one version and ended with another.
            oldest, newest = sorted(rng.choices(honest, k=2))
            reward = SCORER.reward(index, [1])
            samples.append(Trajectory([1], pack_logprobs([-1.0]), oldest, newest, reward, "stop"))
        before = self.counted.total()
        group = Group(index, SCORER.prompt_tokens(index), samples)
        self.loop.run_until_complete(self.dispatcher.receive(session, Submit(lease.lease, group)))
        self.listen(session)
        assert self.counted.total() == before + 1  # a verdict for every group, whatever it was

    def step(self, crash):
        version = self.dispatcher.version
        batch = self.loop.run_until_complete(self.draw())
        if batch is None:
            return
        assert len(batch) == 2
        for entry in batch:
            assert len(entry.group.samples) == 2  # whole or not at all
            for sample in entry.group.samples:
                assert version - self.staleness <= sample.version_min <= sample.version_max <= version
                assert {sample.version_min, sample.version_max} <= self.published.keys()
        assert max(staleness_histogram(batch, version)) <= self.staleness
        if self.journalled:
            # A version is made of the same groups in every life of the learner.
            made_of = self.batches.setdefault(version, [entry.group for entry in batch])
            assert made_of == [entry.group for entry in batch]
        if crash == "before the step":
            self.crash()
            return
        self.dispatcher.trained(batch)
        self.dispatcher.version += 1
        self.trained += tuple(entry.group.index for entry in batch)
        assert len(self.trained) == len(set(self.trained)) == self.ledger.n_trained
        if crash == "after the step":
            self.crash()
        elif version + 1 - self.saved[1] >= self.kappa:
            self.publish()

    async def draw(self):
        waiting = asyncio.ensure_future(self.dispatcher.next_batch())
        await asyncio.sleep(0)
        self.listen_to_all()
        if not waiting.done():
            waiting.cancel()
        (found,) = await asyncio.gather(waiting, return_exceptions=True)
        return None if isinstance(found, asyncio.CancelledError) else found

    def crash(self):
        self.live(resume=True)
        self.publish()

    def every_drop_is_counted_by_its_reason_and_told(self):
        told = Counter({reason: n for reason, n in self.counted.items() if reason != "accepted"})
        silent = {"lease expired"}  # a duration that the worker knows
        assert told == Counter({k: n for k, n in self.dispatcher.dropped.items() if k not in silent})

    def nothing_that_was_accepted_is_lost(self):
        if self.journalled:
            assert self.ledger.n_buffered == self.dispatcher.buffered + len(self.dispatcher._drawn)
            settled = sum(self.ledger.is_settled(index) for index in self.acked)
            gone = sum(not self.ledger.is_settled(i) for i in self.lost)
            assert settled + gone >= sum(1 for n in self.acked.values() if n)

    def close(self):
        self.loop.close()
        if self.journal is not None:
            self.journal.close()


@pytest.mark.parametrize("journalled", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_the_window_holds_and_no_index_is_trained_twice_whatever_crashes(seed, journalled, tmp_path):
    rng = random.Random(seed)
    run = LearnerUnderChurn(tmp_path, rng, journalled=journalled)
    for _ in range(80):
        run.work()
        run.step(rng.choice(["no"] * 8 + ["before the step", "after the step"]))
        if rng.random() < 0.05:
            run.crash()
        run.every_drop_is_counted_by_its_reason_and_told()
        run.nothing_that_was_accepted_is_lost()
    run.close()
    assert run.dispatcher.version > 1
