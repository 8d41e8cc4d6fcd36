"""Real nodes, put together from settings: a bootstrap peer, a learner, a worker on the hivemind network.

The roles themselves take their network, clock, store and engine as arguments; this is the one place that
decides which. The command line calls it, and so can any program::

    settings, folder = load([Path("worker.toml")]), RunDir.open(Path("worker"))
    await run_worker(settings, "my-run@12D3KooW…", folder, stop=asyncio.Event(), joined=print)
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from echo2p2p._version import __version__
from echo2p2p.errors import SettingsError
from echo2p2p.parts import (
    SEED_POLICY,
    build_engine,
    load_policy,
    read_assets,
    torch_device,
)
from echo2p2p.rundir import RunDir
from echo2p2p.settings import Settings
from echo2p2p.swarm.directory import Directory
from echo2p2p.swarm.records import Keys, WorkerAdvert
from echo2p2p.telemetry.events import EventLog
from echo2p2p.weights.store import DiskStore

log = logging.getLogger("echo2p2p.roles")

if TYPE_CHECKING:  # they import torch, transformers and hivemind, which take seconds
    from collections.abc import AsyncIterator

    from echo2p2p.learning.checkpoint import Checkpoint
    from echo2p2p.learning.status import RunStatus
    from echo2p2p.swarm.hivemind import HivemindNetwork
    from echo2p2p.weights.exchange import ServerLimits

LINE_SHARE = 0.95
"""Of the learner's uplink, the part that weights may fill: with all of it, leases and verdicts wait in a queue of
chunks in front of the line (at 20 Mbit/s about 0.4 s, with this about 0.02 s, in single runs on a shared machine)."""

Joined = Callable[["HivemindNetwork"], None]


@asynccontextmanager
async def join(
    settings: Settings, identity_path: Path, *, stop: asyncio.Event, client_mode: bool = False
) -> AsyncIterator[HivemindNetwork]:
    """This node's place in the swarm, for the duration of the context.

    Raises:
        JoinError: nobody answers, or not in time.
        asyncio.CancelledError: ``stop`` was set before the node had joined.

    Args:
        client_mode: only look: hold no records for others, serve nobody.
    """
    from echo2p2p.swarm.hivemind import HivemindNetwork

    swarm = settings.swarm
    joining = asyncio.ensure_future(
        HivemindNetwork.join(
            identity_path,
            initial_peers=swarm.initial_peers,
            host_maddrs=swarm.host_maddrs,
            announce_maddrs=swarm.announce_maddrs,
            use_relay=swarm.use_relay,
            use_auto_relay=swarm.use_auto_relay,
            startup_timeout_s=swarm.startup_timeout_s,
            client_mode=client_mode,
        )
    )
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({joining, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not joining.done():
            joining.cancel()
    network = await joining
    try:
        yield network
    finally:
        await network.close()


async def run_bootstrap(settings: Settings, run_dir: RunDir, *, stop: asyncio.Event, joined: Joined) -> None:
    """Be a door to the swarm until ``stop``.

    Args:
        joined: called once, with the network, when others can join.
    """
    async with join(settings, settings.swarm.identity_path or run_dir.identity, stop=stop) as network:
        events = EventLog(run_dir.events, role="bootstrap", peer=network.peer_id, clock=network.clock)
        joined(network)
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(network.wait_failed()),
                tasks.create_task(_count_peers(network, events)),
            ]
            await stop.wait()
            for task in background:
                task.cancel()
        events.close()


async def run_learner(
    settings: Settings,
    run_dir: RunDir,
    *,
    resume: str | None,
    stop: asyncio.Event,
    joined: Joined,
    watch: Callable[[EventLog], AbstractContextManager[Any]] = nullcontext,
    over: Callable[[RunStatus], None] = lambda _: None,
) -> bool:
    """Train until the run is finished or ``stop`` is set; returns whether it is finished.

    Args:
        resume: ``latest``, a step, or None for a new run.
        joined: called once, with the network, when workers can join.
        watch: called with the event log before anything happens; what it returns is held until the end.
        over: called in place of both where the checkpoint is of a run that is finished.

    Raises:
        SettingsError: the policy or the task is unusable, or there is a checkpoint and ``resume`` is None.
        VerificationError: the checkpoint is damaged.
    """
    checkpoint = await asyncio.to_thread(_find_checkpoint, run_dir, resume)
    spec, scorer, trainer, engine = await asyncio.to_thread(load_policy, settings, checkpoint)

    from echo2p2p.data.trajectory import Sampling
    from echo2p2p.learning.journal import Journal
    from echo2p2p.learning.learner import Learner
    from echo2p2p.learning.state import LearnerState, roll_forward
    from echo2p2p.learning.training import ThreadTrainer
    from echo2p2p.rollout.evaluation import Evaluator
    from echo2p2p.weights.publisher import WeightPublisher

    options = settings.learner
    sampling = Sampling(options.temperature, options.top_p, options.max_new_tokens)
    run_dir.write_settings(settings)
    async with join(settings, settings.swarm.identity_path or run_dir.identity, stop=stop) as network:
        run = f"{settings.name}@{network.peer_id}"
        store = DiskStore(run_dir.store, int(settings.weights.max_store_gib * 2**30))
        events = EventLog(run_dir.events, role="learner", peer=network.peer_id, clock=network.clock)
        threads = ThreadTrainer(trainer, run_dir.checkpoints, keep=options.checkpoints_kept)
        publisher = WeightPublisher(
            network,
            run,
            store,
            chunk_bytes=settings.weights.chunk_kib * 1024,
            keep_versions=settings.weights.keep_versions,
            max_patch_share=settings.weights.max_patch_share,
            patch_chain=settings.weights.patch_chain,
            upload_mbit=settings.learner.upload_mbit or math.inf,
            server_limits=server_limits(settings, LINE_SHARE * (settings.learner.upload_mbit or math.inf)),
        )
        await publisher.start()
        state, journal = None, None
        if checkpoint is not None:
            state = msgspec.msgpack.decode(checkpoint.learner_state, type=LearnerState)
            newest = publisher.newest.manifest.version if publisher.newest else -1
            state = roll_forward(state, newest)
        if options.journal:
            # A run that goes on under another number makes other versions than those that were drawn for.
            step = checkpoint.step if checkpoint is not None else None
            resume_from = step if state is not None and state.step == step else None
            open_journal = partial(
                Journal, run_dir.journal, resume_from=resume_from, keep=options.keep_journal
            )
            journal = await asyncio.to_thread(open_journal)
        learner = Learner(
            network,
            run,
            settings,
            trainer=threads,
            scorer=scorer,
            publisher=publisher,
            directory=Directory(network, run, ttl_s=settings.swarm.record_ttl_s),
            assets=read_assets(settings.policy.path or SEED_POLICY, trainer.adapter),
            events=events,
            evaluate=Evaluator(
                engine, scorer, sampling, options.eval_prompts, options.eval_samples, settings.seed
            ),
            task=spec,
            state=state,
            journal=journal,
        )
        try:
            if learner.done:
                over(learner.status())
                return await learner.run()
            joined(network)
            with watch(events):
                async with asyncio.TaskGroup() as tasks:
                    background = [
                        tasks.create_task(network.wait_failed()),
                        tasks.create_task(_on_set(stop, learner.stop)),
                    ]
                    finished = await learner.run()
                    for task in background:
                        task.cancel()
            return finished
        finally:
            if journal is not None:
                journal.close()
            threads.close()
            scorer.close()
            await engine.close()
            events.close()


async def run_worker(
    settings: Settings,
    run: str,
    run_dir: RunDir,
    *,
    stop: asyncio.Event,
    joined: Joined,
    watch: Callable[[EventLog], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Roll out for ``run`` until it is finished or ``stop`` is set.

    Raises:
        SettingsError: the engine that the settings name is not installed.
        TurnedAway: the learner refuses this worker for good.
        FingerprintMismatch: the engine does not hold what was installed.
    """
    Keys(run)
    # The engine's libraries load before the node joins, not when the first version is waiting.
    await asyncio.to_thread(_import_engine, settings)
    await asyncio.to_thread(torch_device, settings.worker.device)

    from echo2p2p.rollout.worker import Worker
    from echo2p2p.weights.lane import FetchLimits
    from echo2p2p.weights.subscriber import WeightSubscriber

    run_dir.write_settings(settings)
    async with join(settings, settings.swarm.identity_path or run_dir.identity, stop=stop) as network:
        store = DiskStore(run_dir.store, int(settings.weights.max_store_gib * 2**30))
        events = EventLog(run_dir.events, role="worker", peer=network.peer_id, clock=network.clock)
        subscriber = WeightSubscriber(
            network,
            run,
            store,
            keep_versions=settings.weights.keep_versions,
            fetch_limits=FetchLimits(download_mbit=settings.weights.download_limit_mbit or math.inf),
            server_limits=server_limits(settings),
        )
        worker = Worker(
            network,
            run,
            settings.worker,
            describe=await asyncio.to_thread(describe, settings),
            subscriber=subscriber,
            directory=Directory(network, run, ttl_s=settings.swarm.record_ttl_s),
            build=lambda task, assets: asyncio.to_thread(build_engine, settings, run_dir, task, assets),
            events=events,
            rng=random.Random(f"{settings.seed} {network.peer_id}"),
        )
        try:
            await subscriber.start()
            joined(network)
            with watch(events):
                async with asyncio.TaskGroup() as tasks:
                    background = [
                        tasks.create_task(network.wait_failed()),
                        tasks.create_task(_on_set(stop, worker.stop)),
                    ]
                    await worker.run()
                    for task in background:
                        task.cancel()
        finally:
            events.close()


