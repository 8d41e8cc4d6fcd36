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
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from echo2p2p._version import __version__
from echo2p2p.config import Settings, WorkerSettings
from echo2p2p.errors import SettingsError
from echo2p2p.rundir import RunDir
from echo2p2p.swarm.directory import Directory
from echo2p2p.swarm.records import Keys, WorkerAdvert
from echo2p2p.telemetry.events import EventLog
from echo2p2p.weights.store import DiskStore

log = logging.getLogger("echo2p2p.roles")

if TYPE_CHECKING:  # they import torch, transformers and hivemind, which take seconds
    from collections.abc import AsyncIterator

    from echo2p2p.data.scoring import TaskScorer
    from echo2p2p.data.task import Task
    from echo2p2p.data.work import TaskSpec
    from echo2p2p.learning.checkpoint import Checkpoint
    from echo2p2p.learning.trainer import GRPOTrainer, TrainerSettings
    from echo2p2p.rollout.engine import InferenceEngine
    from echo2p2p.rollout.transformers_engine import TransformersEngine
    from echo2p2p.swarm.hivemind import HivemindNetwork
    from echo2p2p.weights.adapter import AdapterSpec
    from echo2p2p.weights.exchange import ServerLimits

SEED_POLICY = Path(__file__).parent / "seed_policy"
ASSET_NAMES = (
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
"""The files of a policy folder that every worker needs, and gets from the learner, besides the weights."""

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
) -> bool:
    """Train until the run is finished or ``stop`` is set; returns whether it is finished.

    Args:
        resume: ``latest``, a step, or None for a new run.
        watch: called with the event log before anything happens; what it returns is held until the end.

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
            assets=_read_assets(settings.policy.path or SEED_POLICY, trainer.adapter),
            events=events,
            evaluate=Evaluator(
                engine, scorer, sampling, options.eval_prompts, options.eval_samples, settings.seed
            ),
            task=spec,
            state=state,
            journal=journal,
        )
        try:
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
            build=lambda task, assets: asyncio.to_thread(_build_engine, settings, run_dir, task, assets),
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


def torch_device(wanted: str) -> str:
    """``auto`` resolved: CUDA where there is a GPU, the CPU elsewhere. Raises SettingsError if there is none."""
    import torch

    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise SettingsError(f"there is no GPU for device {wanted!r}", hint="use device auto or cpu")
    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"


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


def load_policy(
    settings: Settings, checkpoint: Checkpoint | None
) -> tuple[TaskSpec, TaskScorer, GRPOTrainer, TransformersEngine]:
    """The blocking part of a learner's start: task, trainer and the engine that evaluates.

    Raises:
        SettingsError: the policy or the task is unusable, or there is no such device.
        VerificationError: the checkpoint is not of this policy.
    """
    from echo2p2p.data.policy import DTYPES
    from echo2p2p.learning.ranks import Ranks, is_started_by_torchrun
    from echo2p2p.learning.sharded import ShardedTrainer
    from echo2p2p.learning.trainer import GRPOTrainer
    from echo2p2p.rollout.transformers_engine import TransformersEngine

    folder = settings.policy.path or SEED_POLICY
    chosen = trainer_settings(settings)
    trainer: GRPOTrainer
    if is_started_by_torchrun():
        trainer = ShardedTrainer(folder, chosen, Ranks(chosen.device))
    else:
        trainer = GRPOTrainer(folder, chosen)
    if checkpoint is not None:
        trainer.load_state(checkpoint.trainer)
    engine = TransformersEngine(
        folder,
        device=chosen.device,
        dtype=DTYPES[chosen.publish_dtype],
        threads=chosen.threads,
        adapter=trainer.adapter,
    )
    spec, task = choose(settings.task)
    return spec, _scorer(folder, task, spec), trainer, engine


def trainer_settings(settings: Settings) -> TrainerSettings:
    """The trainer's part of ``settings``, with what they leave open decided by this machine."""
    from echo2p2p.learning.objective import Objective
    from echo2p2p.learning.trainer import AdapterSettings, TrainerSettings

    device = torch_device(settings.policy.device)
    options, optimizer, lora = settings.learner, settings.learner.optimizer, settings.policy.lora
    dtype = settings.policy.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    published = dtype if settings.policy.publish_dtype == "auto" else settings.policy.publish_dtype
    return TrainerSettings(
        objective=Objective(
            kind=optimizer.objective,
            normalisation=optimizer.normalisation,
            ratio_level=optimizer.ratio_level,
            proximal=optimizer.proximal,
            clip_low=optimizer.clip_low,
            clip_high=optimizer.clip_high,
            importance_cap=optimizer.importance_cap,
            mask_measure=optimizer.mask_measure,
            mask_low=optimizer.mask_low,
            mask_high=optimizer.mask_high,
            kl_beta=optimizer.kl_beta,
            scale_by_std=optimizer.scale_by_std,
            balance_beta=optimizer.balance_beta,
        ),
        learning_rate=optimizer.learning_rate,
        betas=(optimizer.beta1, optimizer.beta2),
        weight_decay=optimizer.weight_decay,
        warmup_steps=optimizer.warmup_steps,
        max_grad_norm=optimizer.max_grad_norm,
        updates_per_step=optimizer.updates_per_step,
        gradient_checkpointing=optimizer.gradient_checkpointing,
        temperature=options.temperature,
        max_completion_tokens=options.max_new_tokens,
        micro_batch_tokens=optimizer.micro_batch_tokens,
        logit_bytes=optimizer.logit_mib * 2**20,
        compute_dtype=dtype,
        publish_dtype=published,
        adapter=AdapterSettings(lora.rank, lora.alpha, lora.targets) if lora.rank else None,
        device=device,
        threads=options.threads or None,
    )


