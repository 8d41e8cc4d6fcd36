"""Plays a scenario: the real learner and workers under virtual time, and everything that happens to them.

The same scenario gives the same events, to the last byte.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2p2p.errors import Echo2p2pError
from echo2p2p.learning.learner import Learner
from echo2p2p.rollout.worker import Worker
from echo2p2p.simulation.outcome import Books, Outcome, judge
from echo2p2p.simulation.scaling import ScaledLog, link_limits, manners, weigher
from echo2p2p.simulation.scenario import Cut, LearnerKill, PriceChange, Scenario, Slowdown, Workers
from echo2p2p.simulation.swarm import SimulatedRun, WorkerModel
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.memory_peer import MemoryNetwork
from echo2p2p.swarm.virtual_time import VirtualClock, VirtualLoop, run_virtual

_PROGRESS_REPORTS = 100
_STOP_S = 600.0
"""Virtual seconds that the roles have to end in."""

Progress = Callable[[float, int, int], None]
"""Told now and then: virtual seconds, steps, active workers."""


def play(scenario: Scenario, *, events: Path | None = None, progress: Progress | None = None) -> Outcome:
    """Run ``scenario`` to its end.

    Args:
        events: where the learner's event log goes.

    Raises:
        SettingsError: the event log cannot be written, or a setting of the run is none.
        Echo2p2pError, ExceptionGroup: a role failed in a way that ends it, which no scenario should bring about.
    """

    async def perform() -> Outcome:
        return await _Stage(scenario, events, progress).play()

    return run_virtual(perform, limit_s=scenario.duration_s + 86400)


@dataclass
class _Actor:
    """One worker on the stage."""

    number: int
    group: Workers
    model: WorkerModel
    worker: Worker
    network: MemoryNetwork
    task: asyncio.Task[None]
    gone: bool = False


class _Stage:
    """One play of one scenario."""

    def __init__(self, scenario: Scenario, events: Path | None, progress: Progress | None) -> None:
        self._scenario = scenario
        self._progress = progress
        self._events_path = events
        self._rng = random.Random(f"{scenario.seed} stage")
        self._people = random.Random(f"{scenario.seed} people")
        self._numbers = iter(range(2**31))
        self._actors: list[_Actor] = []
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._counts = {"joined": 0, "left": 0, "killed": 0, "learner killed": 0}

    async def play(self) -> Outcome:
        scenario = self._scenario
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        async with MemorySwarm(
            scenario.seed,
            limits=link_limits(scenario.policy.chunk_kib * 1024),
            weigh=weigher(scenario.scale),
        ) as self._swarm:
            self._run = self._new_run()
            log = ScaledLog(
                self._events_path, role="learner", peer=self._run.identity.peer_id, clock=VirtualClock(loop)
            )
            log.scale, log.tokens_each = scenario.scale, scenario.completions.tokens_each
            self._run.events = log
            self._books = Books(scenario)
            log.subscribe(self._books.take)
            try:
                await self._perform(loop)
            finally:
                log.close()
            return judge(scenario, self._books, self._run.trainer.trained, dict(self._counts))

    def _new_run(self) -> SimulatedRun:
        scenario = self._scenario
        return SimulatedRun(
            self._swarm,
            scenario.settings,
            t_train_s=scenario.learner.t_train_s,
            snapshot_bytes=scenario.snapshot_bytes,
            install_s=scenario.policy.install_s,
            learner_upload_mbit=scenario.learner.upload_mbit / scenario.scale,
            seed=scenario.seed,
            lengths=scenario.lengths,
            jitter=scenario.learner.jitter,
            changed_share=scenario.policy.changed_share,
            drift_kl=scenario.learner.drift_kl,
            manners=manners(scenario),
        )

    async def _perform(self, loop: VirtualLoop) -> None:
        await self._raise_learner()
        for group in self._scenario.workers:
            for _ in range(group.count):
                await self._enter(group)
        happenings = [
            loop.create_task(coroutine)
            for coroutine in (
                self._report_progress(),
                self._churn(),
                *(self._change_price(change) for change in self._scenario.price_changes),
                *(self._slow_down(slowdown) for slowdown in self._scenario.slowdowns),
                *(self._cut(cut) for cut in self._scenario.cuts),
                *(self._kill_learner(kill) for kill in self._scenario.learner_kills),
            )
        ]
        try:
            for happening in happenings:
                happening.add_done_callback(self._note_failure)
            async with asyncio.timeout(self._scenario.duration_s):
                await self._failed
        except TimeoutError:
            pass
        finally:
            for happening in happenings:
                happening.cancel()
            await asyncio.gather(*happenings, return_exceptions=True)
        await self._end()

    async def _end(self) -> None:
        if self._learner is not None:
            self._learner.stop()
            async with asyncio.timeout(_STOP_S + 4 * self._scenario.learner.t_train_s):
                await self._life
        for actor in self._actors:
            actor.worker.stop()
        async with asyncio.timeout(_STOP_S + 4 * self._scenario.learner.t_train_s):
            await asyncio.gather(*(actor.task for actor in self._actors))

    # --- the cast

    async def _raise_learner(self) -> None:
        self._learner: Learner | None
        self._learner, self._learner_network = await self._run.start_learner()
        self._life = asyncio.get_running_loop().create_task(self._learner.run())
        self._life.add_done_callback(self._note_failure)

    async def _enter(self, group: Workers) -> None:
        scenario, rng = self._scenario, self._people
        number = next(self._numbers)
        price = group.price_per_hour * (1 + group.price_spread * rng.uniform(-1, 1))
        speed = group.tokens_per_s * (1 + group.speed_spread * rng.uniform(-1, 1))
        each = scenario.completions.tokens_each
        model = WorkerModel(
            price_per_hour=price if scenario.rules.cost_aware else self._books.flat_price,
            tokens_per_s=speed / each,
            upload_mbit=group.upload_mbit / scenario.scale,
            download_mbit=group.download_mbit / scenario.scale,
            gpu=group.name,
            sequence_tokens_per_s=(group.sequence_tokens_per_s or float("inf")) / each,
            delay_s=group.delay_s,
        )
        worker, network = await self._run.start_worker(model, number)
        self._books.price(network.peer_id, price)
        task = asyncio.get_running_loop().create_task(worker.run())
        actor = _Actor(number, group, model, worker, network, task)
        self._actors.append(actor)

        def note_end(task: asyncio.Task[None]) -> None:
            if not actor.gone:
                self._note_failure(task)

        task.add_done_callback(note_end)

    def _note_failure(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _exit(self, actor: _Actor, *, kill: bool) -> None:
        actor.gone = True
        self._actors.remove(actor)
        peer = actor.network.peer_id
        if kill:
            self._swarm.kill(actor.network)
            actor.task.cancel()
            await asyncio.gather(actor.task, return_exceptions=True)
        else:
            actor.worker.stop()
            try:
                await actor.task
            except* Echo2p2pError:
                pass  # it was cut off, say, and had nobody to say goodbye to
            await actor.network.close()
        del self._run.workers[peer], self._run.engines[peer]

    def _chosen(self, group: str | None, share: float) -> list[_Actor]:
        there = [actor for actor in self._actors if group in (None, actor.group.name)]
        return self._rng.sample(there, round(share * len(there)))

    # --- what happens

    async def _report_progress(self) -> None:
        loop = asyncio.get_running_loop()
        while self._progress is not None:
            await asyncio.sleep(self._scenario.duration_s / _PROGRESS_REPORTS)
            self._progress(loop.time(), self._books.steps, self._books.active)

    async def _churn(self) -> None:
        churn = self._scenario.churn
        rates = [churn.joins_per_hour, churn.leaves_per_hour, churn.kills_per_hour]
        while sum(rates) > 0:
            await asyncio.sleep(self._rng.expovariate(sum(rates) / 3600))
            what = self._rng.choices(["join", "leave", "kill"], rates)[0]
            if what == "join":
                weights = [group.count for group in self._scenario.workers]
                await self._enter(self._rng.choices(self._scenario.workers, weights)[0])
                self._counts["joined"] += 1
            elif self._actors:
                await self._exit(self._rng.choice(self._actors), kill=what == "kill")
                self._counts["killed" if what == "kill" else "left"] += 1

    async def _change_price(self, change: PriceChange) -> None:
        await asyncio.sleep(change.at_s)
        for actor in self._chosen(change.workers, change.share):
            price = self._books.prices[actor.network.peer_id] * change.factor
            self._books.price(actor.network.peer_id, price)
            if self._scenario.rules.cost_aware:
                actor.worker.announce(price)

    async def _slow_down(self, slowdown: Slowdown) -> None:
        await asyncio.sleep(slowdown.at_s)
        engines = [
            self._run.engines[actor.network.peer_id]
            for actor in self._chosen(slowdown.workers, slowdown.share)
        ]
        for engine in engines:
            engine.tokens_per_s *= slowdown.factor
        await asyncio.sleep(slowdown.for_s)
        for engine in engines:
            engine.tokens_per_s /= slowdown.factor

    async def _cut(self, cut: Cut) -> None:
        await asyncio.sleep(cut.at_s)
        chosen = self._chosen(cut.workers, cut.share)
        pairs = list(self._cut_pairs(chosen, from_workers=cut.from_workers))
        for one, other in pairs:
            self._swarm.cut(one, other)
        await asyncio.sleep(cut.for_s)
        for one, other in pairs:
            self._swarm.heal(one, other)

    def _cut_pairs(
        self, chosen: list[_Actor], *, from_workers: bool
    ) -> Iterator[tuple[MemoryNetwork, MemoryNetwork]]:
        inside = {actor.number for actor in chosen}
        for actor in chosen:
            yield actor.network, self._learner_network
            if from_workers:
                for other in self._actors:
                    if other.number not in inside:
                        yield actor.network, other.network

    async def _kill_learner(self, kill: LearnerKill) -> None:
        await asyncio.sleep(kill.at_s)
        self._life.remove_done_callback(self._note_failure)
        self._learner = None
        self._counts["learner killed"] += 1
        self._books.learner_is_gone()
        self._swarm.kill(self._learner_network)
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)
        await asyncio.sleep(kill.for_s)
        await self._raise_learner()
