"""How many trajectories of 1,000 tokens a learner takes in on one core.

``python -m benchmarks.ingest``

The path is the real one, from the bytes of a frame on a work session to a batch that the trainer would be given:
read and decode, claim (lease, sender, window), contents (prompt, token ids, log-probabilities, the reward computed
again through tokenizer and task), replay buffer, journal (in the folder for temporary files), verdict, window,
batch, books. Only the socket and the training are left out. Groups are of 16 samples, batches of 32 groups; every
batch makes a version.

The last line on stdout is one JSON object:

* ``trajectories_per_s``: a second of processor time over all threads, so on one core whatever else the machine
  does; best of a few rounds. ``wall_trajectories_per_s``: the same on the clock;
* ``decode_us``, ``check_us``: of them, per trajectory, the decoding of the frame and the check of the contents;
* ``plain_check_us``: what it beats: the same check one token at a time, with the same answers;
* ``mb_per_s``: 10⁶ bytes of frames taken in, a second of processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import echo2p2p
from echo2p2p.data.policy import load_config
from echo2p2p.data.scoring import TaskScorer
from echo2p2p.data.task import make_task
from echo2p2p.data.tokens import PolicyTokenizer
from echo2p2p.data.trajectory import Group, Trajectory, pack_logprobs
from echo2p2p.data.work import FromWorker, Submit
from echo2p2p.learning.admission import check_contents
from echo2p2p.learning.dispatcher import Dispatcher
from echo2p2p.learning.journal import Journal
from echo2p2p.learning.ledger import PromptLedger
from echo2p2p.learning.sessions import Session
from echo2p2p.settings import LearnerSettings
from echo2p2p.swarm.clock import SystemClock
from echo2p2p.swarm.messages import decode, encode, receive
from echo2p2p.swarm.records import WorkerAdvert
from echo2p2p.telemetry.events import EventLog

_WORKER = "worker"
_OPTIONS = LearnerSettings(prompts_per_step=32, samples_per_prompt=16, max_new_tokens=1000)
_LEASE = 1
"""The one lease under which everything comes."""


class _Frames:
    """A stream that holds frames to be read, and takes whatever is written."""

    remote = _WORKER

    def __init__(self, bodies: list[bytes]) -> None:
        self._data = memoryview(b"".join(len(body).to_bytes(4, "big") + body for body in bodies))
        self._at = 0

    async def read_exactly(self, n: int) -> bytes:
        self._at += n
        return bytes(self._data[self._at - n : self._at])

    async def write(self, data: bytes) -> None: ...

    async def close(self) -> None: ...


def main() -> None:
    arguments = _parser().parse_args()
    scorer = _scorer()
    _say(f"making {arguments.batches} batches")
    bodies = [encode(Submit(_LEASE, group)) for group in _groups(scorer, arguments.batches)]
    trajectories = len(bodies) * _OPTIONS.samples_per_prompt
    best, best_wall = math.inf, math.inf
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            cpu, wall = asyncio.run(_take_in(bodies, scorer, Path(folder)))
        best, best_wall = min(best, cpu), min(best_wall, wall)
        _say(f"{trajectories / cpu:,.0f} trajectories a second of processor time")
    groups = [decode(body, FromWorker).group for body in bodies[:64]]
    figures = {
        "trajectories_per_s": trajectories / best,
        "wall_trajectories_per_s": trajectories / best_wall,
        "decode_us": _microseconds(lambda: [decode(body, FromWorker) for body in bodies[:64]]),
        "check_us": _microseconds(lambda: [_check(group, scorer) for group in groups]),
        "plain_check_us": _microseconds(lambda: [_plain_check(group, scorer) for group in groups]),
        "mb_per_s": sum(map(len, bodies)) / best / 1e6,
        "tokens": _OPTIONS.max_new_tokens,
        "trajectories": trajectories,
    }
    print(json.dumps(figures))


async def _take_in(bodies: list[bytes], scorer: TaskScorer, folder: Path) -> tuple[float, float]:
    """Admit all of ``bodies`` and draw them as batches; returns seconds of processor time and on the clock."""
    clock = SystemClock()
    ledger = PromptLedger(first_lease=_LEASE)
    ledger.lease(_WORKER, len(bodies), now=clock.monotonic(), duration_s=3600)
    events = EventLog(None, role="learner", peer="learner", clock=clock)
    journal = Journal(folder)
    dispatcher = Dispatcher(
        _OPTIONS,
        ledger=ledger,
        scorer=scorer,
        clock=clock,
        events=events,
        t_train_s=1.0,
        n_active=lambda: 1,
        journal=journal,
    )
    stream = _Frames(bodies)
    session = Session(stream, _advert())  # type: ignore[arg-type]
    dispatcher.add(session)
    telling = asyncio.ensure_future(session.write_outbox())
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(len(bodies) // _OPTIONS.prompts_per_step):
        if dispatcher.version % _OPTIONS.publication_period == 0:
            dispatcher.captured(durable=dispatcher.version)
        session.prove(dispatcher.version)
        for _ in range(_OPTIONS.prompts_per_step):
            message: FromWorker = await receive(
                stream,  # type: ignore[arg-type]
                FromWorker,
                max_bytes=dispatcher.max_message_bytes,
                timeout_s=15,
            )
            await dispatcher.receive(session, message)
        dispatcher.trained(await dispatcher.next_batch())
        dispatcher.version += 1
    spent = time.process_time() - cpu, time.perf_counter() - wall
    journal.close()
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
    if session.refused or ledger.n_trained != len(bodies):
        raise SystemExit(f"{session.refused} groups were refused: {dict(dispatcher.dropped)}")
    return spent


def _check(group: Group, scorer: TaskScorer) -> bool:
    n_samples, longest = _OPTIONS.samples_per_prompt, _OPTIONS.max_new_tokens
    return isinstance(
        check_contents(group, scorer=scorer, n_samples=n_samples, max_new_tokens=longest), Group
    )


def _plain_check(group: Group, scorer: TaskScorer) -> bool:
    """The contents of a group, one token at a time."""
    prompt = scorer.prompt_tokens(group.index)
    for sample in group.samples:
        for token in sample.completion:
            if not 0 <= token < scorer.vocab_size:
                return False
        for (value,) in struct.iter_unpack("<f", sample.logprobs):
            if not -100 <= value <= 1e-4:
                return False
        if abs(scorer.reward(group.index, sample.completion) - sample.reward) > 1e-6:
            return False
    return prompt == group.prompt


def _microseconds(work: Callable[[], object]) -> float:
    """Per trajectory of 64 groups, best of three."""
    times = []
    for _ in range(3):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return 1e6 * min(times) / (64 * _OPTIONS.samples_per_prompt)


def _groups(scorer: TaskScorer, batches: int) -> list[Group]:
    rng = np.random.default_rng(0)
    groups = []
    for index in range(batches * _OPTIONS.prompts_per_step):
        version = index // _OPTIONS.prompts_per_step
        samples = []
        for _ in range(_OPTIONS.samples_per_prompt):
            tokens = rng.integers(0, scorer.vocab_size, _OPTIONS.max_new_tokens).tolist()
            logprobs = -rng.exponential(1, len(tokens)).astype(np.float32)
            reward = scorer.reward(index, tokens)
            samples.append(Trajectory(tokens, pack_logprobs(logprobs), version, version, reward, "length"))
        groups.append(Group(index, scorer.prompt_tokens(index), samples))
    return groups


def _scorer() -> TaskScorer:
    folder = Path(echo2p2p.__file__).parent / "seed_policy"
    task = make_task("arithmetic", options={"partial": True})
    return TaskScorer(task, PolicyTokenizer(folder), int(load_config(folder).vocab_size))


def _advert() -> WorkerAdvert:
    return WorkerAdvert(
        gpu="none",
        gpu_count=0,
        gpu_memory_gib=0,
        upload_mbit=100,
        download_mbit=100,
        price_per_hour=0,
        tokens_per_s=0,
        version=-1,
        engine="none",
        state="active",
        software="benchmark",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ingest", description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=4, help="of 32 groups of 16 trajectories each")
    parser.add_argument("--rounds", type=int, default=3)
    return parser


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
