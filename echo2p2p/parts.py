"""The heavy parts of a node, made of its settings: policy, trainer, task, engine. Everything here blocks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from echo2p2p.errors import SettingsError
from echo2p2p.rundir import RunDir
from echo2p2p.settings import Settings, WorkerSettings

if TYPE_CHECKING:  # they import torch and transformers, which take seconds
    from echo2p2p.data.scoring import TaskScorer
    from echo2p2p.data.task import Task
    from echo2p2p.data.work import TaskSpec
    from echo2p2p.learning.checkpoint import Checkpoint
    from echo2p2p.learning.trainer import GRPOTrainer, TrainerSettings
    from echo2p2p.rollout.engine import InferenceEngine
    from echo2p2p.rollout.transformers_engine import TransformersEngine
    from echo2p2p.weights.adapter import AdapterSpec

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


def torch_device(wanted: str) -> str:
    """``auto`` resolved: CUDA where there is a GPU, the CPU elsewhere. Raises SettingsError if there is none."""
    import torch

    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise SettingsError(f"there is no GPU for device {wanted!r}", hint="use device auto or cpu")
    if wanted != "auto":
        try:
            return str(torch.device(wanted))
        except RuntimeError:
            raise SettingsError(
                f"torch knows no device {wanted!r}", hint="use device auto, cpu, cuda or cuda:1"
            ) from None
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_policy(
    settings: Settings, checkpoint: Checkpoint | None
) -> tuple[TaskSpec, TaskScorer, GRPOTrainer, TransformersEngine]:
    """The blocking part of a learner's start: task, trainer and the engine that evaluates.

    Raises:
        SettingsError: the policy or the task is unusable, or there is no such device.
        VerificationError: the checkpoint is not of this policy.
    """
    from echo2p2p.data.chosen import choose
    from echo2p2p.data.policy import DTYPES, load_config, max_positions
    from echo2p2p.learning.ranks import Ranks, is_started_by_torchrun
    from echo2p2p.learning.sharded import ShardedTrainer
    from echo2p2p.learning.trainer import GRPOTrainer
    from echo2p2p.rollout.transformers_engine import TransformersEngine

    folder = settings.policy.path or SEED_POLICY
    chosen = trainer_settings(settings)
    positions = max_positions(load_config(folder))
    if settings.learner.max_new_tokens >= positions:
        raise SettingsError(
            f"learner.max_new_tokens = {settings.learner.max_new_tokens} leaves a prompt no room in the "
            f"{positions} positions of the policy {folder}",
            hint="lower it, or choose another policy",
        )
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
    return spec, make_scorer(folder, task, spec), trainer, engine


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


def build_engine(
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
    scorer = make_scorer(run_dir.policy, built, task)
    return make_engine(settings.worker, run_dir.policy, adapter), scorer


def make_engine(options: WorkerSettings, policy: Path, adapter: AdapterSpec | None = None) -> InferenceEngine:
    """The engine that the settings name. Raises SettingsError: it is not installed, or the folder is unusable."""
    device, threads = torch_device(options.device), options.threads or None
    if options.engine == "vllm":
        from echo2p2p.rollout.vllm_engine import VLLMEngine

        return VLLMEngine(
            policy,
            options.vllm,
            in_flight=options.in_flight,
            device=device,
            threads=threads,
            adapter=adapter,
        )
    from echo2p2p.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(policy, device=device, threads=threads, adapter=adapter)


def make_scorer(folder: Path, task: Task, spec: TaskSpec) -> TaskScorer:
    """``task`` through the tokenizer of the policy in ``folder``.

    Raises:
        SettingsError: the tokenizer or its chat template is of no use for the task's prompts.
    """
    from echo2p2p.data.policy import eos_token_ids, load_config
    from echo2p2p.data.scoring import TaskScorer
    from echo2p2p.data.tokens import PolicyTokenizer

    tokenizer = PolicyTokenizer(folder, chat_template=spec.chat_template)
    tokenizer.encode_prompt(task.prompt(0))  # what it refuses later is one prompt's failure
    return TaskScorer(task, tokenizer, int(load_config(folder).vocab_size), stop_tokens=eos_token_ids(folder))


def read_assets(folder: Path, adapter: AdapterSpec | None) -> dict[str, bytes]:
    from echo2p2p.weights.adapter import ADAPTER_FILE

    assets = {name: (folder / name).read_bytes() for name in ASSET_NAMES if (folder / name).is_file()}
    return assets if adapter is None else {**assets, ADAPTER_FILE: adapter.encoded()}


def _link_base(base: Path, folder: Path) -> None:
    """Put the weights of ``base`` beside the run's pinned files; they are verified when they are loaded."""
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    for path in base.glob("*.safetensors*"):
        (folder / path.name).symlink_to(path.resolve())
