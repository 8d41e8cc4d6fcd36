"""One Ed25519 key is who a node is: its libp2p peer id, the owner of its records, the signer of manifests.

A peer id of this kind embeds the public key, so a signature is checked from the peer id alone. The key
lives in one file in libp2p's own private-key format, which p2pd reads as it is.
"""

from __future__ import annotations

import functools
import os
from functools import lru_cache
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from echo2p2p.errors import SettingsError, VerificationError

PeerId = str
"""A libp2p peer id in base58, such as ``12D3KooW…``; Ed25519 only."""

# libp2p PrivateKey protobuf: field 1 (key type) = 1 (Ed25519), field 2 (data) = 64 bytes: seed, public key.
_PRIVATE_PREFIX = b"\x08\x01\x12\x40"
# Peer id: identity multihash (code 0, length 36) of the PublicKey protobuf: key type 1, data of 32 bytes.
_PEER_ID_PREFIX = b"\x00\x24\x08\x01\x12\x20"
_SIGNATURE_BYTES = 64


class Identity:
    """A private key with the peer id that follows from it."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self._public = key.public_key().public_bytes_raw()
        self.peer_id: PeerId = base58.b58encode(_PEER_ID_PREFIX + self._public).decode()

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The identity of a 32-byte seed; for tests and simulations that must repeat themselves."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the identity file at ``path``, or make one there that only its owner may read.

        Raises:
            SettingsError: the file is there but is not an Ed25519 identity, or it cannot be made.
        """
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            identity = cls.generate()
            identity.save(path)
            return identity
        except OSError as error:
            raise SettingsError(f"identity file {path} cannot be read: {error.strerror}") from error
        if len(data) != len(_PRIVATE_PREFIX) + 64 or not data.startswith(_PRIVATE_PREFIX):
            raise SettingsError(
                f"identity file {path} is not an Ed25519 identity",
                hint="name another file; one is made if it does not exist",
            )
        identity = cls.from_seed(data[len(_PRIVATE_PREFIX) :][:32])
        if public_key_of(identity.peer_id) != data[-32:]:
            raise SettingsError(f"identity file {path} is damaged: its two halves do not belong together")
        return identity

    def save(self, path: Path) -> None:
        """Write the identity file, readable by its owner alone from the start; refuses to overwrite."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(fd, "wb") as file:
                    file.write(_PRIVATE_PREFIX + self._key.private_bytes_raw() + self._public)
                    file.flush()
                    os.fsync(fd)
                os.link(partial, path)  # unlike a rename, this refuses to overwrite
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise SettingsError(f"identity file {path} cannot be made: {error.strerror}") from error

    def sign(self, domain: bytes, payload: bytes) -> bytes:
        """The 64-byte signature of ``payload`` within ``domain``.

        The domain keeps a signature made for one purpose from being shown for another.
        """
        return self._key.sign(_bound(domain, payload))


def verify(peer: PeerId, domain: bytes, payload: bytes, signature: bytes) -> None:
    """Check that ``peer`` signed ``payload`` within ``domain``.

    Raises:
        VerificationError: it did not, or ``peer`` is not an Ed25519 peer id.
    """
    try:
        Ed25519PublicKey.from_public_bytes(public_key_of(peer)).verify(signature, _bound(domain, payload))
    except InvalidSignature:
        raise VerificationError(f"the signature is not one of {peer}") from None


@lru_cache(maxsize=65536)
# Asked for the same few peers over and over; only real ids, which are short, are remembered.
@functools.lru_cache(maxsize=4096)
def public_key_of(peer: PeerId) -> bytes:
    """The 32 bytes of the key that is embedded in an Ed25519 peer id.

    Raises:
        VerificationError: ``peer`` is not such an id.
    """
    # A peer id of this kind has 52 characters; the bound keeps base58 (quadratic) away from long input. The
    # decoder skips white space at the end, which would give one peer several names.
    if len(peer) <= 64 and peer == peer.strip():
        try:
            data: bytes = base58.b58decode(peer)
        except ValueError:
            data = b""
        if len(data) == len(_PEER_ID_PREFIX) + 32 and data.startswith(_PEER_ID_PREFIX):
            return data[len(_PEER_ID_PREFIX) :]
    raise VerificationError(f"{peer[:64]!r} is not an Ed25519 peer id")


def _bound(domain: bytes, payload: bytes) -> bytes:
    return domain + b"\0" + payload


def split_signed(data: bytes) -> tuple[bytes, bytes]:
    """Take a sealed value apart: its signature, then its payload.

    Raises:
        VerificationError: too short to hold a signature.
    """
    if len(data) <= _SIGNATURE_BYTES:
        raise VerificationError(f"{len(data)} bytes are too few for a signed value")
    return data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
