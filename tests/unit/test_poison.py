"""Completions that are made to be dear: bounds on what is evaluated, and on what a worker may cost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from echo2p2p.data import graders
from echo2p2p.data.sandbox import Sandbox, SandboxLimits
from echo2p2p.data.trajectory import Group, Trajectory, pack_logprobs
from echo2p2p.data.work import Lease, Submit, Verdict
from echo2p2p.errors import RewardFailed
from echo2p2p.learning.admission import Refusal
from echo2p2p.learning.dispatcher import Dispatcher
from echo2p2p.learning.ledger import LedgerState, PromptLedger
from echo2p2p.learning.scoring_costs import ALWAYS_ALLOWED_S, BURST_S, PER_S, TIMES_USUAL, Check, ScoringCosts
from echo2p2p.learning.sessions import Session
from echo2p2p.settings import LearnerSettings
from echo2p2p.simulation.engine import ModelledScorer

N_SAMPLES = 16
POISON_S = 2.4
LEARNER = LearnerSettings(
    staleness=4, prompts_per_step=8, samples_per_prompt=N_SAMPLES, lease_s=60, max_new_tokens=4
)


@pytest.mark.parametrize(
    "expression",
    [
        "9^{9^{9^9}}",
        "9**9**9",
        r"10^{10^8}",
        r"2^{(10^5)}",
        r"2^{123456}",
        r"((((2^{99})^{99})^{99})^{99})^{99}",
        r"(x+1)^{9999}",
        r"1000000!",
        r"(10^6)!",
        r"((7!)!)!",
        r"5!!!",
        r"\binom{1000000000}{500000000}",
        "1+" * 300,
        "(" * 40 + "1" + ")" * 40,
        r"\sqrt{" * 11 + "2" + "}" * 11,
    ],
)
def test_a_number_beyond_all_bounds_is_known_by_its_looks(expression):
    assert graders.is_excessive(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "1",
        r"2^{2024}-1",
        r"e^{x^2}",
        r"2^{10}\cdot 3^{5}",
        r"(1+\frac{1}{n})^{n}",
        r"(x+1)^2 (x-1)^3",
        r"\binom{52}{5}",
        r"52!",
        r"(n-1)!",
        r"\frac{\sqrt{2+\sqrt{3}}}{4}",
        r"x^{-2}+x^2",
        r"\left(\frac{3}{4}, \infty\right)",
        "123456789123456789",
    ],
)
def test_an_ordinary_answer_is_not(expression):
    assert not graders.is_excessive(expression)


def test_math_verify_is_not_held_by_what_is_out_of_bounds_and_is_ended_by_what_is_not():
    sandbox = Sandbox(f"{graders.__file__}:math", SandboxLimits(call_s=0.5))
    try:
        sandbox.start()
        assert sandbox.call("", r"\boxed{9^{9^{9^9}}}", "7") == 0.0
        assert sandbox.call("", r"so it is \boxed{7}", "7") == 1.0
        with pytest.raises(RewardFailed, match=r"did not answer within 0\.5 s"):
            sandbox.call("", r"\boxed{(a+b+c+d+e+f)^{60}}", "7")
        assert sandbox.call("", r"\boxed{\frac{14}{2}}", "7") == 1.0
    finally:
        sandbox.close()


def test_a_worker_without_others_is_compared_with_nobody():
    costs = ScoringCosts()
    assert costs.limit_s("only", 4, 0.0) == float("inf")
    costs.charge("gone", 0.01, 4, 0.0, refused=False)
    costs.left("gone")
    costs.charge("only", 1000.0, 4, 0.0, refused=False)
    assert costs.wait_s("only", 0.0) == 0


def test_what_everybody_costs_is_nobody_s_fault():
    costs = ScoringCosts()
    for round_ in range(20):
        for worker in "abcd":
            costs.charge(worker, 16 * (1.0 + 0.1 * (ord(worker) - 97)), 16, float(round_), refused=False)
    assert all(costs.wait_s(worker, 20.0) == 0 for worker in "abcd")
    assert costs.limit_s("a", 16, 20.0) >= 16 * TIMES_USUAL


def test_what_one_worker_costs_beyond_the_others_is_lent_and_comes_back_slowly():
    costs = ScoringCosts()
    for worker in "abc":
        costs.charge(worker, 0.01, 16, 0.0, refused=False)
    assert costs.limit_s("liar", 16, 0.0) == pytest.approx(BURST_S + 16 * ALWAYS_ALLOWED_S)
    costs.charge("liar", BURST_S + 16 * ALWAYS_ALLOWED_S + POISON_S, 16, 0.0, refused=True)
    assert costs.wait_s("liar", 0.0) == pytest.approx(POISON_S / PER_S)
    assert costs.wait_s("liar", 1.001 * POISON_S / PER_S) == 0
    assert costs.wait_s("a", 0.0) == 0


def test_three_dear_workers_of_seven_do_not_decide_what_is_usual():
    costs = ScoringCosts()
    for honest in "defg":
        costs.charge(honest, 0.01, 16, 0.0, refused=False)
    for liar in "abc":
        costs.charge(liar, 16 * POISON_S, 16, 0.0, refused=False)
        assert costs.wait_s(liar, 0.0) > 0


@pytest.mark.parametrize(("honest", "cheap"), [(2, 1), (4, 1), (4, 3), (8, 3)])
def test_cheap_workers_do_not_have_the_others_refused_where_a_task_is_dear(honest, cheap):
    costs, each, n_refused = ScoringCosts(), 0.5, 0
    for round_ in range(60):
        now = 20.0 * round_
        for number in range(cheap):
            costs.charge(f"cheap-{number}", 0.001, 16, now, refused=False)
        for number in range(honest):
            worker = f"honest-{number}"
            if costs.wait_s(worker, now):
                n_refused += 1
                continue
            limit = costs.limit_s(worker, 16, now)
            n_refused += limit < 16 * each
            costs.charge(worker, min(limit, 16 * each), 16, now, refused=False)
    assert n_refused <= 2 * honest


def test_a_check_ends_at_its_limit_or_when_nobody_waits_for_it():
    now = 5.0
    check = Check(lambda: now, 1.0)
    assert check.seconds == 0
    assert not check.is_over()
    now = 6.5
    assert check.seconds == 1.5
    assert check.is_over()
    other = Check(lambda: now, 10.0)
    assert not other.is_over()
    other.give_up()
    assert other.is_over()


def test_a_learner_that_stood_still_blames_nobody_for_it():
    now, costs = 0.0, ScoringCosts()
    costs.charge("other", 0.01, 16, now, refused=False)
    check = Check(lambda: now, costs.limit_s("honest", 16, now))
    assert not check.is_over()
    now = 165.0
    assert not check.is_over()
    costs.charge("honest", check.seconds, 16, now, refused=False)
    assert costs.wait_s("honest", now) == 0


class Poisoned(ModelledScorer):
    """Completions of token 666 take :data:`POISON_S` and come to nothing; so it is for who sends them."""

    def __init__(self, clock):
        self.clock = clock

    def reward(self, index, completion, split="train"):
        if completion[0] == 666:
            self.clock.now += POISON_S
            raise RewardFailed("did not answer")
        return super().reward(index, completion, split)


class Told(Session):
    def __init__(self, peer):
        super().__init__(
            SimpleNamespace(remote=peer), SimpleNamespace(price_per_hour=1.0, tokens_per_s=100.0)
        )
        self.told = []
        self.active = True

    def tell(self, message):
        self.told.append(message)

    def verdicts(self):
        return [message.reason for message in self.told if isinstance(message, Verdict)]

    def leases(self):
        return [(m.lease, index) for m in self.told if isinstance(m, Lease) for index in m.indices]


async def offload(fn):
    return fn()


def a_group(index, token, scorer):
    failed = token == 666
    reward = 0.0 if failed else scorer.reward(index, [token])
    sample = Trajectory([token], pack_logprobs([-1.0]), 0, 0, reward, "stop", failed=failed)
    return Group(index, scorer.prompt_tokens(index), [sample] * N_SAMPLES)


def test_a_worker_that_sends_nothing_but_poison_is_refused_told_and_leased_less():
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, offload=offload)
    scorer = Poisoned(clock)
    honest, liar = Told("honest"), Told("liar")
    events = []
    dispatcher = Dispatcher(
        LEARNER,
        ledger=PromptLedger(LedgerState(0, ()), first_lease=0),
        scorer=scorer,
        clock=clock,
        events=SimpleNamespace(emit=lambda kind, **more: events.append((kind, more))),
        t_train_s=30.0,
        n_active=lambda: 2,
    )
    dispatcher.published = 0
    for session in (honest, liar):
        session.prove(0)
        dispatcher.add(session)
    dispatcher.top_up()
    lost_s = 0.0

    async def deliver(session, token):
        nonlocal lost_s
        leases = session.leases()
        if len(session.verdicts()) < len(leases):
            lease, index = leases[len(session.verdicts())]
            began = clock.now
            await dispatcher.receive(session, Submit(lease, a_group(index, token, scorer)))
            lost_s += clock.now - began

    async def a_minute():
        for _ in range(60):
            await deliver(honest, 5)
            await deliver(liar, 666)
            clock.now += 1.0

    asyncio.run(a_minute())
    assert set(honest.verdicts()) == {""}
    assert set(liar.verdicts()) == {Refusal.COSTLY.value}
    assert len(honest.verdicts()) == len(honest.leases()) >= LEARNER.prompts_per_step
    assert liar.not_before > clock.now or len(liar.verdicts()) < 10
    # Without a limit each of its groups would take 38 s.
    assert lost_s < BURST_S + 4 * POISON_S
    assert dispatcher.dropped[Refusal.COSTLY.value] == len(liar.verdicts())
    assert ("refused", Refusal.COSTLY.value) in {(kind, more.get("reason")) for kind, more in events}
