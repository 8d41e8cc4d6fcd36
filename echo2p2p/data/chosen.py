"""The task that a run's settings choose, on both sides: what the learner says of it, and how a worker builds it.

Guarantees: a worker runs no code but what is installed under a task's name or named in its own settings, and opens no
file that only the learner names; nothing is rolled out where the two hold different files or libraries.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from echo2p2p.data.curriculum import staged
from echo2p2p.data.sandbox import Sandbox, SandboxLimits
from echo2p2p.data.task import HELD_OUT, TRAIN, Task, TurnTask, make_task
from echo2p2p.data.work import Stage, TaskSpec
from echo2p2p.errors import Echo2p2pError, SettingsError

LOCAL_OPTIONS = ("path",)
"""Options that say where this machine keeps something. A pin says what it must be."""
BUILD_S = 300.0
"""A task may take so long until its first prompts are there; files of a gigabyte take minutes."""

OPTIONS_NAME_CODE = ("verifiers",)
"""Tasks whose options say what code is run, and what is said to it. A worker must have been told the same."""


Options = Mapping[str, str | int | float | bool]


class StageChoice(Protocol):
    """A stage of a curriculum in the settings."""

    @property
    def start(self) -> int: ...
    @property
    def options(self) -> Options: ...


class TaskChoice(Protocol):
    """The section ``task`` of the settings, as far as it matters here."""

    @property
    def name(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def options(self) -> Options: ...
    @property
    def stages(self) -> Sequence[StageChoice]: ...
    @property
    def reward(self) -> str: ...
    @property
    def reward_timeout_s(self) -> float: ...
    @property
    def reward_memory_gib(self) -> float: ...
    @property
    def reward_reads(self) -> Sequence[Path]: ...
    @property
    def chat_template(self) -> bool: ...


class RewardedTask:
    """A task whose completions are scored by somebody's own function: (prompt, completion, answer) to a number.

    ``answer`` is the task's own, empty where it has none.
    """

    def __init__(self, task: Task, sandbox: Sandbox) -> None:
        self._task = task
        self._sandbox = sandbox

    @property
    def name(self) -> str:
        return self._task.name

    @property
    def pins(self) -> Mapping[str, str]:
        return {**pins_of(self._task), "reward": self._sandbox.digest}

    def prompt(self, index: int, split: str = TRAIN) -> str:
        return self._task.prompt(index, split)

    def answer(self, index: int, split: str = TRAIN) -> str:
        return self._task.answer(index, split)

    def reward(self, index: int, completion: str, split: str = TRAIN) -> float:
        """Raises RewardFailed where the function gives no number in time."""
        prompt, answer = self._task.prompt(index, split), self._task.answer(index, split)
        return self._sandbox.call(prompt, completion, answer)

    def close(self) -> None:
        close(self._task)
        self._sandbox.close()


class _RewardedTurnTask(RewardedTask):
    """The same for episodes: ``completion`` is the model's turns, one below the other."""

    def __init__(self, task: Task, sandbox: Sandbox) -> None:
        super().__init__(task, sandbox)
        assert isinstance(task, TurnTask)
        self._turns: TurnTask = task
        self.max_turns, self.turn_tokens = task.max_turns, task.turn_tokens

    def respond(self, index: int, actions: Sequence[str], split: str = TRAIN) -> str | None:
        return self._turns.respond(index, actions, split)

    def episode_reward(self, index: int, actions: Sequence[str], split: str = TRAIN) -> float:
        return self.reward(index, "\n".join(actions), split)


def choose(settings: TaskChoice) -> tuple[TaskSpec, Task]:
    """The learner's side: the task of ``settings``, ready to score, and what workers are told of it. Blocks.

    Raises:
        SettingsError: there is no such task, it refuses an option, or the reward cannot be used.
    """
    spec = TaskSpec(
        settings.name,
        settings.seed,
        dict(settings.options),
        stages=[Stage(stage.start, dict(stage.options)) for stage in settings.stages],
        reward=settings.reward.rpartition(":")[2],
        chat_template=settings.chat_template,
    )
    task = _make(spec, {}, settings, settings.reward)
    return msgspec.structs.replace(spec, pins=dict(pins_of(task))), task


