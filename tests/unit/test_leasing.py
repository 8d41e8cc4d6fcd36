"""To whom work is leased, and what a worker that has yet to fetch the weights is taken for."""

import asyncio
from types import SimpleNamespace

from echo2p2p.data.trajectory import Group, Trajectory
from echo2p2p.data.work import Lease, Submit, Verdict
from echo2p2p.learning.admission import Refusal
from echo2p2p.learning.dispatcher import CHECKED_AT_ONCE, Dispatcher
from echo2p2p.learning.ledger import LedgerState, PromptLedger
from echo2p2p.learning.provisioner import Provisioner
from echo2p2p.learning.replay import Entry
from echo2p2p.learning.sessions import Session
from echo2p2p.settings import LearnerSettings, ProvisioningSettings

EVENTS = SimpleNamespace(emit=lambda *_, **__: None)
LEARNER = LearnerSettings(
    max_new_tokens=256, staleness=4, prompts_per_step=8, samples_per_prompt=2, lease_s=60
)


class Told(Session):
    """A session whose messages are kept, not sent."""

    def __init__(self, peer, *, tokens_per_s=100.0, price=1.0):
        super().__init__(
            SimpleNamespace(remote=peer), SimpleNamespace(price_per_hour=price, tokens_per_s=tokens_per_s)
        )
        self.told = []

    def tell(self, message):
        self.told.append(message)

    @property
    def leased_groups(self):
        return sum(len(message.indices) for message in self.told if isinstance(message, Lease))


class World:
    """A dispatcher and a provisioner around ``sessions``, at ``now``."""

    def __init__(self, sessions):
        self.now = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        self.ledger = PromptLedger(LedgerState(0, ()), first_lease=0)
        self.sessions = {session.peer: session for session in sessions}
        self.dispatcher = Dispatcher(
            LEARNER,
            ledger=self.ledger,
            scorer=None,
            clock=clock,
            events=EVENTS,
            t_train_s=30.0,
            n_active=lambda: self.provisioner.n_active,
        )
        self.provisioner = Provisioner(
            ProvisioningSettings(period_s=2),
            LEARNER,
            sessions=self.sessions,
            mean_tokens=lambda: 100.0,
            activated=lambda _: self.dispatcher.top_up(),
            outstanding=self.ledger.outstanding,
            keeps_up=self.dispatcher.keeps_up,
            clock=clock,
            events=EVENTS,
        )
        for session in sessions:
            self.dispatcher.add(session)


def test_work_goes_to_workers_that_hold_a_version_or_the_one_before():
    newest, before, left_behind, just_come = (Told(name) for name in "abcd")
    world = World([newest, before, left_behind, just_come])
    for version in (0, 3, 6, 9):
        world.dispatcher.published = version
    world.dispatcher.version = 9
    for session, versions in ((newest, [6, 9]), (before, [3, 6]), (left_behind, [0])):
        for version in versions:
            session.prove(version)
    world.provisioner.decide()
    for session in world.sessions.values():
        session.active = True
    world.dispatcher.top_up()
    assert newest.leased_groups > 0
    assert before.leased_groups > 0
    assert left_behind.leased_groups == just_come.leased_groups == 0


def test_the_first_version_is_leased_for_while_it_travels():
    world = World([Told("a")])
    world.dispatcher.published = 0
    world.provisioner.decide()
    world.dispatcher.top_up()
    assert world.sessions["a"].leased_groups > 0


def test_a_paid_worker_that_never_gets_ready_sinks():
    world = World([Told("never")])
    for version in (0, 3, 6):
        world.dispatcher.published = version
    world.dispatcher.version = 6
    world.provisioner.decide()
    session = world.sessions["never"]
    assert session.arriving
    announced = session.mu(100.0)
    for world.now in (59.0, 61.0, 122.0):
        world.provisioner.decide()
    assert not session.arriving
    assert session.mu(100.0) < 0.1 * announced


