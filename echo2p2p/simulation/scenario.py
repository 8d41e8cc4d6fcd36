"""A scenario: everything that decides a simulated run, as one typed TOML file.

Unknown keys are errors, bounds are part of the types. Sizes and rates are those of the real world;
:mod:`echo2p2p.simulation.scaling` makes them small enough to move through one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError, model_validator

from echo2p2p.errors import SettingsError
from echo2p2p.layering import overlay, read_toml
from echo2p2p.settings import NonNegative, Positive, RunName, Section, Settings
from echo2p2p.simulation.engine import Lengths, Tail

T = TypeVar("T")
Share = Annotated[float, Field(ge=0, le=1)]
MAX_WORKERS = 20_000


class Learner(Section):
    """The learner's machine."""

    t_train_s: Positive = Field(description="T_train: seconds a training step takes")
    jitter: Annotated[float, Field(ge=0, lt=1)] = Field(
        0, description="a step takes up to this part longer or shorter"
    )
    drift_kl: NonNegative = Field(
        0,
        description="KL divergence by which one step moves the policy, nats per token; n steps: n² times as much",
    )
    price_per_hour: NonNegative = Field(0, description="$/h of the machine; part of the cost of a step")
    upload_mbit: Positive = Field(300, description="B_0: uplink, Mbit/s")
    settings: dict[str, Any] = Field(
        {},
        description="settings of the run, as in a settings file: [learner.settings.provisioning] gamma = 1.1",
    )


class Policy(Section):
    """What travels."""

    nbytes: Annotated[int, Field(ge=4096, le=2**44)] = Field(description="bytes of a snapshot")
    changed_share: Share | None = Field(
        None,
        description="part of the bf16 weights that one step changes, which decides what a patch has; empty: all "
        "bytes change, and versions travel whole",
    )
    install_s: NonNegative = Field(1, description="seconds that an engine stands still to swap the weights")
    chunks: Annotated[int, Field(ge=1, le=65_536)] = Field(
        256, description="chunks that a whole snapshot is modelled with"
    )
    chunk_kib: Annotated[int, Field(ge=4, le=4096)] = Field(
        8, description="bytes that really move for one chunk, in KiB; they stand for nbytes / chunks"
    )


class Completions(Section):
    """How long completions get."""

    mean_tokens: Positive = Field(256, description="mean length before the cut at max_tokens")
    max_tokens: Annotated[int, Field(ge=1, le=2**20)] = Field(1024, description="longest completion")
    tail: Tail = Field("exponential", description="fixed, exponential, or lognormal for a heavy tail")
    sigma: Positive = Field(1.0, description="of the lognormal; 1 is heavy")
    tokens_each: Annotated[int, Field(ge=1, le=4096)] = Field(
        1, description="tokens that one modelled token stands for: long completions cost less to simulate"
    )

    @model_validator(mode="after")
    def _longest_at_least_one(self) -> Completions:
        if self.max_tokens < self.tokens_each:
            raise ValueError("max_tokens must be at least tokens_each")
        return self


class Workers(Section):
    """A class of machines that are alike."""

    name: RunName = Field(description="what the other tables call this class; shown as the GPU")
    count: Annotated[int, Field(ge=0, le=MAX_WORKERS)] = Field(description="how many are there at the start")
    price_per_hour: NonNegative = Field(description="$/h while active")
    price_spread: Share = Field(0, description="prices differ from it by up to this part, evenly")
    tokens_per_s: Positive = Field(description="of a whole batch")
    speed_spread: Annotated[float, Field(ge=0, lt=1)] = Field(
        0, description="speeds differ from it by up to this part, evenly"
    )
    sequence_tokens_per_s: Positive | None = Field(
        None,
        description="of a single completion: a batch takes as long as its longest one; empty: no such limit",
    )
    upload_mbit: Positive = Field(100, description="uplink, Mbit/s")
    download_mbit: Positive = Field(100, description="downlink, Mbit/s")
    delay_s: NonNegative = Field(
        0.04, description="the delay between two peers is the mean of theirs, one way"
    )


class Churn(Section):
    """Who comes and goes, at random; rates for the whole swarm."""

    joins_per_hour: NonNegative = Field(0, description="new workers, of each class by its count")
    leaves_per_hour: NonNegative = Field(0, description="workers that say goodbye")
    kills_per_hour: NonNegative = Field(0, description="workers that are gone without a word")


class _Happening(Section):
    at_s: NonNegative = Field(description="when")
    workers: RunName | None = Field(None, description="which class; empty: every worker")
    share: Share = Field(1, description="part of those that are there then, chosen at random")


class PriceChange(_Happening):
    """Some workers announce another price."""

    factor: Positive = Field(description="times the price they have")


class Slowdown(_Happening):
    """Some workers become stragglers."""

    for_s: Positive = Field(description="how long")
    factor: Annotated[float, Field(gt=0, le=100)] = Field(description="times the speed they have")


class Cut(_Happening):
    """Some workers lose the connection."""

    for_s: Positive = Field(description="how long")
    from_workers: bool = Field(True, description="to the others too, not only to the learner")


