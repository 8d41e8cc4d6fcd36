"""Every prompt index is trained exactly once, whatever happens to leases, workers and the learner."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from echo2p2p.learning.ledger import LedgerState, PromptLedger


class LedgerUnderChurn(RuleBasedStateMachine):
    """Random leases, deliveries, losses and learner crashes; the books must always balance."""

    def __init__(self):
        super().__init__()
        self.ledger = PromptLedger()
        self.now = 0.0
        self.out = {}  # (lease, index) -> worker, as the workers remember it
        self.buffered = []
        self.trained = []
        self.saved = (self.ledger.state(), [])

    @rule(worker=st.sampled_from("abc"), n=st.integers(1, 4), duration=st.floats(1, 10))
    def lease(self, worker, n, duration):
        lease, indices = self.ledger.lease(worker, n, now=self.now, duration_s=duration)
        assert len(set(indices)) == n
        for index in indices:
            assert not self.ledger.is_settled(index)
            self.out[lease, index] = worker

    @precondition(lambda self: self.out)
    @rule(data=st.data(), accepted=st.booleans())
    def deliver(self, data, accepted):
        lease, index = data.draw(st.sampled_from(sorted(self.out)))
        worker = self.out.pop((lease, index))
        if self.ledger.holder(lease, index) != worker:
            return  # expired: the learner refuses it
        if accepted:
            self.ledger.accept(lease, index)
            self.buffered.append(index)
        else:
            self.ledger.give_back(lease, index)

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds):
        self.now += seconds
        self.ledger.expire(self.now)

    @rule(worker=st.sampled_from("abc"))
    def lose(self, worker):
        self.ledger.shorten(worker, self.now)
        self.ledger.expire(self.now)
        assert self.ledger.outstanding(worker) == 0

    @precondition(lambda self: self.buffered)
    @rule(n=st.integers(1, 3))
    def train(self, n):
        batch, self.buffered = self.buffered[:n], self.buffered[n:]
        self.ledger.train(batch)
        self.trained += batch

    @precondition(lambda self: self.buffered)
    @rule()
    def fall_out_of_the_window(self):
        self.ledger.drop(self.buffered.pop(0))

    @rule()
    def checkpoint(self):
        self.saved = (self.ledger.state(), list(self.trained))

    @rule()
    def crash(self):
        state, self.trained = self.saved[0], list(self.saved[1])
        self.ledger = PromptLedger(state, first_lease=10_000_000 + int(self.now * 1000))
        self.buffered = []

    @invariant()
    def nothing_is_trained_twice(self):
        assert len(self.trained) == len(set(self.trained)) == self.ledger.n_trained

    @invariant()
    def counters_agree(self):
        assert self.ledger.n_buffered == len(self.buffered)
        assert self.ledger.n_leased == sum(self.ledger.outstanding(w) for w in "abc")

    def teardown(self):
        """Drain: without further trouble, everything up to the highest index ever leased gets trained."""
        self.ledger.expire(float("inf"))
        while self.buffered:
            self.train(3)
        frontier = max((index for _, index in self.out), default=-1)
        for _ in range(frontier + 1 + len(self.trained)):
            lease, (index,) = self.ledger.lease("a", 1, now=self.now, duration_s=1)
            self.ledger.accept(lease, index)
            self.ledger.train([index])
            self.trained.append(index)
        assert sorted(self.trained)[: frontier + 1] == list(range(frontier + 1))


TestLedgerUnderChurn = LedgerUnderChurn.TestCase
TestLedgerUnderChurn.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_an_index_beyond_a_gap_is_not_leased_again_once_the_gap_has_closed():
    ledger = PromptLedger(LedgerState(frontier=0, beyond=(1,)))
    for expected in (0, 2):
        lease, (index,) = ledger.lease("a", 1, now=0, duration_s=1)
        assert index == expected
        ledger.accept(lease, index)
        ledger.train([index])


def test_returned_indices_are_leased_before_new_ones():
    ledger = PromptLedger()
    lease, indices = ledger.lease("a", 3, now=0, duration_s=1)
    assert indices == [0, 1, 2]
    ledger.give_back(lease, 1)
    assert ledger.lease("b", 2, now=0, duration_s=1)[1] == [1, 3]


def test_a_lease_of_someone_else_is_nobodys():
    ledger = PromptLedger()
    lease, _ = ledger.lease("a", 1, now=0, duration_s=1)
    assert ledger.holder(lease, 0) == "a"
    assert ledger.holder(lease, 5) is None
    assert ledger.holder(lease + 1, 0) is None


def test_going_back_leases_again_what_was_trained_since_and_nothing_else():
    ledger = PromptLedger()
    lease, indices = ledger.lease("w", 6, now=0.0, duration_s=60)
    for index in indices:
        ledger.accept(lease, index)
    ledger.train([0, 2])
    before = ledger.state()
    ledger.train([1, 4])
    assert ledger.go_back(before) == 2
    assert ledger.state() == before
    assert ledger.lease("w", 4, now=0.0, duration_s=60)[1] == [1, 4, 6, 7]


def test_what_an_earlier_life_has_buffered_is_not_leased_until_it_is_dropped():
    ledger = PromptLedger(LedgerState(frontier=1, beyond=(3,)))
    for index in (2, 4):
        ledger.hold(index)
    assert ledger.n_buffered == 2
    ledger.drop(4)  # no lease of this life has come so far: it is leased once, in its turn
    assert ledger.lease("w", 3, now=0.0, duration_s=60)[1] == [1, 4, 5]
    ledger.drop(2)
    assert ledger.lease("w", 2, now=0.0, duration_s=60)[1] == [2, 6]
