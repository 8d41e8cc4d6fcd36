"""The chunk protocol: what peers say to each other to pass on manifests, assets and chunks.

One stream carries either one blob or one lane::

    GetBlob                     → Blob + its bytes, or Missing
    OpenLane, Want, Want …      → Chunk + its bytes | Missing | Waiting, in any order; or Refused

On a lane, chunks come in whatever order they become available at the source. A source that was asked to
wait for chunks which it does not have yet says ``Waiting`` from time to time, so silence means trouble.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from echo2p2p.weights.manifest import Digest

CHUNK_PROTOCOL = "chunks"
MAX_WANTS = 1024
"""Chunks that one message may name, and that one lane may have open."""
MAX_MESSAGE_BYTES = 16 * 1024

Indices = Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**24)], ...], Meta(max_length=MAX_WANTS)]
ManifestDigest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class GetBlob(msgspec.Struct, frozen=True, tag="get"):
    """Asks for a signed manifest or for an asset, by its digest.

    ``version`` names the manifest that an asset belongs to. With ``wait``, a source to which that version
    is still on its way answers once it has the asset.
    """

    digest: Digest
    version: ManifestDigest
    wait: bool


class OpenLane(msgspec.Struct, frozen=True, tag="lane"):
    """Opens a lane for the chunks of one version."""

    version: ManifestDigest


class Want(msgspec.Struct, frozen=True, tag="want"):
    """Asks for chunks. With ``wait``, a source that will get them sends them as they arrive."""

    chunks: Indices
    wait: bool


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """These chunks came from elsewhere; do not send them if it is not too late."""

    chunks: Indices


class Blob(msgspec.Struct, frozen=True, tag="blob"):
    """``nbytes`` raw bytes follow."""

    nbytes: Annotated[int, Meta(ge=0, le=2**30)]


class Chunk(msgspec.Struct, frozen=True, tag="chunk"):
    """The bytes of chunk ``index`` follow; the manifest says how many."""

    index: Annotated[int, Meta(ge=0, lt=2**24)]


class Missing(msgspec.Struct, frozen=True, tag="missing"):
    """The source does not have these chunks (or this blob) and no longer waits for them."""

    chunks: Indices = ()


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """Alive; none of the wanted chunks has arrived here yet."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The source serves no such version, or serves too many streams already."""

    reason: Annotated[str, Meta(max_length=256)]


FirstRequest = GetBlob | OpenLane
LaneRequest = Want | Cancel
LaneReply = Chunk | Missing | Waiting | Refused
BlobReply = Blob | Missing | Refused
