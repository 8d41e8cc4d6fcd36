"""The checks that need torch, p2pd or a GPU, in a process of their own: findings as JSON lines on stdout.

``python -m echo2p2p.doctor.probe policy|network ORDER``, ORDER being an :class:`Order` as JSON.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec

from echo2p2p.doctor.finding import Finding, failure, ok, warning
from echo2p2p.errors import (
    Echo2p2pError,
    Interrupted,
    JoinError,
    PeerUnreachable,
    ResourceError,
    SwarmError,
)
from echo2p2p.telemetry.text import human_bytes, short_peer

if TYPE_CHECKING:
    from echo2p2p.settings import WorkerSettings
    from echo2p2p.swarm.hivemind import HivemindNetwork
    from echo2p2p.swarm.network import Stream

START_S = 20.0
PING_S = 10.0
LOOPBACK_S = 15.0
LOOPBACK_BYTES = 32 * 2**20
MAX_OFFSET_S = 3.0
SLOW_MBIT = 200.0
"""p2pd on a busy machine; the internet is seldom faster, so less than this is worth a word."""
_BLOCK = bytes(2**18)
_findings = sys.stdout.buffer
_PROTOCOL = "/echo2p2p/doctor"


class Order(msgspec.Struct, frozen=True):
    """What to look at: the policy folder, the settings of a worker, and this node's addresses."""

    policy: str
    worker: dict[str, Any]
    initial_peers: tuple[str, ...]
    host_maddrs: tuple[str, ...]
    announce_maddrs: tuple[str, ...]


def say(finding: Finding) -> None:
    _findings.write(msgspec.json.encode(finding) + b"\n")
    _findings.flush()


# --- torch and the engine


def policy(order: Order) -> None:
    """torch and its device; then the engine is built from the policy folder and generates."""
    from echo2p2p.parts import torch_device
    from echo2p2p.settings import WorkerSettings

    settings = WorkerSettings(**order.worker)
    try:
        device = torch_device(settings.device)
    except Echo2p2pError as error:
        say(failure("gpu", error.message, error.hint, error.exit_code))
        return
    say(_gpu(device))
    started = time.monotonic()
    try:
        folder = Path(order.policy)
        weights = any(folder.glob("*.safetensors"))
        tokens, took_s = asyncio.run(_generate(folder, settings, weights=weights))
    except Interrupted as error:
        say(failure("engine", error.message, "worker.engine = transformers may run this policy here"))
    except ResourceError as error:
        say(failure("engine", error.message, "a smaller policy, or a GPU with more memory", error.exit_code))
    except Echo2p2pError as error:
        say(failure("engine", error.message, error.hint or "check the policy folder", error.exit_code))
    else:
        ready_s = time.monotonic() - started - took_s
        speed = f"{tokens / took_s:,.0f} tokens/s in a small batch on {device}"
        say(
            ok("engine", f"{settings.engine}: {order.policy} loads in {ready_s:.1f} s and generates: {speed}")
        )


def _gpu(device: str) -> Finding:
    import torch

    from echo2p2p.rollout.inventory import look

    here = look()
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        return ok("gpu", f"{here.gpu_count} × {name}, {human_bytes(free)} of {human_bytes(total)} free")
    if here.gpu_count:
        return warning(
            "gpu",
            f"{here.gpu_count} × {here.gpu} is there, but torch {torch.__version__} works on {device}",
            "install torch for this CUDA driver, or set the device",
        )
    return ok("gpu", "none; this machine works on its CPU")


async def _generate(folder: Path, settings: WorkerSettings, *, weights: bool) -> tuple[int, float]:
    """Tokens that were generated with the policy in ``folder``, and the seconds that took.

    Args:
        weights: take those in the folder; otherwise the architecture's own.
    """
    from echo2p2p.data.policy import build_model
    from echo2p2p.data.trajectory import Sampling
    from echo2p2p.parts import make_engine
    from echo2p2p.rollout.installed_weights import memory_errors
    from echo2p2p.weights.snapshot import from_state_dict

    with memory_errors("building the engine"):
        snapshot = from_state_dict(
            build_model(folder, dtype=None, device="cpu", weights=weights).state_dict()
        )
        engine = make_engine(settings, folder)
    try:
        await engine.install(snapshot, 0)
        for seed in range(2):  # the first one warms up
            started = time.monotonic()
            groups = await engine.generate(
                [[1], [2], [3], [4]], n_samples=4, sampling=Sampling(1.0, 1.0, 16), seed=seed
            )
            took_s = time.monotonic() - started
    finally:
        await engine.close()
    return sum(len(completion.tokens) for group in groups for completion in group), took_s


