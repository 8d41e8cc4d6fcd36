"""What a worker may not get past admission; one test a lie."""

import math

import msgspec
import pytest

from echo2p2p.data.episode import score_sample
from echo2p2p.data.trajectory import Group, Trajectory, pack_logprobs
from echo2p2p.errors import ProtocolError, TaskError
from echo2p2p.learning.admission import Refusal, check_claim, check_contents, ends_as_said
from echo2p2p.learning.ledger import PromptLedger
from echo2p2p.simulation.engine import ModelledScorer
from echo2p2p.swarm.messages import decode, encode

SCORER = ModelledScorer()


@pytest.fixture
def ledger():
    ledger = PromptLedger()
    ledger.lease("worker", 4, now=0, duration_s=10)
    return ledger


def honest(index=0, version=5, **changes):
    sample = Trajectory(
        [3, 4], pack_logprobs([-0.5, -1.0]), version, version, SCORER.reward(index, [3, 4]), "stop"
    )
    return Group(index, SCORER.prompt_tokens(index), [msgspec.structs.replace(sample, **changes)] * 2)


def claim(ledger, group, *, sender="worker", lease=1, learner_version=6, proved=range(7)):
    return check_claim(
        group,
        lease=lease,
        sender=sender,
        ledger=ledger,
        learner_version=learner_version,
        proved=proved,
        staleness=3,
    )


def contents(group):
    return check_contents(group, scorer=SCORER, n_samples=2, max_new_tokens=4)


def test_an_honest_group_is_taken(ledger):
    assert claim(ledger, honest()) is None
    assert contents(honest()) == honest()


def test_a_stranger_without_a_lease_is_refused(ledger):
    assert claim(ledger, honest(), sender="stranger") is Refusal.NOT_LEASED


def test_a_lease_that_was_never_given_is_refused(ledger):
    assert claim(ledger, honest(), lease=99) is Refusal.NOT_LEASED


def test_another_prompt_than_the_leased_one_is_refused(ledger):
    assert claim(ledger, honest(index=77)) is Refusal.NOT_LEASED
    assert contents(msgspec.structs.replace(honest(0), prompt=SCORER.prompt_tokens(1))) is Refusal.PROMPT


def test_an_expired_lease_is_refused(ledger):
    ledger.expire(11)
    assert claim(ledger, honest()) is Refusal.NOT_LEASED


def test_a_second_delivery_is_refused(ledger):
    ledger.accept(1, 0)
    assert claim(ledger, honest()) is Refusal.DUPLICATE
    ledger.train([0])
    assert claim(ledger, honest()) is Refusal.DUPLICATE


def test_a_group_outside_the_window_is_refused(ledger):
    assert claim(ledger, honest(version=2)) is Refusal.STALE
    assert claim(ledger, honest(version=3)) is None


def test_a_version_that_nobody_published_is_refused(ledger):
    assert claim(ledger, honest(version=7)) is Refusal.UNPUBLISHED
    assert claim(ledger, honest(version_min=6, version_max=5)) is Refusal.UNPUBLISHED


def test_a_version_that_the_sender_never_proved_to_hold_is_refused(ledger):
    assert claim(ledger, honest(version=5), proved=[4, 6]) is Refusal.UNPROVEN


def test_an_older_version_than_the_lease_asked_for_is_refused():
    ledger = PromptLedger()
    ledger.lease("worker", 1, now=0, duration_s=10, min_version=6)
    assert claim(ledger, honest(version=5)) is Refusal.OUTDATED
    assert claim(ledger, honest(version=6)) is None


def test_the_recomputed_reward_is_what_is_trained():
    """Within the tolerance a worker could otherwise choose the sign of every advantage."""
    true = SCORER.reward(0, [3, 4])
    verified = contents(honest(reward=true + 5e-7))
    assert [sample.reward for sample in verified.samples] == [true, true]


def test_a_task_that_raises_refuses_the_group():
    class Broken(ModelledScorer):
        def reward(self, index, completion, split="train"):
            raise TaskError("no")

    assert check_contents(honest(), scorer=Broken(), n_samples=2, max_new_tokens=4) is Refusal.TASK


def test_a_task_that_raises_on_the_prompt_refuses_the_group():
    class Broken(ModelledScorer):
        def prompt_tokens(self, index, split="train"):
            raise TaskError("no")

    assert check_contents(honest(), scorer=Broken(), n_samples=2, max_new_tokens=4) is Refusal.TASK


def test_a_false_reward_is_refused():
    assert contents(honest(reward=1 - SCORER.reward(0, [3, 4]))) is Refusal.REWARD
    assert contents(honest(reward=math.nan)) is Refusal.REWARD


