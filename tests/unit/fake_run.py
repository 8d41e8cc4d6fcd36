"""Event logs of runs that never were: a learner with a pool of workers, seen from outside."""

import math
from pathlib import Path

import numpy as np

from echo2p2p.telemetry.events import EventLog

LEARNER = "12D3KooWLearnerLearnerLearnerLearnerLearnerLearner00"
RUN = f"sums@{LEARNER}"
GPUS = [("RTX 4090", 0.34, 9.0), ("RTX 3090", 0.17, 4.2), ("A100 80GB", 1.19, 15.0), ("RTX 5090", 0.42, 12.5)]


class FakeClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def unix(self) -> float:
        return 1_790_000_000 + self.now


def peer_id(index: int) -> str:
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz123456789"
    digest = np.random.default_rng(index).choice(list(letters), 40)
    return "12D3KooW" + "".join(digest) + "Qz9x"


def fake_arrivals(rng: np.random.Generator, t: float, from_learner: float, from_peers: float) -> list:
    """What a worker would report of a fetch that took ``t`` seconds."""
    times = np.sort(rng.uniform(0.05, t, 24)) * 1000
    grown = [np.cumsum(rng.dirichlet(np.ones(24))) * nbytes for nbytes in (from_learner, from_peers)]
    return [[int(value) for value in row] for row in zip(times, *grown, strict=True)]


