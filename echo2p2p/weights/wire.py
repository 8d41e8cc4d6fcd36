"""The chunk protocol: what peers say to each other to pass on manifests and chunks.

One stream carries one manifest, one lane, or one word about members::

    GetManifest                 → Waiting …, Body + its bytes; or Refused
    OpenLane, Want, Want …      → Chunk + its bytes | Missing | Waiting, in any order; or Refused
    Report, to the learner      → nothing
    Suspects, from the learner  → nothing

On a lane, chunks come in whatever order they become available at the source. A source that waits for a
version or for chunks itself says ``Waiting`` from time to time, so silence means trouble.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from echo2p2p.weights.manifest import MAX_MANIFEST_BYTES, MAX_TREES

CHUNK_PROTOCOL = "chunks"
MAX_WANTS = 1024
"""Chunks that one message may name, and that one lane may have open."""
MAX_MESSAGE_BYTES = 16 * 1024

Indices = Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**24)], ...], Meta(max_length=MAX_WANTS)]
ManifestDigest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
VersionNumber = Annotated[int, Meta(ge=-1, lt=2**62)]


class GetManifest(msgspec.Struct, frozen=True, tag="get"):
    """Asks for a signed manifest, by its digest. ``number`` is its version, −1 where that is not known."""

    version: ManifestDigest
    number: VersionNumber = -1


class OpenLane(msgspec.Struct, frozen=True, tag="lane"):
    """Opens a lane for the chunks of one version; ``number`` as in :class:`GetManifest`."""

    version: ManifestDigest
    number: VersionNumber = -1


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Tells the learner who sent wrong bytes of a version, and who let the sender wait in vain.

    Members are named by their place in the manifest.
    """

    version: ManifestDigest
    lied: Indices = ()
    slow: Indices = ()


class Suspects(msgspec.Struct, frozen=True, tag="suspects"):
    """The learner's word on who should not relay a version, all of them, by their place in its manifest.

    Of two such words the one with the larger ``serial`` counts. ``trees`` and ``patch_trees``: over how many the
    others relay it from now on.
    """

    version: ManifestDigest
    serial: Annotated[int, Meta(ge=0, lt=2**62)]
    members: Indices
    trees: Annotated[int, Meta(ge=1, le=MAX_TREES)]
    patch_trees: Annotated[int, Meta(ge=1, le=MAX_TREES)]


class Want(msgspec.Struct, frozen=True, tag="want"):
    """Asks for chunks. With ``wait``, a source that will get them sends them as they arrive."""

    chunks: Indices
    wait: bool


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """These chunks came from elsewhere; do not send them if it is not too late."""

    chunks: Indices


class Body(msgspec.Struct, frozen=True, tag="body"):
    """A signed manifest of ``nbytes`` raw bytes follows."""

    nbytes: Annotated[int, Meta(ge=0, le=MAX_MANIFEST_BYTES)]


class Chunk(msgspec.Struct, frozen=True, tag="chunk"):
    """The bytes of chunk ``index`` follow; the manifest says how many. ``n_ready`` more are ready to be sent.

    If ``coded`` is not 0, so many bytes follow that are :func:`~echo2p2p.weights.coding.encode`'s for that chunk.
    """

    index: Annotated[int, Meta(ge=0, lt=2**24)]
    n_ready: Annotated[int, Meta(ge=0, le=MAX_WANTS)] = 0
    coded: Annotated[int, Meta(ge=0, lt=2**31)] = 0


class Missing(msgspec.Struct, frozen=True, tag="missing"):
    """The source does not have these chunks and no longer waits for them."""

    chunks: Indices


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """Alive; nothing of what was asked for has arrived here yet, or others have their turn before it."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The source serves no such version, or only newer ones, or too many streams already."""

    reason: Annotated[str, Meta(max_length=256)]


FirstRequest = GetManifest | OpenLane | Report | Suspects
LaneRequest = Want | Cancel
LaneReply = Chunk | Missing | Waiting | Refused
ManifestReply = Body | Waiting | Refused