def build(spec: TaskSpec, own: TaskChoice) -> Task:
    """A worker's side: the run's task, from the learner's word and the worker's ``own`` settings. Blocks.

    Raises:
        SettingsError: the worker does not have or does not allow what the run needs, or holds something else.
    """
    if ":" in spec.name and own.name != spec.name:
        raise SettingsError(
            f"the run's task is {spec.name}, code that this worker has not been told to run",
            hint=f"install its package, and set task.name = {spec.name!r} if you trust it",
        )
    if spec.name in OPTIONS_NAME_CODE and (
        own.name != spec.name
        or dict(own.options) != spec.options
        or [Stage(stage.start, dict(stage.options)) for stage in own.stages] != spec.stages
    ):
        raise SettingsError(
            f"the run's task {spec.name} runs code that this worker has not been told to run: {spec.options}",
            hint=f"if you trust it, install it and set task.name = {spec.name!r} and the same task.options",
        )
    if spec.reward and own.reward.rpartition(":")[2] != spec.reward:
        raise SettingsError(
            f"the run has a reward of its own, {spec.reward}, which this worker has not been told to run",
            hint=f"get its file, and set task.reward = 'path.py:{spec.reward}' if you trust it",
        )
    local = {}
    for name in LOCAL_OPTIONS:
        if not any(name in options for options in (spec.options, *(stage.options for stage in spec.stages))):
            continue
        if name not in own.options:
            raise SettingsError(
                f"the run's task {spec.name} needs a file, and this worker has not been told which",
                hint=f"get it, and set task.options.{name}",
            )
        local[name] = own.options[name]
    task = _make(spec, local, own, own.reward if spec.reward else "")
    held = pins_of(task)
    for name in sorted({*held, *spec.pins}):
        if held.get(name) != spec.pins.get(name):
            close(task)
            raise SettingsError(
                f"the learner's {name} of task {spec.name} is {_shown(spec.pins.get(name))}, "
                f"this worker's is {_shown(held.get(name))}",
                hint="both need the same; 16 hexadecimal digits are the digest of what a file holds",
            )
    return task


def pins_of(task: Task) -> Mapping[str, str]:
    """What worker and learner must hold alike for ``task``."""
    pins: Mapping[str, str] = getattr(task, "pins", {})
    return pins


def close(task: Task) -> None:
    """End what ``task`` has started."""
    end = getattr(task, "close", None)
    if end is not None:
        end()


def _make(spec: TaskSpec, local: Options, own: TaskChoice, reward: str) -> Task:
    """``local`` takes the place of the run's options."""
    made = [
        _make_in_time(spec.name, spec.seed, {**spec.options, **stage.options, **local})
        for stage in (Stage(0, {}), *spec.stages)
    ]
    task = staged([0, *(stage.start for stage in spec.stages)], made) if spec.stages else made[0]
    if not reward:
        return task
    sandbox = Sandbox(
        reward,
        SandboxLimits(
            call_s=own.reward_timeout_s,
            memory_bytes=int(own.reward_memory_gib * 2**30),
            readable=tuple(str(path.resolve()) for path in own.reward_reads),
        ),
    )
    sandbox.start()
    return _RewardedTurnTask(task, sandbox) if isinstance(task, TurnTask) else RewardedTask(task, sandbox)


def _make_in_time(name: str, seed: int, options: Options) -> Task:
    """A task with its first prompts made.

    A thread cannot be ended: one that hangs in a task is left behind, and ends with the process.

    Raises:
        SettingsError: as the task does, or it was not ready within :data:`BUILD_S`.
    """
    outcome: queue.SimpleQueue[Task | Exception] = queue.SimpleQueue()

    def make() -> None:
        try:
            task = make_task(name, seed=seed, options=options)
            for split in (TRAIN, HELD_OUT):
                task.prompt(0, split)
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            outcome.put(error)
        else:
            outcome.put(task)

    threading.Thread(target=make, daemon=True, name="task").start()
    try:
        made = outcome.get(timeout=BUILD_S)
    except queue.Empty:
        shown = ", ".join(f"{option} = {value!r}" for option, value in options.items()) or "its defaults"
        raise SettingsError(
            f"the task {name} was not ready within {BUILD_S:g} s with {shown}", hint="use smaller values"
        ) from None
    if isinstance(made, Echo2p2pError):
        raise made
    if isinstance(made, Exception):
        raise SettingsError(f"the task {name} cannot make its first prompts: {made!r}") from made
    return made


def _shown(pin: str | None) -> str:
    return pin[:16] if pin else "missing"