def test_missing_samples_are_refused():
    assert contents(msgspec.structs.replace(honest(), samples=honest().samples[:1])) is Refusal.SAMPLES


def test_tokens_outside_the_vocabulary_are_refused():
    assert contents(honest(completion=[3, SCORER.vocab_size])) is Refusal.TOKENS


def test_a_completion_longer_than_leased_is_refused():
    assert contents(honest(completion=[1] * 5, logprobs=pack_logprobs([-1.0] * 5))) is Refusal.LENGTH


@pytest.mark.parametrize("values", [[0.5, -1], [-1], [math.nan, -1], [-math.inf, -1], [-101, -1]])
def test_impossible_logprobs_are_refused(values):
    assert contents(honest(logprobs=pack_logprobs(values))) is Refusal.LOGPROBS


@pytest.mark.parametrize(
    "changes",
    [{"completion": []}, {"completion": [-1]}, {"reward": 1e300}, {"finish": "because"}, {"version_min": -1}],
)
def test_the_schema_refuses_what_is_out_of_bounds(changes):
    with pytest.raises(ProtocolError):
        decode(encode(honest(**changes)), Group)


def test_refusals_are_words_that_fit_into_a_verdict():
    assert all(len(refusal.value) < 64 for refusal in Refusal)


class Stopping(ModelledScorer):
    """A task whose completions end with token 9; in episodes each turn has three tokens at most."""

    stop_tokens = frozenset({9})


def ending(tokens, finish, *, turns=(), scorer=None):
    sample = Trajectory(list(tokens), b"", 0, 0, 0.0, finish, turns=list(turns))
    return ends_as_said(sample, scorer or Stopping(), max_new_tokens=4)


@pytest.mark.parametrize(
    ("tokens", "finish", "honest"),
    [
        ([3, 9], "stop", True),
        ([3, 4, 5, 6], "length", True),
        ([3, 4, 5, 9], "stop", True),
        ([3, 4, 5, 9], "length", True),  # where both are so, vLLM says length
        ([3, 4], "stop", False),  # cut where the reward is best
        ([3, 4], "length", False),
        ([3, 9], "length", False),
        ([3, 4, 5, 6], "stop", False),
        ([3, 9, 4, 5], "length", False),  # went on after its end
        ([9, 9], "stop", False),
    ],
)
def test_a_completion_ends_where_it_says(tokens, finish, honest):
    assert ending(tokens, finish) is honest


def test_a_completion_that_was_cut_off_is_refused():
    group = honest(completion=[3, 4], finish="length")
    told = check_contents(group, scorer=Stopping(), n_samples=2, max_new_tokens=4)
    assert told is Refusal.ENDING


def test_each_turn_of_the_model_ends_with_a_stop_token_or_at_its_limit():
    class Turns(Stopping):
        max_turns, turn_tokens = 3, 3

    scorer = Turns()
    assert ending([1, 9, 5, 9, 2, 3, 4], "length", turns=[2, 2, 3], scorer=scorer)
    assert ending([1, 2, 3, 5, 5, 2, 9], "stop", turns=[3, 2, 2], scorer=scorer)
    assert not ending([1, 2, 5, 5, 2, 9], "stop", turns=[2, 2, 2], scorer=scorer)
    assert not ending([9, 1, 9, 5, 2, 9], "stop", turns=[3, 1, 2], scorer=scorer)


def test_a_group_that_is_over_its_time_is_refused_before_the_next_sample():
    asked = []

    def is_over():
        asked.append(True)
        return len(asked) > 1

    told = check_contents(honest(), scorer=SCORER, n_samples=2, max_new_tokens=4, is_over=is_over)
    assert told is Refusal.COSTLY
    assert len(asked) == 2


def test_what_an_environment_takes_to_answer_counts_as_well():
    class Turns(Stopping):
        max_turns, turn_tokens = 2, 4

        def respond(self, *_):
            raise AssertionError("it is asked although the time is over")

    group = honest()
    told = check_contents(
        msgspec.structs.replace(
            group,
            samples=[
                msgspec.structs.replace(sample, turns=[len(sample.completion)]) for sample in group.samples
            ],
        ),
        scorer=Turns(),
        n_samples=2,
        max_new_tokens=4,
        is_over=lambda: True,
    )
    assert told is Refusal.COSTLY


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e7, -1e7])
def test_a_reward_that_no_message_can_hold_counts_as_none(reward):
    class Odd(type(SCORER)):
        def reward(self, *_, **__):
            return reward

    (sample, *_) = honest().samples
    assert score_sample(sample, Odd(), 0) == (0.0, True)
