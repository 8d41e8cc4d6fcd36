"""How long honest groups wait while others send completions that are made to be dear to score.

``python -m benchmarks.scoring [--seconds 25] [--attackers 0 1 3]``

A real dispatcher scores with math-verify in its real sandbox. Four honest workers deliver a group of 16 right answers
as soon as they are leased one, and draw breath for a quarter of a second; attackers deliver groups whose every
completion holds math-verify until its deadline, at once. The last line on stdout is one JSON object; for each number
of attackers:

* ``groups_per_s``: honest groups accepted a second; ``wait_p50_s``, ``wait_p99_s``, ``wait_max_s``: from a submission
  to its verdict;
* ``refused``: honest groups that were refused; ``attackers_s``: seconds of scoring that attackers had, of three at a
  time; ``attackers_refused``: their groups that were refused, by reason.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from echo2p2p.data import graders
from echo2p2p.data.sandbox import Sandbox
from echo2p2p.data.trajectory import Group, Trajectory, pack_logprobs
from echo2p2p.data.work import Lease, Submit, Verdict
from echo2p2p.learning.dispatcher import Dispatcher
from echo2p2p.learning.ledger import LedgerState, PromptLedger
from echo2p2p.learning.sessions import Session
from echo2p2p.settings import LearnerSettings
from echo2p2p.simulation.engine import ModelledScorer
from echo2p2p.swarm.clock import SystemClock

RIGHT, POISON = 5, 666
TEXTS = {RIGHT: r"so it is \boxed{\frac{14}{2}}", POISON: r"so it is \boxed{(a+b+c+d+e+f)^{60}}"}
HONEST = 4
BREATH_S = 0.25
SETTINGS = LearnerSettings(
    staleness=4, prompts_per_step=64, samples_per_prompt=16, max_new_tokens=4, lease_s=60
)


class MathScorer(ModelledScorer):
    """Completions stand for texts, which math-verify scores."""

    def __init__(self) -> None:
        self._sandbox = Sandbox(f"{graders.__file__}:math")
        self.poisoned_s = 0.0

    def reward(self, index: int, completion: Sequence[int], split: str = "train") -> float:  # noqa: ARG002
        started = time.monotonic()
        try:
            return self._sandbox.call("", TEXTS[completion[0]], "7")
        finally:
            if completion[0] == POISON:
                self.poisoned_s += time.monotonic() - started

    def close(self) -> None:
        self._sandbox.close()


class Told(Session):
    """A worker whose messages are handed to it in this process."""

    def __init__(self, peer: str) -> None:
        stream: Any = SimpleNamespace(remote=peer)
        advert: Any = SimpleNamespace(price_per_hour=1.0, tokens_per_s=100.0)
        super().__init__(stream, advert)
        self.active = True
        self.leases: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self.verdicts: asyncio.Queue[str] = asyncio.Queue()

    def tell(self, message: Any) -> None:
        if isinstance(message, Lease):
            for index in message.indices:
                self.leases.put_nowait((message.lease, index))
        elif isinstance(message, Verdict):
            self.verdicts.put_nowait(message.reason)


async def play(attackers: int, seconds: float) -> dict[str, Any]:
    """One run of so many ``seconds``."""
    scorer = MathScorer()
    events: Any = SimpleNamespace(emit=lambda *_, **__: None)
    dispatcher = Dispatcher(
        SETTINGS,
        ledger=PromptLedger(LedgerState(0, ()), first_lease=0),
        scorer=scorer,
        clock=SystemClock(),
        events=events,
        t_train_s=1.0,
        n_active=lambda: HONEST + attackers,
    )
    dispatcher.published = 0
    waits: list[float] = []
    refused = 0
    reasons: Counter[str] = Counter()

    async def work(session: Told, token: int) -> None:
        nonlocal refused
        poison = token == POISON
        reward = 0.0 if poison else 1.0
        sample = Trajectory([token], pack_logprobs([-1.0]), 0, 0, reward, "stop", failed=poison)
        while True:
            lease, index = await session.leases.get()
            group = Group(index, scorer.prompt_tokens(index), [sample] * SETTINGS.samples_per_prompt)
            started = time.monotonic()
            await dispatcher.receive(session, Submit(lease, group))
            reason = await session.verdicts.get()
            if poison:
                reasons[reason or "accepted"] += 1
                continue
            refused += bool(reason)
            waits.append(time.monotonic() - started)
            await asyncio.sleep(BREATH_S)

    async def train() -> None:
        while True:
            dispatcher.trained(await dispatcher.next_batch())

    async def lease() -> None:
        while True:
            dispatcher.top_up()
            await asyncio.sleep(0.1)

    await asyncio.to_thread(scorer.reward, 0, [RIGHT])
    sessions = [(Told(f"honest-{n}"), RIGHT) for n in range(HONEST)]
    sessions += [(Told(f"attacker-{n}"), POISON) for n in range(attackers)]
    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
            for session, token in sessions:
                session.prove(0)
                dispatcher.add(session)
                tasks.create_task(work(session, token))
            tasks.create_task(train())
            tasks.create_task(lease())
    except TimeoutError:
        pass
    poisoned_s = scorer.poisoned_s
    await asyncio.to_thread(scorer.close)
    return {
        "groups_per_s": round(len(waits) / seconds, 2),
        "wait_p50_s": round(float(np.median(waits)), 3),
        "wait_p99_s": round(float(np.quantile(waits, 0.99)), 3),
        "wait_max_s": round(max(waits), 3),
        "refused": refused,
        "attackers_s": round(poisoned_s, 1),
        "attackers_refused": dict(reasons),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--attackers", type=int, nargs="+", default=[0, 1, 3])
    options = parser.parse_args()
    found = {n: asyncio.run(play(n, options.seconds)) for n in options.attackers}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