class LearnerKill(Section):
    """The learner is gone without a word, and comes back from its newest checkpoint."""

    at_s: NonNegative = Field(description="when")
    for_s: Positive = Field(description="how long")


class Rules(Section):
    """Where the swarm does other than echo2p2p does, to compare with what others do."""

    relay: bool = Field(
        True, description="workers pass weights on; false: the learner sends them to everybody"
    )
    generate_while_fetching: bool = Field(
        True,
        description="false: workers stand still while a version arrives, as ECHO-2's capacity formula has it",
    )
    just_in_time: bool = Field(
        True,
        description="work is leased when it will be needed; false: whatever the buffer has room for",
    )
    cost_aware: bool = Field(True, description="false: the learner sees one price, and chooses blindly")


class Scenario(Section):
    """The whole of it."""

    name: RunName = Field(description="also names the run")
    description: str = Field("", description="one line on what it shows")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(0, description="decides everything that is random")
    duration_s: Annotated[float, Field(gt=0, le=30 * 86400)] = Field(description="virtual seconds")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        4, description="steps at the start that the figures leave out: the first fill of the buffer"
    )
    learner: Learner
    policy: Policy
    completions: Completions = Completions()
    workers: Annotated[tuple[Workers, ...], Field(min_length=1, max_length=256)]
    churn: Churn = Churn()
    price_changes: tuple[PriceChange, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()
    cuts: tuple[Cut, ...] = ()
    learner_kills: tuple[LearnerKill, ...] = ()
    rules: Rules = Rules()

    @model_validator(mode="after")
    def _classes_are_there(self) -> Scenario:
        names = [workers.name for workers in self.workers]
        if len(set(names)) < len(names):
            raise ValueError("two classes of workers have the same name")
        if sum(workers.count for workers in self.workers) > MAX_WORKERS:
            raise ValueError(f"there are more than {MAX_WORKERS} workers")
        for happening in (*self.price_changes, *self.slowdowns, *self.cuts):
            if happening.workers not in (None, *names):
                raise ValueError(f"there is no class of workers called {happening.workers}")
        back_s = 0.0
        for kill in self.learner_kills:
            if kill.at_s < back_s:
                raise ValueError("learner_kills must be in order, each after the learner is back")
            back_s = kill.at_s + kill.for_s
        if self.policy.nbytes < self.policy.chunks * self.policy.chunk_kib * 1024:
            raise ValueError(
                "policy.nbytes is less than what its chunks really move; give fewer or smaller ones"
            )
        return self

    @property
    def scale(self) -> float:
        """Real bytes that one byte on the simulated links stands for."""
        return self.policy.nbytes / self.snapshot_bytes

    @property
    def snapshot_bytes(self) -> int:
        """What really moves for a whole snapshot."""
        return self.policy.chunks * self.policy.chunk_kib * 1024

    @property
    def lengths(self) -> Lengths:
        """Of completions, in modelled tokens."""
        each = self.completions.tokens_each
        return Lengths(self.completions.mean_tokens / each, self.completions.tail, self.completions.sigma)

    @cached_property
    def settings(self) -> Settings:
        """What the learner and the workers run with.

        Raises:
            SettingsError: ``learner.settings`` has something that is not a setting.
        """
        whole = {
            "name": self.name,
            "seed": self.seed,
            "learner": {
                "steps": 10**9,
                "max_new_tokens": self.completions.max_tokens // self.completions.tokens_each,
                "max_workers": 100_000,
            },
            "provisioning": {"t_train_prior_s": self.learner.t_train_s},
            "weights": {"chunk_kib": self.policy.chunk_kib},
        }
        return parse(Settings, overlay(whole, self.learner.settings), "learner.settings.")


def load_scenario(source: str | Path) -> Scenario:
    """The scenario in a file, or the shipped one of that name.

    Raises:
        SettingsError: it cannot be read, or is not one; the message names the key and what is allowed.
    """
    file = Path(source)
    if not file.suffix and not file.exists():
        shipped = shipped_scenarios()
        if str(source) not in shipped:
            raise SettingsError(
                f"there is no scenario {str(source)[:100]!r}", hint=f"shipped ones: {', '.join(shipped)}"
            )
        file = shipped[str(source)]
    scenario = parse(Scenario, read_toml(file), "")
    _ = scenario.settings  # an unknown setting is an error of the file, too
    return scenario


def shipped_scenarios() -> dict[str, Path]:
    """The scenarios that come with the package, by name."""
    folder = Path(str(resources.files("echo2p2p.simulation"))) / "scenarios"
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def parse(kind: type[T], tree: Mapping[str, Any], prefix: str) -> T:
    """``tree`` as a ``kind``. Raises SettingsError, naming the keys, which ``prefix`` goes before."""
    try:
        return kind(**tree)
    except ValidationError as error:
        raise SettingsError(
            "; ".join(_explain(each, prefix) for each in error.errors(include_url=False))
        ) from None


def _explain(error: Any, prefix: str) -> str:
    path = prefix + ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{path} is not known"
    if error["type"] == "missing":
        return f"{path} is missing"
    message = error["msg"].removeprefix("Value error, ")
    if not path:
        return str(message)
    return f"{path} = {error['input']!r:.80}: {message[0].lower()}{message[1:]}"
