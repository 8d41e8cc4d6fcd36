"""What a policy version consists of, signed by the learner, and the rules by which a peer believes it.

Pure: bytes in, a verified :class:`Manifest` or a :class:`~echo2p2p.errors.ManifestError` out. No I/O, no
clock. The verifier guarantees, in the order of its checks:

* nothing is parsed before the learner's signature over it has been checked;
* one manifest has one encoding, one run, and sizes within the limits;
* versions never go back, and one version never has two manifests;
* the assets (config, tokenizer, …) never change within a run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta

from echo2p2p.errors import ManifestError, ProtocolError, VerificationError
from echo2p2p.swarm.identity import Identity, public_key_of, split_signed, verify
from echo2p2p.swarm.messages import PROTOCOL_VERSION, decode, encode
from echo2p2p.swarm.records import Addresses, Keys, NonNegative, PeerIdText
from echo2p2p.weights.snapshot import Layout

DIGEST_BYTES = 32
MAX_MANIFEST_BYTES = 16 * 2**20
"""No limits can allow a longer manifest than this."""
MAX_MEMBERS = 4096
MAX_TREES = 32
MAX_ASSETS = 64
MAX_PATCHES = 256

_DOMAIN = b"echo2p2p/1/manifest"
_ASSET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")

Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Member(msgspec.Struct, frozen=True):
    """A worker that relays this version, with the links that it announced and where it can be dialled.

    ``download_mbit`` is 0 where it is not known.
    """

    peer: PeerIdText
    upload_mbit: NonNegative
    addresses: Addresses = ()
    download_mbit: NonNegative = 0.0


class Asset(msgspec.Struct, frozen=True):
    """A small file that belongs to the policy (``config.json``, tokenizer files, …), pinned by its digest.

    It travels whole, as one more chunk after those of the snapshot.
    """

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    digest: Digest
    nbytes: Annotated[int, Meta(ge=0, le=2**30)]


class Patch(msgspec.Struct, frozen=True):
    """One link of the other way to a version, for those who hold an earlier one (:mod:`echo2p2p.weights.patch`).

    What it makes follows from where it stands: the base of the patch before it in the manifest, or, where it is
    the first, the manifest's own version.

    Attributes:
        base_version, base_fingerprint: the snapshot that it starts from.
        chunk_bytes: size of every chunk of it but the last.
        chunks: their BLAKE3 digests, 32 bytes each, one after another.
    """

    base_version: Annotated[int, Meta(ge=0, le=2**53)]
    base_fingerprint: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    nbytes: Annotated[int, Meta(ge=1, le=2**50)]
    chunk_bytes: Annotated[int, Meta(ge=1024, le=16 * 2**20)]
    chunks: bytes

    @property
    def n_chunks(self) -> int:
        return len(self.chunks) // DIGEST_BYTES

    def chunk_digest(self, at: int) -> bytes:
        return _digest_at(self.chunks, at)


class Manifest(msgspec.Struct, frozen=True):
    """One policy version.

    Its chunks are numbered through: those of the snapshot, one for each asset, then those of the patches.

    Attributes:
        fingerprint: of the whole snapshot (:meth:`Snapshot.fingerprint`).
        chunk_bytes: size of every chunk but the last, which ends where the snapshot ends.
        chunks: the BLAKE3 digests of the snapshot's chunks, 32 bytes each, one after another.
        members: the workers that relay this version.
        trees, patch_trees: over how many trees the chunks of the whole and those of the patches travel.
        patches: a chain, newest first: the first makes this version, each further one the base of the one before.
            Empty where a patch would not be small enough to pay, or there is nothing to start from.
    """

    protocol: int
    run: Annotated[str, Meta(max_length=130)]
    version: Annotated[int, Meta(ge=0, le=2**53)]
    hash: Literal["blake3"]
    fingerprint: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    layout: Layout
    chunk_bytes: Annotated[int, Meta(ge=1024, le=16 * 2**20)]
    chunks: bytes
    members: Annotated[tuple[Member, ...], Meta(max_length=MAX_MEMBERS)]
    assets: Annotated[tuple[Asset, ...], Meta(max_length=MAX_ASSETS)]
    patches: Annotated[tuple[Patch, ...], Meta(max_length=MAX_PATCHES)]
    trees: Annotated[int, Meta(ge=1, le=MAX_TREES)] = 1
    patch_trees: Annotated[int, Meta(ge=1, le=MAX_TREES)] = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the whole snapshot."""
        return self.layout.nbytes

    @property
    def whole_bytes(self) -> int:
        """Bytes of the snapshot and, behind it, of all assets."""
        return self.nbytes + sum(asset.nbytes for asset in self.assets)

    @property
    def n_chunks(self) -> int:
        """Chunks of the snapshot, one for each asset, and those of all patches."""
        return self.by_patches(len(self.patches)).stop

    @property
    def whole(self) -> range:
        """The chunks that are this version: of the snapshot and of the assets."""
        return range(len(self.snapshot_chunks) + len(self.assets))

    @property
    def snapshot_chunks(self) -> range:
        return range(len(self.chunks) // DIGEST_BYTES)

    def by_patches(self, count: int) -> range:
        """The chunks that make this version out of the base of patch ``count - 1``: of the assets and the patches."""
        in_patches = sum(patch.n_chunks for patch in self.patches[:count])
        return range(self.snapshot_chunks.stop, self.whole.stop + in_patches)

    def chunk_digest(self, index: int) -> bytes:
        """The BLAKE3 digest of chunk ``index``."""
        past = index - self.snapshot_chunks.stop
        if past < 0:
            return _digest_at(self.chunks, index)
        if past < len(self.assets):
            return self.assets[past].digest
        at, place = self._in_patch(index)
        return self.patches[at].chunk_digest(place)

    def chunk_span(self, index: int) -> tuple[int, int]:
        """Where chunk ``index`` begins and ends in the snapshot with the assets and the patches behind it."""
        past = index - self.snapshot_chunks.stop
        if past < 0:
            start = index * self.chunk_bytes
            return start, min(start + self.chunk_bytes, self.nbytes)
        if past < len(self.assets):
            start = self.nbytes + sum(asset.nbytes for asset in self.assets[:past])
            return start, start + self.assets[past].nbytes
        at, place = self._in_patch(index)
        first, end = self.patch_span(at)
        start = first + place * self.patches[at].chunk_bytes
        return start, min(start + self.patches[at].chunk_bytes, end)

    def patch_span(self, at: int) -> tuple[int, int]:
        """Where patch ``at`` begins and ends behind the snapshot and the assets."""
        start = self.whole_bytes + sum(patch.nbytes for patch in self.patches[:at])
        return start, start + self.patches[at].nbytes

    def _in_patch(self, index: int) -> tuple[int, int]:
        """To which patch a chunk behind the whole belongs, and its place in there."""
        place = index - self.whole.stop
        for at, patch in enumerate(self.patches):
            if place < patch.n_chunks:
                return at, place
            place -= patch.n_chunks
        raise IndexError(f"version {self.version} has no chunk {index}")

    def digests(self) -> set[bytes]:
        """Everything that may be held of this version."""
        return {self.chunk_digest(index) for index in range(self.n_chunks)}


class ManifestLimits(msgspec.Struct, frozen=True):
    """What a peer puts up with, even from the learner.

    ``max_jump``: how far past the newest version seen the next one may lie. A version is a training step, so
    that is longer than most runs; one who has seen nothing takes any.
    """

    max_manifest_bytes: int = 4 * 2**20
    max_snapshot_bytes: int = 2**40
    max_chunks: int = 100_000
    max_asset_bytes: int = 64 * 2**20
    max_jump: int = 10_000


class Trusted(msgspec.Struct, frozen=True):
    """The verifier's memory: the newest version seen, its digest, and the assets (name → digest) of the run.

    Kept on disk before a version is used, so that a restart cannot be talked into an older one.
    """

    version: Annotated[int, Meta(ge=-1, le=2**53)] = -1
    digest: Annotated[str, Meta(max_length=64)] = ""
    assets: dict[str, bytes] | None = None


DEFAULT_LIMITS = ManifestLimits()
NOTHING_SEEN = Trusted()


def digest(data: bytes) -> str:
    """The digest of a signed manifest, as its record announces it: BLAKE3, hex."""
    return blake3(data).hexdigest()


def sign(identity: Identity, manifest: Manifest) -> bytes:
    """The signed form that travels: 64 bytes of signature, then the canonical encoding.

    Raises:
        ManifestError: this manifest would be refused by every verifier.
    """
    _check_contents(manifest, ManifestLimits(max_manifest_bytes=MAX_MANIFEST_BYTES))
    payload = encode(manifest)
    if encode(decode(payload, Manifest)) != payload:
        raise ManifestError("a field of the manifest does not have its type: it has no canonical encoding")
    if len(payload) > MAX_MANIFEST_BYTES - 64:
        raise ManifestError(f"a manifest of {len(payload)} bytes cannot travel", hint="use larger chunks")
    return identity.sign(_DOMAIN, payload) + payload


class ManifestVerifier:
    """Believes or refuses manifests of one run, one after another; :attr:`trusted` is all its state.

    Args:
        run: ``<name>@<learner peer id>``.
        trusted: what an earlier life of this verifier had seen.
    """

    def __init__(
        self, run: str, limits: ManifestLimits = DEFAULT_LIMITS, trusted: Trusted = NOTHING_SEEN
    ) -> None:
        self._keys = Keys(run)
        self._limits = limits
        self._trusted = trusted

    @property
    def trusted(self) -> Trusted:
        return self._trusted

    def accept(self, data: bytes, expected_digest: str | None = None) -> Manifest:
        """Verify a signed manifest and take note of it.

        Args:
            expected_digest: what the learner's record announced, if there was one.

        Raises:
            ManifestError: it is not a manifest that this run's learner signed, or not one to believe.
        """
        manifest = self._authentic(data, expected_digest)
        _check_contents(manifest, self._limits)
        got, seen = digest(data), self._trusted
        if manifest.version < seen.version:
            raise ManifestError(
                f"version {manifest.version} is older than version {seen.version}, seen before"
            )
        if manifest.version == seen.version and seen.digest and got != seen.digest:
            raise ManifestError(
                f"equivocation: the learner signed two manifests of version {manifest.version}, "
                f"{seen.digest} and {got}",
                hint="two learners may be running with one identity",
            )
        if seen.version >= 0 and manifest.version > seen.version + self._limits.max_jump:
            raise ManifestError(
                f"version {manifest.version} is too far past version {seen.version}, the newest seen here "
                f"({self._limits.max_jump} are allowed)",
                hint="if this worker was away for that long, start it with a new run folder; otherwise the "
                "learner's key or counter is not to be trusted: start the run anew under another name",
            )
        assets = {asset.name: asset.digest for asset in manifest.assets}
        if seen.assets is not None and assets != seen.assets:
            raise ManifestError(
                f"version {manifest.version} changes the assets of the run: {_differing(assets, seen.assets)}"
            )
        self._trusted = Trusted(manifest.version, got, assets)
        return manifest

    def _authentic(self, data: bytes, expected_digest: str | None) -> Manifest:
        limit = min(self._limits.max_manifest_bytes, MAX_MANIFEST_BYTES)
        if len(data) > limit:
            raise ManifestError(f"manifest of {len(data)} bytes, {limit} are allowed")
        if expected_digest is not None and digest(data) != expected_digest:
            raise ManifestError(f"this manifest is not the one announced as {expected_digest[:64]}")
        try:
            signature, payload = split_signed(data)
            verify(self._keys.learner_id, _DOMAIN, payload, signature)
            manifest: Manifest = decode(payload, Manifest)
        except (VerificationError, ProtocolError) as error:
            raise ManifestError(f"manifest of run {self._keys.run}: {error.message}") from error
        if encode(manifest) != payload:
            raise ManifestError("the manifest is not in its canonical encoding")
        if manifest.run != self._keys.run:
            raise ManifestError(f"the manifest belongs to run {manifest.run}")
        return manifest


def _check_contents(manifest: Manifest, limits: ManifestLimits) -> None:
    """Everything that follows from the manifest alone."""
    if manifest.protocol != PROTOCOL_VERSION:
        raise ManifestError(f"manifest of protocol {manifest.protocol}, not {PROTOCOL_VERSION}")
    manifest.layout.validate()
    if manifest.nbytes > limits.max_snapshot_bytes:
        raise ManifestError(f"snapshot of {manifest.nbytes} bytes, {limits.max_snapshot_bytes} are allowed")
    n_chunks = _count_chunks(manifest.nbytes, manifest)
    n_chunks += _check_patches(manifest)
    if n_chunks > limits.max_chunks:
        raise ManifestError(f"{n_chunks} chunks, {limits.max_chunks} are allowed", hint="use larger chunks")
    _check_members(manifest)
    names = [asset.name for asset in manifest.assets]
    if names != sorted(set(names)):
        raise ManifestError("the assets are out of order or named twice")
    for asset in manifest.assets:
        if not _ASSET_NAME.match(asset.name):
            raise ManifestError(f"{asset.name[:64]!r} is not a valid asset name")
        if asset.nbytes > limits.max_asset_bytes:
            raise ManifestError(
                f"asset {asset.name} of {asset.nbytes} bytes, {limits.max_asset_bytes} are allowed"
            )


def _check_patches(manifest: Manifest) -> int:
    """How many chunks all patches together have."""
    result = manifest.version
    for patch in manifest.patches:
        if patch.base_version >= result:
            raise ManifestError(f"version {result} is a patch on version {patch.base_version}")
        result = patch.base_version
    # Patches that are larger than what they make have no use, so what is allowed for a snapshot bounds them too.
    nbytes = sum(patch.nbytes for patch in manifest.patches)
    if nbytes > manifest.nbytes:
        raise ManifestError(f"patches of {nbytes} bytes, {manifest.nbytes} are allowed")
    return sum(_count_chunks(patch.nbytes, patch) for patch in manifest.patches)


def _count_chunks(nbytes: int, listed: Manifest | Patch) -> int:
    """How many chunks ``nbytes`` are; each must have its digest."""
    n_chunks = -(-nbytes // listed.chunk_bytes)
    if len(listed.chunks) != n_chunks * DIGEST_BYTES:
        raise ManifestError(f"{n_chunks} chunks, but {len(listed.chunks)} bytes of digests")
    return n_chunks


def _digest_at(digests: bytes, index: int) -> bytes:
    return digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


def _check_members(manifest: Manifest) -> None:
    learner = manifest.run.rpartition("@")[2]
    seen = {learner}
    for member in manifest.members:
        if member.peer in seen:
            raise ManifestError(f"{member.peer} is a member twice, or is the learner")
        seen.add(member.peer)
        try:
            public_key_of(member.peer)
        except VerificationError as error:
            raise ManifestError(f"member {error.message}") from error


def _differing(new: Mapping[str, bytes], old: Mapping[str, bytes]) -> str:
    return ", ".join(sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name)))
