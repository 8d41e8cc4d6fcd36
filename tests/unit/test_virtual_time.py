"""The virtual loop: time jumps, order holds, and a simulation that cannot go on is seen."""

from __future__ import annotations

import asyncio
import time

import pytest

from echo2p2p.swarm import virtual_time
from echo2p2p.swarm.virtual_time import (
    START_UNIX,
    DeadlockError,
    LivelockError,
    VirtualClock,
    VirtualLoop,
    run_virtual,
)


def _clock() -> VirtualClock:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return VirtualClock(loop)


def test_a_year_passes_at_once() -> None:
    async def main() -> float:
        await asyncio.sleep(365 * 86400.0)
        return asyncio.get_running_loop().time()

    started = time.perf_counter()
    assert run_virtual(main, limit_s=400 * 86400.0) == 365 * 86400.0
    assert time.perf_counter() - started < 1.0


def test_timers_fire_in_order_and_exactly_on_time() -> None:
    async def main() -> list[tuple[float, float]]:
        fired: list[tuple[float, float]] = []

        async def wait(seconds: float) -> None:
            await asyncio.sleep(seconds)
            fired.append((seconds, asyncio.get_running_loop().time()))

        async with asyncio.TaskGroup() as group:
            for seconds in (3.3, 0.1, 2.7, 0.7, 1e-7, 86400.1):
                group.create_task(wait(seconds))
        return fired

    fired = run_virtual(main)
    assert fired == [(seconds, seconds) for seconds in sorted(seconds for seconds, _ in fired)]


def test_timers_of_equal_time_fire_in_the_order_of_setting() -> None:
    async def main() -> list[int]:
        fired: list[int] = []
        loop = asyncio.get_running_loop()
        for number in range(500):
            loop.call_at(7.0, fired.append, number)
        await asyncio.sleep(10)
        return fired

    assert run_virtual(main) == list(range(500))


def test_cancelled_timers_neither_fire_nor_pile_up() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        kept: list[float] = []
        loop.call_later(5000, lambda: kept.append(loop.time()))
        for _ in range(10_000):
            async with asyncio.timeout(86400):
                await asyncio.sleep(0.1)
        assert len(loop._timers) < 3000
        await asyncio.sleep(5000)
        assert kept == [5000]
        assert loop.time() < 7000

    run_virtual(main)


def test_a_deadlock_is_reported_with_the_tasks_that_wait() -> None:
    async def waits_for_godot() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(waits_for_godot(), name="vladimir")

    with pytest.raises(DeadlockError, match="vladimir"):
        run_virtual(main)


def test_tasks_that_never_rest_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "MAX_TURNS_AT_ONE_INSTANT", 1000)

    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(LivelockError, match=r"stands still at 0\.000 s"):
        run_virtual(main)


def test_a_run_that_does_not_end_meets_its_limit() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(LivelockError, match="not done after 61 s"):
        run_virtual(main, limit_s=60)


def test_a_deadline_fires_while_everything_else_waits() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == 5


def test_the_clock_follows_the_loop_and_its_own_skew() -> None:
    async def main() -> None:
        clock = _clock()
        assert (clock.monotonic(), clock.unix()) == (0, START_UNIX)
        await asyncio.sleep(10)
        assert (clock.monotonic(), clock.unix()) == (10, START_UNIX + 10)
        clock.skew_s = -100
        assert (clock.monotonic(), clock.unix()) == (10, START_UNIX - 90)

    run_virtual(main())


def test_blocking_work_runs_in_place_and_takes_no_time() -> None:
    async def main() -> int:
        clock = _clock()
        result = await clock.offload(lambda: 6 * 7)
        assert clock.monotonic() == 0
        return result

    assert run_virtual(main, start_unix=5.0) == 42


def test_what_main_leaves_behind_is_cancelled() -> None:
    ended: list[str] = []

    async def lingers() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append("cancelled")

    async def main() -> None:
        main.task = asyncio.get_running_loop().create_task(lingers())  # type: ignore[attr-defined]
        await asyncio.sleep(1)

    run_virtual(main)
    assert ended == ["cancelled"]


def test_a_hundred_thousand_events_take_a_second_or_two() -> None:
    async def ticks() -> None:
        for _ in range(200):
            await asyncio.sleep(1)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(250):
                group.create_task(ticks())

    started = time.process_time()
    run_virtual(main)
    assert time.process_time() - started < 2.0
