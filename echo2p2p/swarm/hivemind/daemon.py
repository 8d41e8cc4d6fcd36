"""The p2pd process of one node: started so that it cannot outlive us, and its sockets in one private folder.

Guarantees:

* On Linux p2pd dies with the thread that started it, whatever ended that (return, crash, SIGKILL): the
  kernel sends it SIGKILL (``PR_SET_PDEATHSIG``). So start it from a thread that lasts as long as the node;
  the main thread or the thread of the network's loop, never one of a pool.
* One machine runs at most one node of an identity: the folder is named after the peer id and locked. What a
  killed node left there is removed by the next node of that identity, or after a while by any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from echo2p2p.errors import JoinError
from echo2p2p.swarm.identity import PeerId

_ROOT = Path("/tmp")  # noqa: S108 - every folder is checked to be ours
_STALE_AFTER_S = 600.0
_STOP_GRACE_S = 1.0
_OUTPUT_TAIL_BYTES = 4096

# The check of the parent closes the gap between our fork and the prctl, in which we may have died already.
_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""

_held_here: set[str] = set()


class NodeFolder:
    """The private folder ``/tmp/echo2p2p-<uid>-<peer id>`` with the sockets between this process and p2pd.

    It lies in ``/tmp`` whatever ``TMPDIR`` says: a socket's path is limited to about 100 bytes, and all
    nodes of the machine must agree on the place to notice each other.
    """

    def __init__(self, peer: PeerId) -> None:
        """Take the folder.

        Raises:
            JoinError: another node on this machine uses the identity, or the folder is not ours.
        """
        self.path = _ROOT / f"echo2p2p-{os.getuid()}-{peer}"
        self.control_socket = self.path / "p2pd.sock"
        self.stream_socket = self.path / "streams.sock"
        self._lock_path = self.path / "lock"
        self._fd = -1
        # A POSIX lock is not handed on to forked children, but neither does it keep this process from itself.
        if str(self.path) in _held_here:
            raise _identity_in_use(peer)
        while not self._try_lock(peer):
            pass
        _held_here.add(str(self.path))
        self.remove_sockets()
        _sweep()

    def _try_lock(self, peer: PeerId) -> bool:
        """Lock the folder; False if its previous holder removed it under our hands."""
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            status = self.path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise JoinError(f"{self.path} is not a private folder of this user", hint="remove it")
            self._fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise JoinError(f"{self.path} cannot be used: {error.strerror}") from error
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._fd).st_ino == self._lock_path.stat().st_ino:
                return True
        except FileNotFoundError:
            pass
        except OSError:
            os.close(self._fd)
            raise _identity_in_use(peer) from None
        os.close(self._fd)
        return False

    def remove_sockets(self) -> None:
        """Remove the sockets; p2pd and the stream server make them anew."""
        self.control_socket.unlink(missing_ok=True)
        self.stream_socket.unlink(missing_ok=True)

    def release(self) -> None:
        """Remove the folder and let the next node of this identity in. Safe to call twice."""
        if self._fd < 0:
            return
        _remove(self.path)
        os.close(self._fd)
        self._fd = -1
        _held_here.discard(str(self.path))


def _remove(folder: Path) -> None:
    """Remove a folder whose lock we hold, the lock last."""
    with contextlib.suppress(OSError):
        for name in ("p2pd.sock", "streams.sock", "lock"):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _sweep() -> None:
    """Remove the folders of nodes that were killed: old ones of this user that nobody holds the lock of."""
    for folder in _ROOT.glob(f"echo2p2p-{os.getuid()}-12D3*"):
        # Opening and closing the lock of a node in this very process would release it.
        if str(folder) in _held_here:
            continue
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _STALE_AFTER_S:
                continue
            fd = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
            finally:
                os.close(fd)


def _identity_in_use(peer: PeerId) -> JoinError:
    return JoinError(
        f"a node with the identity {peer} runs on this machine already",
        hint="stop it, or give this node another --identity-path",
    )


def check_ports_free(host_maddrs: Sequence[str]) -> None:
    """See whether the TCP ports in ``host_maddrs`` are free; p2pd itself would share one with another p2pd.

    Raises:
        JoinError: somebody listens there, or this machine does not have that address.
    """
    for address in host_maddrs:
        match address.split("/"):
            case ["", "ip4" | "ip6" as family, host, "tcp", port, *_] if port != "0":
                probe = socket.socket(socket.AF_INET if family == "ip4" else socket.AF_INET6)
                with probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    try:
                        probe.bind((host, int(port)))
                    except OSError as error:
                        raise _cannot_listen(f"{address}: {(error.strerror or str(error)).lower()}") from None


def p2pd_arguments(
    folder: NodeFolder,
    identity_path: Path,
    *,
    host_maddrs: Sequence[str],
    announce_maddrs: Sequence[str],
    relays: Sequence[str],
    use_relay: bool,
    use_auto_relay: bool,
    client_mode: bool,
) -> list[str]:
    """The command line of p2pd. It is not told of bootstrap peers: it would end if none of them answered.

    Args:
        relays: the peers that may relay for a node behind a firewall.
        client_mode: take part in libp2p's own routing as a client only.
    """
    loopback = all("/127.0.0.1/" in address for address in host_maddrs)
    arguments = [
        f"-listen=/unix{folder.control_socket}",
        f"-id={identity_path.absolute()}",
        f"-hostAddrs={','.join(host_maddrs)}",
        "-dhtClient=1" if client_mode else "-dhtServer=1",
        f"-relay={int(use_relay)}",
        f"-autoRelay={int(use_auto_relay)}",
        f"-natPortMap={int(not loopback)}",
        "-autonat=1",
        "-connManager=1",
        "-tls=1",
        "-idleTimeout=30s",
    ]
    if announce_maddrs:
        arguments.append(f"-announceAddrs={','.join(announce_maddrs)}")
    if relays and use_auto_relay:
        arguments.append(f"-trustedRelays={','.join(relays)}")
    return arguments


class Daemon:
    """A running p2pd."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._tail = b""
        self._ready = asyncio.Event()
        self._reader = asyncio.create_task(self._read_output(), name="p2pd output")

    @classmethod
    async def start(cls, binary: Path, arguments: Sequence[str], *, timeout_s: float) -> Daemon:
        """Start p2pd and wait until it takes requests.

        Raises:
            JoinError: it ended or did not get ready within ``timeout_s``; with the last line that it wrote.
        """
        command = [str(binary), *arguments]
        if sys.platform == "linux" and sys.executable:
            command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
        try:
            # A session of its own: Ctrl-C in the terminal reaches us, and we end p2pd in order.
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env={"GOLOG_LOG_LEVEL": "error", **os.environ},
            )
        except OSError as error:
            raise JoinError(
                f"p2pd cannot be started from {binary}: {error.strerror}", hint="reinstall hivemind"
            ) from error
        daemon = cls(process)
        try:
            async with asyncio.timeout(timeout_s):
                await daemon._ready.wait()
        except TimeoutError:
            await daemon.stop()
            raise JoinError(f"p2pd did not start within {timeout_s:.0f} s: {daemon.last_line}") from None
        except BaseException:
            await daemon.stop()
            raise
        if daemon.ended or b"Peer ID:" not in daemon._tail:
            await daemon.stop()
            raise _startup_error(daemon.last_line)
        return daemon

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    @property
    def last_line(self) -> str:
        """The last line that p2pd wrote, or what it panicked about; for error messages."""
        lines = [line.strip()[:300] for line in self._tail.decode(errors="replace").split("\n")]
        panic = (line for line in lines if line.startswith("panic:"))
        return next(panic, next((line for line in reversed(lines) if line), "it wrote nothing"))

    async def wait_ended(self, timeout_s: float) -> bool:
        """Whether p2pd ended within ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """End p2pd, by force if it does not go within a second. Safe to call twice."""
        self._signal(signal.SIGTERM)
        try:
            await self.wait_ended(_STOP_GRACE_S)
        finally:
            self._signal(signal.SIGKILL)
        await self._process.wait()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    def _signal(self, number: int) -> None:
        # Not by the process object: its own check for life takes the exit status away from asyncio's watcher.
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def _read_output(self) -> None:
        # p2pd blocks once the pipe is full, so this goes on for as long as it lives.
        output = self._process.stdout
        if output is None:  # cannot be: it was started with a pipe
            return
        while data := await output.read(65536):
            self._tail = (self._tail + data)[-_OUTPUT_TAIL_BYTES:]
            if b"Peer ID:" in self._tail:
                self._ready.set()
        self._ready.set()


def _startup_error(last_line: str) -> JoinError:
    if "failed to listen" in last_line:
        return _cannot_listen(last_line)
    return JoinError(f"p2pd ended at once: {last_line}")


def _cannot_listen(why: str) -> JoinError:
    return JoinError(
        f"this node cannot listen on {why}", hint="choose another port in --host-maddrs, or 0 for any"
    )