# --- the network


async def network(order: Order) -> None:
    """p2pd starts on the addresses given; the bootstrap peers answer; bytes go through two daemons."""
    from echo2p2p.swarm.hivemind import HivemindNetwork

    with TemporaryDirectory() as folder:
        started = time.monotonic()
        try:
            node = await HivemindNetwork.join(
                Path(folder) / "a",
                host_maddrs=order.host_maddrs,
                announce_maddrs=order.announce_maddrs,
                startup_timeout_s=START_S,
            )
        except Echo2p2pError as error:
            say(
                failure("p2pd", error.message, error.hint or "see whether p2pd may run here", error.exit_code)
            )
            return
        try:
            took_s = time.monotonic() - started
            say(ok("p2pd", f"starts in {took_s:.1f} s and answers on {len(node.addresses())} addresses"))
            # One line a peer: once it is connected, its other addresses are not dialled any more.
            by_peer: dict[str, list[str]] = {}
            for address in order.initial_peers:
                by_peer.setdefault(address.rpartition("/")[2], []).append(address)
            for addresses in by_peer.values():
                say(await _ping(node, addresses))
            say(await _loopback(node, Path(folder) / "b"))
        finally:
            await node.close()


async def _ping(node: HivemindNetwork, addresses: list[str]) -> Finding:
    check = f"bootstrap peer {short_peer(addresses[0].rpartition('/')[2])}"
    try:
        answer = await node.ping(addresses, timeout_s=PING_S)
    except PeerUnreachable as error:
        return failure(
            check,
            f"{' and '.join(addresses)}: {error.message}",
            "is it running, is the address right, does a firewall drop outgoing TCP?",
            JoinError.exit_code,
        )
    says = f"answers in {1000 * answer.round_trip_s:.0f} ms, its clock is {answer.offset_s:+.2f} s off"
    if abs(answer.offset_s) > MAX_OFFSET_S:
        return failure(check, says, f"run NTP; {MAX_OFFSET_S:g} s are allowed", JoinError.exit_code)
    if not answer.available:
        return warning(check, f"{says}, but it cannot reach this node", "--use-auto-relay, or open the port")
    return ok(check, says)


async def _loopback(node: HivemindNetwork, identity: Path) -> Finding:
    """Bytes a second from a second node to this one, on this machine."""
    from echo2p2p.swarm.hivemind import HivemindNetwork

    done = asyncio.Event()

    async def count(stream: Stream) -> None:
        received = 0
        while received < LOOPBACK_BYTES and (data := await stream.read(2**20)):
            received += len(data)
        done.set()

    try:
        async with asyncio.timeout(START_S + LOOPBACK_S):
            await node.handle(_PROTOCOL, count)
            other = await HivemindNetwork.join(identity, startup_timeout_s=START_S)
            try:
                other.know(node.peer_id, node.addresses())
                stream = await other.open_stream(node.peer_id, _PROTOCOL, timeout_s=PING_S)
                started = time.monotonic()
                for _ in range(LOOPBACK_BYTES // len(_BLOCK)):
                    await stream.write(_BLOCK)
                await done.wait()
                mbit = LOOPBACK_BYTES * 8e-6 / (time.monotonic() - started)
                await stream.close()
            finally:
                await other.close()
    except (SwarmError, TimeoutError) as error:
        why = str(error) or f"not within {START_S + LOOPBACK_S:g} s"
        return failure(
            "loopback", f"two nodes on this machine do not reach each other: {why}", "a firewall?", 4
        )
    says = f"{mbit:,.0f} Mbit/s through two daemons on this machine"
    if mbit < SLOW_MBIT:
        return warning(
            "loopback", says, "weights will not come faster; is something else using the processor?"
        )
    return ok("loopback", says)


def main() -> None:
    global _findings
    # Whatever libraries and their processes print goes to stderr.
    _findings = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    order = msgspec.json.decode(sys.argv[2], type=Order)
    if sys.argv[1] == "policy":
        policy(order)
    else:
        asyncio.run(network(order))


if __name__ == "__main__":
    main()