def follow_learner(settings: Settings) -> None:
    """Train as rank 1 or above of torchrun until rank 0, which is the learner, says stop. Blocks.

    Raises:
        SettingsError: the policy is unusable here.
    """
    import signal

    from echo2p2p.learning.ranks import Ranks
    from echo2p2p.learning.sharded import follow
    from echo2p2p.learning.trainer import GRPOTrainer

    # A signal to stop goes to all ranks; rank 0 needs the others for its last checkpoint, and then lets them go.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    chosen = trainer_settings(settings)
    ranks = Ranks(chosen.device)
    follow(GRPOTrainer(settings.policy.path or SEED_POLICY, chosen, ranks), ranks)
    ranks.close()


def _build_engine(
    settings: Settings, run_dir: RunDir, task: TaskSpec, assets: Mapping[str, bytes]
) -> tuple[InferenceEngine, TaskScorer]:
    """Unpack the run's pinned policy files and make engine and scorer of them. Blocks."""
    from echo2p2p.data.chosen import build
    from echo2p2p.weights.adapter import ADAPTER_FILE, decode_spec

    built = build(task, settings.task)
    run_dir.policy.mkdir(exist_ok=True)
    for name in ASSET_NAMES:
        if name in assets:
            (run_dir.policy / name).write_bytes(assets[name])
        else:
            (run_dir.policy / name).unlink(missing_ok=True)
    adapter = None
    if ADAPTER_FILE in assets:
        adapter = decode_spec(assets[ADAPTER_FILE])
        _link_base(settings.policy.path or SEED_POLICY, run_dir.policy)
    engine = make_engine(settings.worker, run_dir.policy, adapter)
    return engine, _scorer(run_dir.policy, built, task)


def make_engine(options: WorkerSettings, policy: Path, adapter: AdapterSpec | None = None) -> InferenceEngine:
    """The engine that the settings name. Raises SettingsError if it is not installed, or cannot do adapters."""
    device, threads = torch_device(options.device), options.threads or None
    if options.engine == "vllm":
        if adapter is not None:
            raise SettingsError(
                "the vllm engine takes whole policies, this run publishes adapters",
                hint="use --set worker.engine=transformers",
            )
        from echo2p2p.rollout.vllm_engine import VLLMEngine

        return VLLMEngine(policy, options.vllm, in_flight=options.in_flight, device=device, threads=threads)
    from echo2p2p.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(policy, device=device, threads=threads, adapter=adapter)


def _scorer(folder: Path, task: Task, spec: TaskSpec) -> TaskScorer:
    from echo2p2p.data.policy import load_config
    from echo2p2p.data.scoring import TaskScorer
    from echo2p2p.data.tokens import PolicyTokenizer

    tokenizer = PolicyTokenizer(folder, chat_template=spec.chat_template)
    return TaskScorer(task, tokenizer, int(load_config(folder).vocab_size))


def _read_assets(folder: Path, adapter: AdapterSpec | None) -> dict[str, bytes]:
    from echo2p2p.weights.adapter import ADAPTER_FILE

    assets = {name: (folder / name).read_bytes() for name in ASSET_NAMES if (folder / name).is_file()}
    return assets if adapter is None else {**assets, ADAPTER_FILE: adapter.encoded()}


def _link_base(base: Path, folder: Path) -> None:
    """Put the weights of ``base`` beside the run's pinned files; they are verified when they are loaded."""
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    for path in base.glob("*.safetensors*"):
        (folder / path.name).symlink_to(path.resolve())


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