class FakeRun:
    """Emits what a learner would, with ``workers`` workers, to the log at ``path`` (None: nowhere)."""

    def __init__(self, path: Path | None, *, workers: int = 6, seed: int = 0, max_steps: int = 60) -> None:
        self.clock = FakeClock()
        self.log = EventLog(path, role="learner", peer=LEARNER, clock=self.clock)
        self.rng = np.random.default_rng(seed)
        self.max_steps = max_steps
        self.pool = []
        for index in range(workers):
            gpu, price, mu = GPUS[index % len(GPUS)]
            self.pool.append(
                {
                    "worker": peer_id(index),
                    "gpu": gpu,
                    "price_per_hour": round(price * self.rng.uniform(0.85, 1.3), 3),
                    "mu": mu * self.rng.uniform(0.8, 1.15),
                    "state": "standby",
                }
            )
        self.spend = self.all_on = 0.0
        self.dropped = {"outside the window": 0, "lease expired": 0}
        self.train_s = self.idle_s = 0.0
        self.version = 0

    def start(self, resumed_from: int | None = None) -> None:
        self.log.emit(
            "run_started",
            run=RUN,
            task="arithmetic",
            mode="asynchronous",
            staleness=4,
            kappa=3,
            prompts_per_step=32,
            samples_per_prompt=8,
            gamma=1.1,
            max_steps=self.max_steps,
            resumed_from=resumed_from,
        )
        for worker in self.pool:
            self.clock.now += 0.7
            self.log.emit(
                "worker_joined",
                worker=worker["worker"],
                gpu=worker["gpu"],
                price_per_hour=worker["price_per_hour"],
                tokens_per_s=1500.0,
                upload_mbit=40.0,
            )

    def activate(self, target: float = 28.0, reason: str = "throughput below target") -> None:
        total, active = 0.0, []
        for worker in sorted(self.pool, key=lambda w: w["price_per_hour"] / w["mu"]):
            if worker["state"] == "gone":
                continue
            worker["state"] = "active" if total < target else "standby"
            if worker["state"] == "active":
                total += worker["mu"]
                active.append(worker["worker"])
        pool = [
            {key: w[key] for key in ("worker", "price_per_hour", "mu", "state")}
            | {"rho": w["price_per_hour"] / w["mu"]}
            for w in self.pool
        ]
        self.log.emit(
            "activation",
            active=active,
            pool=pool,
            mu_pool=total,
            mu_target=target,
            mu_min=target / 1.1,
            feasible=total >= target,
            reason=reason,
        )

    def active(self) -> list[dict]:
        return [worker for worker in self.pool if worker["state"] == "active"]

    def leave(self, worker: dict, reason: str) -> None:
        worker["state"] = "gone"
        self.log.emit("worker_left", worker=worker["worker"], reason=reason)

    def publish(self) -> None:
        self.version += 3
        size = 6.5e6 * self.rng.uniform(0.8, 1.3)
        active = self.active()
        self.log.emit(
            "published",
            version=self.version,
            snapshot_bytes=540_000_000,
            patch_bytes=int(size),
            chunks=7,
            members=len(active),
            prepare_s=0.4,
        )
        sent = dict.fromkeys([worker["worker"] for worker in active], 0)
        for worker in active:
            share = size / len(active)
            t = self.rng.uniform(1.0, 3.0)
            for other in active:
                if other is not worker:
                    sent[other["worker"]] += int(share)
            self.log.emit(
                "ready",
                worker=worker["worker"],
                version=self.version,
                bytes_from_learner=int(share),
                bytes_from_peers=int(size - share),
                fetch_s=t,
                pause_s=0.2,
                after_s=0.4 + t + 0.2 + self.rng.exponential(0.2),
                arrivals=fake_arrivals(self.rng, t, share, size - share),
            )
        self.clock.now += 1.5
        self.log.emit(
            "broadcast",
            version=self.version,
            t_bcast_s=self.rng.uniform(2.2, 3.4),
            ready=max(len(active) - 1, 0),
            active=len(active),
        )
        self.log.emit("relayed", version=self.version, reports=len(active), from_learner=int(size), sent=sent)

    def step(self, step: int) -> None:
        train, idle = self.rng.uniform(8, 9), max(0.0, self.rng.normal(9 / (step + 1), 0.3))
        self.clock.now += train + idle
        self.train_s += train
        self.idle_s += idle
        hours = (train + idle) / 3600
        self.spend += hours * sum(w["price_per_hour"] for w in self.active())
        self.all_on += hours * sum(w["price_per_hour"] for w in self.pool if w["state"] != "gone")
        ages = self.rng.multinomial(20_000, [0.05, 0.31, 0.42, 0.2, 0.02])
        self.dropped["outside the window"] += int(self.rng.integers(0, 3))
        curve = 0.12 + 0.75 / (1 + math.exp(-(step - 25) / 8))
        mu_pool = sum(w["mu"] for w in self.active())
        self.log.emit(
            "step",
            step=step,
            skipped="",
            reward_mean=np.float32(curve + self.rng.normal(0, 0.025)),
            reward_std=0.35 - 0.2 * curve,
            loss=self.rng.normal(0, 0.02),
            grad_norm=abs(self.rng.normal(0.6, 0.15)),
            entropy=1.2 - 0.6 * curve,
            mismatch_kl=abs(self.rng.normal(2e-3, 5e-4)),
            weight_max=1.8,
            clipped_fraction=0.01,
            truncated_fraction=0.004,
            masked_fraction=0.002,
            mismatch_max=2.7,
            ratio_max=1.3,
            wasted_tokens=int(ages.sum() * 0.2),
            trained_groups=26,
            non_finite_steps=0,
            staleness_mean=float((ages * np.arange(5)).sum() / ages.sum()),
            staleness_max=int(np.flatnonzero(ages).max()),
            staleness_hist={age: int(n) for age, n in enumerate(ages) if n},
            tokens=int(ages.sum()),
            groups=32,
            t_train_s=train,
            t_idle_s=idle,
            bubble_ratio=self.idle_s / (self.idle_s + self.train_s),
            mu_pool=mu_pool,
            mu_target=28.0,
            active=len(self.active()),
            buffered=int(self.rng.integers(10, 50)),
            leased=int(self.rng.integers(30, 90)),
            dropped=self.dropped,
            spend_usd=self.spend,
            all_on_usd=self.all_on,
        )

    def evaluate(self, step: int) -> None:
        curve = 0.1 + 0.75 / (1 + math.exp(-(step - 25) / 8))
        self.log.emit("eval", step=step, reward=curve, n=64)

    def finish(self, steps: int) -> None:
        self.log.emit("run_finished", finished=True, steps=steps, seconds=self.clock.now - 1000)
        for worker in self.pool:
            if worker["state"] != "gone":
                self.leave(worker, "the run is finished")
        self.log.close()

    def play(self, steps: int) -> None:
        """A whole run: joins, activations, a worker that leaves, refusals, evaluations."""
        self.start()
        self.activate(reason="run started")
        self.evaluate(0)
        for step in range(1, steps + 1):
            self.step(step)
            if step % 3 == 0:
                self.publish()
            if step == steps // 2 and len(self.active()) > 1:
                gone = self.active()[0]
                self.log.emit("refused", worker=gone["worker"], reason="reward differs", index=step)
                self.leave(gone, "no sign of life for 30 s")
                self.activate(reason="a worker left")
            if step % 10 == 0:
                self.evaluate(step)
                self.log.emit("checkpoint", step=step, seconds=0.4)
        self.finish(steps)