def test_an_announced_speed_counts_as_far_as_measured_workers_have_kept_theirs():
    world = World([Told(str(n)) for n in range(4)])
    for n in range(3):
        for _ in range(100):
            world.sessions[str(n)].delivered(0, world.now, 1, still_busy=True, mean_tokens=100.0)
            world.now += 2.0  # half of what was announced
    world.provisioner.decide()
    assert 0.45 < world.sessions["3"].mu(100.0) < 0.6


def test_who_is_active_is_counted_through_leaving_and_coming_back():
    world = World([Told(str(n)) for n in range(3)])
    for session in world.sessions.values():
        world.provisioner.came(session)
    world.provisioner.decide()
    active = world.provisioner.active
    assert world.provisioner.n_active == len(active) > 0
    old = active[0]
    world.sessions[old.peer] = Told(old.peer)
    world.provisioner.came(world.sessions[old.peer])
    assert world.provisioner.n_active == len(active) - 1
    world.provisioner.decide()
    now = world.provisioner.n_active
    world.provisioner.left(old)  # the end of the old session is not that of the new one
    assert world.provisioner.n_active == now
    assert world.provisioner.n_active == sum(session.active for session in world.sessions.values())


def test_a_worker_that_is_ready_and_gets_no_lease_is_no_longer_arriving():
    world = World([Told(str(n)) for n in range(2)])
    for version in (0, 3, 6):
        world.dispatcher.published = version
    world.provisioner.decide()
    for session in world.sessions.values():
        if session.active:
            assert session.candidate(100.0, keeps_up=world.dispatcher.keeps_up(session)).arriving
            session.prove(6)
            assert not session.candidate(100.0, keeps_up=world.dispatcher.keeps_up(session)).arriving


def test_what_a_worker_holds_that_is_turned_away_goes_to_others_at_once():
    liar, other = workers = [Told("liar"), Told("other")]
    world = World(workers)
    world.dispatcher.published = 0
    for session in workers:
        session.prove(0)
        session.activate(0.0)
    world.dispatcher.top_up()
    (lease,) = (message for message in liar.told if isinstance(message, Lease))
    (done,) = (message for message in other.told if isinstance(message, Lease))
    for index in done.indices:
        world.ledger.accept(done.lease, index)
    world.ledger.train(done.indices)
    delivered, *out = lease.indices
    group = Group(delivered, [1], [Trajectory([1], b"0000", 0, 0, 0.0, "stop")])
    world.dispatcher._replay.add(Entry(group, "liar", lease.lease))
    world.ledger.accept(lease.lease, delivered)
    assert out
    world.dispatcher.discard("liar")
    leased = [i for message in other.told[1:] if isinstance(message, Lease) for i in message.indices]
    assert leased == sorted([delivered, *out])[: len(leased)]
    assert len(leased) >= 2
    assert world.dispatcher.buffered == world.ledger.outstanding("liar") == 0
    # Its session ends a moment later: until then it is told of no lease.
    before = liar.leased_groups
    world.dispatcher._top_up(liar)
    assert liar.leased_groups == before


async def test_groups_that_take_long_to_check_do_not_take_all_threads(monkeypatch):
    workers = [Told(name) for name in "abcdef"]
    world = World(workers)
    monkeypatch.setattr("echo2p2p.learning.dispatcher.check_claim", lambda *_, **__: None)
    checking, most, go_on = 0, 0, asyncio.Event()

    async def offload(_):
        nonlocal checking, most
        checking += 1
        most = max(most, checking)
        await go_on.wait()
        checking -= 1
        return Refusal.TASK

    world.dispatcher._clock.offload = offload
    group = Group(0, [1], [Trajectory([1], b"0000", 0, 0, 0.0, "stop")])
    async with asyncio.TaskGroup() as tasks:
        for worker in workers:
            tasks.create_task(world.dispatcher._admit(worker, Submit(0, group)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        go_on.set()
    assert most == CHECKED_AT_ONCE
    assert all(isinstance(worker.told[-1], Verdict) for worker in workers)