def server_limits(settings: Settings, at_most_mbit: float = math.inf) -> ServerLimits:
    """What a node with these settings gives others."""
    from echo2p2p.weights.exchange import ServerLimits

    return ServerLimits(upload_mbit=min(at_most_mbit, settings.weights.upload_limit_mbit or math.inf))


def describe(settings: Settings) -> WorkerAdvert:
    """What a worker with these settings announces; what they leave open is taken from the machine."""
    from echo2p2p.rollout.inventory import look

    here = look()
    worker = settings.worker
    speed = worker.tokens_per_s or worker.limit_tokens_per_s or 0.0
    return WorkerAdvert(
        gpu=worker.gpu or here.gpu,
        gpu_count=here.gpu_count,
        gpu_memory_gib=here.memory_gib,
        upload_mbit=min(worker.upload_mbit, settings.weights.upload_limit_mbit or math.inf),
        download_mbit=min(worker.download_mbit, settings.weights.download_limit_mbit or math.inf),
        price_per_hour=worker.price_per_hour,
        tokens_per_s=speed,
        version=-1,
        engine=worker.engine,
        state="standby",
        software=__version__,
    )


def _find_checkpoint(run_dir: RunDir, resume: str | None) -> Checkpoint | None:
    from echo2p2p.learning.checkpoint import load, load_latest

    root = run_dir.checkpoints
    if resume is None:
        if root.is_dir() and any(root.glob("step-*")):
            raise SettingsError(
                f"{run_dir.path} holds checkpoints of an earlier run",
                hint="go on with --resume latest, or name another folder with --run-dir",
            )
        return None
    if resume != "latest":
        folder = root / f"step-{int(resume):012d}"
        if not folder.is_dir():
            raise SettingsError(f"there is no checkpoint of step {resume} under {root}")
        return load(folder)
    checkpoint, damaged = load_latest(root)
    for error in damaged:
        log.warning("going on from an older checkpoint: %s", error)
    if checkpoint is None:
        raise SettingsError(f"there is no checkpoint under {root}", hint="leave --resume out to start a run")
    return checkpoint


def _import_engine(settings: Settings) -> None:
    import echo2p2p.rollout.transformers_engine
    import echo2p2p.swarm.hivemind  # noqa: F401 - importing is the point

    if settings.worker.engine == "vllm":
        from echo2p2p.rollout.vllm_process import require_vllm

        require_vllm()


async def _on_set(event: asyncio.Event, call: Callable[[], None]) -> None:
    await event.wait()
    call()


async def _count_peers(network: HivemindNetwork, events: EventLog) -> None:
    while True:
        events.emit("peers", count=len(await network.peers()))
        await asyncio.sleep(60)
