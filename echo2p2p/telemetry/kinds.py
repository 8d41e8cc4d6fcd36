"""The kinds of events and their fields: the contract between the roles that emit and the views that read.

Units are in the names (``_s``, ``_bytes``, ``_per_hour``, ``_mbit``, ``_usd``) or in the text. Times are
seconds, prices $ an hour, μ completed and rewarded rollouts a second. Every field may be null or absent
where the emitter does not know it. Counters called *cumulative* grow from the start of the process, or from
the value of the checkpoint that the process resumed from; readers accept both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ENVELOPE: Mapping[str, str] = {
    "t": "seconds since the log of this process was opened, monotonic",
    "unix": "seconds since 1970, as far as this machine knows",
    "role": "learner, worker or bootstrap",
    "peer": "peer id of the node that wrote the event",
    "event": "the kind",
}
"""What every event carries; no kind has a field of the same name."""


PUBLISHED_FOR = ("start", "period", "divergence", "window", "recovery", "end")
"""Why a version may have been published."""


@dataclass(frozen=True)
class Kind:
    """One kind of event: who emits it (``any`` for all roles), when, and its fields with their meaning."""

    role: str
    when: str
    fields: Mapping[str, str]


KINDS: Mapping[str, Kind] = {
    "events_lost": Kind(
        "any",
        "the log is writable again after lines could not be written",
        {"count": "lines that are missing before this one"},
    ),
    # --- learner ---------------------------------------------------------------------------------
    "run_started": Kind(
        "learner",
        "the learner starts, or starts again from a checkpoint",
        {
            "run": "name of the run: <name>@<learner peer id>",
            "task": "name of the task",
            "mode": "async or sequential",
            "staleness": "the window S, in versions",
            "publish": "period or adaptive",
            "kappa": "publication period κ, in steps",
            "prompts_per_step": "groups a step",
            "samples_per_prompt": "samples a group",
            "gamma": "safety factor γ of the target",
            "max_steps": "steps after which the run ends",
            "resumed_from": "step of the checkpoint, null for a new run",
            "spend_usd": "as in step, at the checkpoint",
            "all_on_usd": "as in step, at the checkpoint",
        },
    ),
    "worker_joined": Kind(
        "learner",
        "a work session stands",
        {
            "worker": "peer id",
            "gpu": "as advertised",
            "price_per_hour": "as advertised",
            "tokens_per_s": "as advertised",
            "upload_mbit": "as advertised",
        },
    ),
    "worker_left": Kind("learner", "a work session ended", {"worker": "peer id", "reason": "why"}),
    "activation": Kind(
        "learner",
        "the set of active workers was decided anew",
        {
            "active": "peer ids of the active workers",
            "pool": "list of {worker, price_per_hour, mu, rho, state: active, standby or gone}",
            "mu_pool": "Σμ over the active workers",
            "mu_target": "γ·mu_min",
            "mu_min": "the least Σμ that hides generation and broadcast behind training",
            "feasible": "whether the known workers can reach the target",
            "reason": "what made the decision",
        },
    ),
    "published": Kind(
        "learner",
        "a policy version was published",
        {
            "version": "policy version",
            "why": "start, period (κ steps), divergence (the policy has moved far enough), window (the last moment "
            "that S allows), recovery (in place of unsound weights) or end",
            "snapshot_bytes": "size of the whole snapshot",
            "chunks": "number of chunks",
            "patch_bytes": "size of the patch on the version before; 0 if the version travels whole",
            "patches": "patches that it lists: workers behind by no more versions need not fetch the whole",
            "chain_bytes": "size of all these patches together",
            "gate": "largest change of a tensor, in multiples of its RMS, and whose: {change, tensor}",
            "members": "workers that relay it",
            "suspects": "peer ids of members that forward nothing of it, for others reported wrong bytes, or that "
            "nothing came",
            "prepare_s": "from the start of the publication, where T_bcast starts too, to the announcement",
        },
    ),
    "withheld": Kind(
        "learner",
        "the gate refused weights: they were not published",
        {"version": "policy version that they would have been", "reason": "which tensor, and what is wrong"},
    ),
    "rolled_forward": Kind(
        "learner",
        "training goes on from the last good weights, as a new version",
        {
            "version": "the new version",
            "good_version": "whose weights and optimizer it has",
            "prompts": "trained since, and to be trained again",
            "in_a_row": "times since weights that were trained could be published",
        },
    ),
    "disk_full": Kind(
        "any",
        "a version waits for room on the disk",
        {"version": "policy version", "reason": "where there is no room"},
    ),
    "disk_has_room": Kind(
        "any",
        "that wait is over",
        {"version": "policy version", "waited_s": "how long it took"},
    ),
    "found_out": Kind(
        "learner",
        "a worker sent what was not drawn from the policy: it is turned away",
        {"worker": "peer id", "reason": "which test its tokens fail, and by how much"},
    ),
    "ready": Kind(
        "learner",
        "a worker has installed a version and proved it",
        {
            "worker": "peer id",
            "version": "policy version",
            "fingerprint": "of what the engine holds, read back",
            "bytes_from_learner": "chunk bytes that the worker fetched from the learner",
            "bytes_from_peers": "chunk bytes that the worker fetched from other workers",
            "fetch_s": "from the announcement to the last chunk",
            "pause_s": "how long generation stood still for the swap",
            "after_s": "since the start of the publication",
            "arrivals": "list of [milliseconds since the announcement reached the worker, chunk bytes from the "
            "learner by then, chunk bytes from other workers by then]; 8 to 64 of them",
        },
    ),
    "relayed": Kind(
        "learner",
        "the next version goes out, or the run ends: who has sent how much of this one; again if more reports "
        "came in; the last one counts",
        {
            "version": "policy version",
            "reports": "workers that it sums up",
            "from_learner": "chunk bytes that the learner sent, as it counted",
            "sent": "{worker: chunk bytes that it sent to others, as these reported}",
        },
    ),
    "broadcast": Kind(
        "learner",
        "a fraction 1/γ of the active workers holds the version",
        {
            "version": "policy version",
            "t_bcast_s": "T_bcast of this version",
            "ready": "active workers that hold it",
            "active": "active workers",
        },
    ),
    "step": Kind(
        "learner",
        "a training step ended",
        {
            "step": "number of the step, from 1; also the policy version that it made",
            "skipped": "why the policy did not move: no signal, non-finite; empty if it did",
            "non_finite_steps": "steps skipped for a loss or gradient that was not finite, cumulative",
            "groups": "groups received",
            "trained_groups": "of these with any signal: not all rewards equal",
            "tokens": "completion tokens received",
            "trained_tokens": "of these through the loss: groups of equal rewards only with a reference policy",
            "wasted_tokens": "of these that moved nothing by their reward: in groups of equal rewards, in masked "
            "sequences, in skipped updates",
            "completion_length_mean": "tokens a completion",
            "reward_mean": "mean reward over all samples",
            "reward_std": "mean over groups of the standard deviation within",
            "loss": "value of the objective that was minimised",
            "grad_norm": "before clipping",
            "learning_rate": "of this step",
            "weight_mean": "mean truncated importance weight, sampler to learner",
            "weight_max": "largest truncated importance weight",
            "mismatch_max": "largest ratio of a token, learner as the step began to sampler, before C",
            "ratio_max": "largest ratio of the policy to what the clip is centred on",
            "truncated_fraction": "share of tokens whose ratio, learner to sampler, exceeds C",
            "clipped_fraction": "share of tokens that the clip silenced",
            "masked_fraction": "share of tokens in sequences left out for their mismatch",
            "mismatch_kl": "estimated KL(sampler ‖ learner) per token, in nats: mean of e^x − 1 − x over sampled "
            "tokens, x = log π_learner − log π_sampler as the step began, 3 at most (k3)",
            "reference_kl": "estimated KL(learner ‖ reference) per token, in nats",
            "entropy": "mean entropy of the policy per token, in nats",
            "divergence": "KL divergence of the policy from the published one, nats per token, as mismatch_kl and "
            "the ages of the steps' tokens tell it; null before any has",
            "staleness_mean": "mean over tokens, in versions",
            "staleness_max": "oldest token, in versions",
            "staleness_hist": "{staleness: tokens}",
            "t_train_s": "T_train of the step",
            "t_idle_s": "how long the step waited for admissible trajectories",
            "bubble_ratio": "running T_idle / (T_idle + T_train)",
            "mu_pool": "Σμ over the active workers",
            "mu_target": "γ·mu_min",
            "active": "number of active workers",
            "buffered": "groups in the replay buffer",
            "leased": "groups out on lease",
            "dropped": "{reason: groups}, cumulative",
            "dropped_tokens": "completion tokens of groups that came and were not trained, cumulative",
            "spend_usd": "active workers at their advertised prices, cumulative",
            "all_on_usd": "the same if every worker in session were active, cumulative",
        },
    ),
    "eval": Kind(
        "learner",
        "the policy was scored on the held-out set",
        {"step": "after this step; 0 is before training", "reward": "mean reward", "n": "prompts"},
    ),
    "checkpoint": Kind(
        "learner", "a checkpoint was written", {"step": "step", "seconds": "how long it took"}
    ),
    "refused": Kind(
        "learner",
        "admission refused a group",
        {"worker": "peer id", "reason": "why", "index": "prompt index"},
    ),
    "run_finished": Kind(
        "learner",
        "the learner ended on its own accord, finished or told to stop",
        {
            "finished": "false if it was stopped and may come back; true where absent",
            "steps": "steps done",
            "reward_before": "held-out reward before training",
            "reward_after": "held-out reward after training",
            "staleness_max": "oldest token ever trained, in versions",
            "bubble_ratio": "over the run",
            "learner_chunk_bytes": "chunk bytes that the learner sent",
            "peer_chunk_bytes": "chunk bytes that workers sent each other",
            "spend_usd": "as in step",
            "all_on_usd": "as in step",
            "seconds": "wall-clock time of the process",
        },
    ),
    # --- worker ----------------------------------------------------------------------------------
    "joined": Kind("worker", "a work session stands", {"run": "name of the run"}),
    "installed": Kind(
        "worker",
        "a version is installed and proved",
        {
            "version": "policy version",
            "fetch_s": "as in ready",
            "pause_s": "as in ready",
            "bytes_from_learner": "as in ready",
            "bytes_from_peers": "as in ready",
            "patches": "patches that it was made with; 0 if it came whole",
            "arrivals": "as in ready, always up to 64",
            "sources": "{peer: chunk bytes that it sent}, of the 64 who sent most",
        },
    ),
    "version_refused": Kind(
        "worker",
        "a version that the learner signed is not fit to be installed; the one before serves on",
        {"version": "policy version", "reason": "which tensor, and what is wrong"},
    ),
    "superseded": Kind(
        "worker",
        "a fetch was given up for a newer version",
        {"version": "policy version that was not fetched to its end"},
    ),
    "generated": Kind(
        "worker",
        "groups were generated",
        {
            "groups": "finished groups",
            "samples": "completions",
            "tokens": "completion tokens",
            "seconds": "how long it took",
            "version": "policy version",
            "failed_rewards": "completions whose reward could not be computed, and is 0",
        },
    ),
    "verdicts": Kind(
        "worker",
        "the learner judged groups of this worker",
        {"accepted": "groups, since the worker's process started", "refused": "{reason: groups}, likewise"},
    ),
    "session": Kind(
        "worker",
        "a work session opened or ended",
        {"state": "open, ended, lost or turned away", "reason": "why"},
    ),
    "state": Kind(
        "worker",
        "the worker changed state",
        {
            "state": "standby, active, stale (no fresh word of the learner for three of its periods) or leaving",
            "head_age_s": "since the learner's last fresh word",
        },
    ),
    # --- bootstrap -------------------------------------------------------------------------------
    "peers": Kind("bootstrap", "now and then", {"count": "peers in the routing table"}),
}
