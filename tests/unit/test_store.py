import errno
import os
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from echo2p2p.errors import ChunkError, OutOfDisk, ResourceError
from echo2p2p.weights.manifest import Trusted
from echo2p2p.weights.segments import MAX_SEGMENTS, Segments
from echo2p2p.weights.store import ChunkStore, DiskStore, MemoryStore

BLOBS = [bytes([at]) * (at + 1) for at in range(6)]
DIGESTS = [blake3(blob).digest() for blob in BLOBS]


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ChunkStore:
    return MemoryStore() if request.param == "memory" else DiskStore(tmp_path)


def files_in(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_what_was_put_is_got(store: ChunkStore) -> None:
    assert store.get(DIGESTS[0]) is None
    assert not store.has(DIGESTS[0])
    store.put(DIGESTS[0], memoryview(BLOBS[0]))
    store.put(DIGESTS[0], BLOBS[0])
    assert store.get(DIGESTS[0]) == BLOBS[0]
    assert store.has(DIGESTS[0])


@pytest.mark.parametrize("digest", [DIGESTS[1], b"", b"../../etc/passwd", DIGESTS[0] + b"\0"])
def test_bytes_under_a_digest_that_is_not_theirs_are_refused(store: ChunkStore, digest: bytes) -> None:
    with pytest.raises(ChunkError):
        store.put(digest, BLOBS[0])
    assert not store.has(digest)


def test_pruning_keeps_what_the_newest_versions_need(store: ChunkStore) -> None:
    for digest, blob in zip(DIGESTS, BLOBS, strict=True):
        store.put(digest, blob)
    for version in (9, 10, 8):
        store.pin(version, b"manifest %d" % version, {DIGESTS[version - 8], DIGESTS[version - 7]})
    store.prune({9, 10})
    assert store.manifests() == {9: b"manifest 9", 10: b"manifest 10"}
    assert [store.has(digest) for digest in DIGESTS] == [False, True, True, True, False, False]
    assert store.get(DIGESTS[3]) == BLOBS[3]


def test_the_verifiers_memory_is_kept(store: ChunkStore) -> None:
    assert store.trusted() == Trusted()
    store.remember(Trusted(7, "ab" * 32, {"config.json": DIGESTS[0]}))
    assert store.trusted() == Trusted(7, "ab" * 32, {"config.json": DIGESTS[0]})


def test_a_restart_finds_everything(tmp_path: Path) -> None:
    first = DiskStore(tmp_path)
    first.put(DIGESTS[0], BLOBS[0])
    first.pin(3, b"manifest", [DIGESTS[0]])
    first.remember(Trusted(3, "ab" * 32))
    second = DiskStore(tmp_path)
    assert second.get(DIGESTS[0]) == BLOBS[0]
    assert second.manifests() == {3: b"manifest"}
    assert second.trusted().version == 3


def test_a_chunk_that_rotted_on_the_disk_is_no_longer_there(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.put(DIGESTS[3], BLOBS[3])
    (path,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    path.write_bytes(path.read_bytes().replace(BLOBS[3], b"\0" + BLOBS[3][1:]))
    assert store.get(DIGESTS[3]) is None
    assert not store.has(DIGESTS[3])
    store.put(DIGESTS[3], BLOBS[3])
    assert store.get(DIGESTS[3]) == BLOBS[3]


class Killed(BaseException):
    """Stands for kill -9: nothing of ours runs after it."""


def store_versions(store: ChunkStore) -> None:
    for version, (digest, blob) in enumerate(zip(DIGESTS, BLOBS, strict=True), 2):
        store.put(digest, blob)
        store.remember(Trusted(version, "bb" * 32))


@pytest.mark.parametrize("call", ["fsync", "replace", "pwritev"])
@pytest.mark.parametrize("count", range(3))
def test_a_kill_between_any_two_steps_leaves_old_or_new_never_a_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, count: int
) -> None:
    DiskStore(tmp_path).remember(Trusted(1, "aa" * 32))
    store = DiskStore(tmp_path)
    left = count

    def killed_at_last(real: Any) -> Any:
        def step(*arguments: Any) -> Any:
            nonlocal left
            if not left:
                raise Killed
            left -= 1
            return real(*arguments)

        return step

    target: tuple[Any, str] = (Path, "replace") if call == "replace" else (os, call)
    with monkeypatch.context() as patch:
        patch.setattr(*target, killed_at_last(getattr(*target)))
        with pytest.raises(Killed):
            store_versions(store)
    after = DiskStore(tmp_path)
    for digest, blob in zip(DIGESTS, BLOBS, strict=True):
        assert after.get(digest) in (None, blob)
        assert after.has(digest) == (after.get(digest) is not None)
    seen = after.trusted()
    assert seen == (Trusted(1, "aa" * 32) if seen.version == 1 else Trusted(seen.version, "bb" * 32))
    assert seen.version == 1 or after.has(DIGESTS[seen.version - 2])
    after.remember(seen)
    assert not any(name.startswith("tmp/") for name in files_in(tmp_path))


def test_space_is_given_back_segment_by_segment(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    kept: list[bytes] = []
    for version, blob in enumerate(os.urandom(10_000) for _ in range(50)):
        patch = b"patch" * (version + 1)
        digests = [blake3(data).digest() for data in (blob, patch)]
        for digest, data in zip(digests, (blob, patch), strict=True):
            store.put(digest, data)
        # A version may need a small part of what came with an earlier one.
        store.pin(version, b"manifest", [*digests, *kept])
        kept.append(digests[1])
        store.prune({version - 1, version})
        files = sum(path.stat().st_size for path in tmp_path.glob("chunks/*"))
        assert files <= 2 * (2 * 10_000 + 50 * 250 + 3000)
        assert all(store.get(digest) for digest in [*digests, *kept])
    reopened = DiskStore(tmp_path)
    assert all(reopened.get(digest) for digest in [*digests, *kept])


def test_a_reader_beside_the_owner_disturbs_nothing(tmp_path: Path) -> None:
    owner = DiskStore(tmp_path)
    owner.put(DIGESTS[0], BLOBS[0])
    reader = DiskStore(tmp_path)
    owner.put(DIGESTS[1], BLOBS[1])
    owner.prune(())
    owner.put(DIGESTS[1], BLOBS[1])
    assert reader.get(DIGESTS[0]) == BLOBS[0]
    assert DiskStore(tmp_path).get(DIGESTS[1]) == BLOBS[1]


def test_a_full_disk_is_told_and_room_can_be_made(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, max_bytes=len(BLOBS[0]) + len(BLOBS[1]) + 80)
    store.put(DIGESTS[0], BLOBS[0])
    store.put(DIGESTS[1], BLOBS[1])
    with pytest.raises(OutOfDisk, match="full"):
        store.put(DIGESTS[2], BLOBS[2])
    assert not store.has(DIGESTS[2])
    store.prune(())
    store.put(DIGESTS[2], BLOBS[2])


def test_no_space_left_on_the_device_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path, max_bytes=len(BLOBS[5]))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        patch.setattr(os, "pwritev", full)
        with pytest.raises(OutOfDisk, match="no space"):
            store.put(DIGESTS[5], BLOBS[5])
        with pytest.raises(OutOfDisk, match="no space"):
            store.pin(1, b"manifest", [])
    assert not store.has(DIGESTS[5])
    assert all(not path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    store.put(DIGESTS[5], BLOBS[5])


def test_a_damaged_memory_of_versions_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    (tmp_path / "trusted").write_bytes(b"\xc1")
    with pytest.raises(ResourceError, match="trusted"):
        DiskStore(tmp_path).trusted()


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ResourceError):
        DiskStore(tmp_path / "file")


def test_versions_that_change_little_do_not_pile_up_open_files(tmp_path: Path) -> None:
    segments = Segments(tmp_path)
    digests = [at.to_bytes(32, "big") for at in range(300)]
    for digest in digests:
        segments.add(digest, digest)
        segments.retain(lambda _: True)
        segments.begin()
    assert len(files_in(tmp_path)) <= MAX_SEGMENTS + 1
    assert [segments.read(digest) for digest in digests] == digests
    again = Segments(tmp_path)
    assert [again.read(digest) for digest in digests] == digests
