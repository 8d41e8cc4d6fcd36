"""How fast workers are chosen, and how far from the cheapest choice there is.

``python -m benchmarks.activation``

The last line on stdout is one JSON object:

* ``ms_10000``: the slowest median, over kinds of price lists, of one decision between 10,000 workers, ms;
  ``ms_loop_10000``: of one turn of the closed loop over them;
* ``gap_to_milp``: for pools of 50, 200 and 1,000 workers the worst of (cost / optimum − 1) over kinds × seeds,
  ``mean_gap`` the mean, ``greedy_gap`` the worst of greedy by ρ alone, ``pools`` how many pools each stands for.
  The optimum is scipy's HiGHS, to a relative gap of 1e-6. Where it does not prove one in its time (``unproved``
  pools), its best answer stands for it, and a gap may be negative.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from echo2p2p.provisioning.activation import Activator, Candidate, by_cost, cheapest

MakePool = Callable[[int, np.random.Generator], tuple[np.ndarray, np.ndarray]]


def _random(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return rng.uniform(0.1, 4, n), rng.uniform(0.5, 20, n)


def _market(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Three kinds of GPU at list prices, each machine a little off."""
    kind = rng.integers(0, 3, n)
    price, mu = np.array([0.35, 0.8, 3.06])[kind], np.array([2.0, 4.0, 9.0])[kind]
    return price * rng.lognormal(0, 0.1, n), mu * rng.lognormal(0, 0.2, n)


def _two_prices(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return np.where(rng.random(n) < 0.5, 0.35, 3.06), rng.uniform(1, 10, n)


def _one_huge(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """One that is cheap a rollout and could nearly do it alone."""
    price, mu = rng.uniform(0.2, 0.6, n), rng.uniform(1, 3, n)
    mu[0] = mu.sum() * 0.4
    price[0] = 0.1 * mu[0]
    return price, mu


def _several_huge(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A tenth of the workers would do the smallest target alone, at a good price for all that they could do."""
    price, mu = rng.uniform(0.2, 0.6, n), rng.uniform(1, 3, n)
    big = rng.random(n) < 0.1
    mu[big] *= 0.04 * n
    price[big] = 0.1 * mu[big] * rng.uniform(0.8, 1.2, int(big.sum()))
    return price, mu


def _equal(n: int, _: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return np.full(n, 0.35), np.full(n, 2.0)


def _rho_against_size(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The bigger, the dearer a rollout."""
    mu = rng.uniform(1, 50, n)
    return mu**1.2 * 0.1, mu


def _rho_with_size(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The bigger, the cheaper a rollout: the last one taken overshoots."""
    mu = rng.uniform(1, 50, n)
    return mu**0.8 * 0.1, mu


def _near_ties(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    mu = rng.uniform(1, 20, n)
    return mu * 0.1 * (1 + rng.normal(0, 1e-6, n)), mu


def _lumpy(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A few big sizes that never add up to the target, with a fixed part in the price."""
    mu = rng.choice([16.0, 17.0, 19.0, 31.0], n)
    return 0.5 + mu * 0.1 + rng.uniform(0, 0.01, n), mu


KINDS: dict[str, MakePool] = {
    "random": _random,
    "market": _market,
    "two prices": _two_prices,
    "one huge": _one_huge,
    "several huge": _several_huge,
    "equal": _equal,
    "rho against size": _rho_against_size,
    "rho with size": _rho_with_size,
    "near ties": _near_ties,
    "lumpy": _lumpy,
}
SHARES = (0.03, 0.15, 0.45, 0.8)
"""Targets, as parts of what the whole pool delivers."""


def make_pool(kind: str, n: int, seed: int) -> list[Candidate]:
    """``n`` workers of a kind of price list."""
    price, mu = KINDS[kind](n, np.random.default_rng(seed))
    return [Candidate(f"w{i:05}", float(price[i]), float(mu[i])) for i in range(n)]


def optimum(pool: list[Candidate], target: float, *, time_limit_s: float = 2.0) -> tuple[float, bool]:
    """$/h of the cheapest set that reaches ``target`` as HiGHS finds it, and whether it proved that.

    Raises:
        ValueError: it found none.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    found = milp(
        np.array([c.price_per_hour for c in pool]),
        constraints=LinearConstraint(np.array([c.mu for c in pool]), lb=target),
        integrality=np.ones(len(pool)),
        bounds=Bounds(0, 1),
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-6},
    )
    if found.fun is None:
        raise ValueError(found.message)
    return float(found.fun), found.status == 0


def greedy(pool: list[Candidate], target: float) -> float:
    """$/h of greedy by ρ alone."""
    price = mu = 0.0
    for c in by_cost(pool):
        if mu >= target:
            break
        price += c.price_per_hour
        mu += c.mu
    return price


def gaps(n: int, seeds: int) -> list[tuple[float, float, bool]]:
    """(gap, gap of greedy, whether the optimum is proved) for every kind and seed; shares take turns."""
    found = []
    for kind in KINDS:
        worst = 0.0
        for seed in range(seeds):
            pool = make_pool(kind, n, seed)
            target = SHARES[seed % len(SHARES)] * sum(c.mu for c in pool)
            best, proved = optimum(pool, target)
            cost = sum(c.price_per_hour for c in cheapest(pool, target))
            found.append((cost / best - 1, greedy(pool, target) / best - 1, proved))
            worst = max(worst, found[-1][0])
        print(f"  {n:>5} {kind:<18} worst gap {worst:.5%}")
    return found


def time_of(decide: Callable[[], object], repeats: int) -> float:
    """Median seconds."""
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        decide()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=24, help="pools of each kind and size")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()

    decision_s, loop_s = [], []
    for kind in KINDS:
        pool = make_pool(kind, 10_000, 0)
        for share in SHARES:
            target = share * sum(c.mu for c in pool)
            decision_s.append(time_of(lambda p=pool, t=target: cheapest(p, t), arguments.repeats))
            chosen = {c.peer for c in cheapest(pool, target)}
            running = [Candidate(c.peer, c.price_per_hour, c.mu, c.peer in chosen) for c in pool]
            activator = Activator(persistence_s=20, margin=0.25)
            loop_s.append(
                time_of(lambda a=activator, p=running, t=target: a.decide(0, p, t), arguments.repeats)
            )
        print(f" 10000 {kind:<18} {1e3 * max(decision_s[-len(SHARES) :]):.1f} ms")
    figures: dict[str, object] = {
        "ms_10000": round(1e3 * max(decision_s), 2),
        "ms_loop_10000": round(1e3 * max(loop_s), 2),
    }
    worst, mean, greedy_worst, unproved = {}, {}, {}, {}
    for n in (50, 200, 1000):
        found = gaps(n, arguments.seeds)
        worst[str(n)] = round(max(g for g, _, _ in found), 6)
        mean[str(n)] = round(statistics.fmean(g for g, _, _ in found), 6)
        greedy_worst[str(n)] = round(max(g for _, g, _ in found), 6)
        unproved[str(n)] = sum(not proved for *_, proved in found)
    figures |= {
        "gap_to_milp": worst,
        "mean_gap": mean,
        "greedy_gap": greedy_worst,
        "unproved": unproved,
        "pools": arguments.seeds * len(KINDS),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
