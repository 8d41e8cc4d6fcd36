"""The identity file and the signatures that follow from it."""

from __future__ import annotations

from pathlib import Path

import base58
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.errors import SettingsError, VerificationError
from echo2p2p.swarm.identity import Identity, public_key_of, split_signed, verify

SEED = bytes(range(32))


def test_a_new_identity_is_written_once_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "identity.key"
    made = Identity.load_or_create(path)
    before = path.read_bytes()
    assert Identity.load_or_create(path).peer_id == made.peer_id
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o600
    assert Identity.load_or_create(tmp_path / "other.key").peer_id != made.peer_id


def test_the_file_is_the_private_key_format_of_libp2p(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    identity = Identity.from_seed(SEED)
    identity.save(path)
    public = public_key_of(identity.peer_id)
    assert path.read_bytes() == bytes.fromhex("08011240") + SEED + public
    assert Identity.load_or_create(path).peer_id == identity.peer_id


def test_the_peer_id_embeds_the_public_key() -> None:
    # RFC 8032, 7.1, test 1.
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    public = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    peer_id = Identity.from_seed(seed).peer_id
    assert peer_id.startswith("12D3KooW")
    assert public_key_of(peer_id) == public
    assert base58.b58decode(peer_id) == bytes.fromhex("002408011220") + public


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(b"something dear")
    with pytest.raises(SettingsError, match="cannot be made"):
        Identity.generate().save(path)
    assert path.read_bytes() == b"something dear"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"-----BEGIN PRIVATE KEY-----",
        bytes.fromhex("08011240") + SEED,
        bytes.fromhex("08001240") + bytes(64),
        bytes.fromhex("08011240") + SEED + bytes(32),
        bytes.fromhex("08011240") + bytes(65),
    ],
)
def test_a_damaged_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"identity\.key"):
        Identity.load_or_create(path)
    assert path.read_bytes() == content


def test_every_flipped_byte_of_the_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    Identity.from_seed(SEED).save(path)
    good = path.read_bytes()
    for position in range(len(good)):
        damaged = bytearray(good)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(SettingsError):
            Identity.load_or_create(path)


def test_a_path_that_cannot_be_a_file_is_a_settings_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path, tmp_path / "file" / "identity.key"):
        with pytest.raises(SettingsError):
            Identity.load_or_create(path)


def test_a_signature_holds_for_its_signer_domain_and_payload_only() -> None:
    identity, other = Identity.from_seed(SEED), Identity.from_seed(bytes(32))
    signature = identity.sign(b"domain", b"payload")
    verify(identity.peer_id, b"domain", b"payload", signature)
    for peer, domain, payload, signed in (
        (other.peer_id, b"domain", b"payload", signature),
        (identity.peer_id, b"another", b"payload", signature),
        (identity.peer_id, b"domain", b"payloaD", signature),
        (identity.peer_id, b"domain", b"payload", other.sign(b"domain", b"payload")),
        (identity.peer_id, b"domain", b"payload", b""),
        (identity.peer_id, b"domain", b"payload", signature + b"\0"),
    ):
        with pytest.raises(VerificationError):
            verify(peer, domain, payload, signed)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80))
def test_a_text_that_is_no_peer_id_is_refused(text: str) -> None:
    with pytest.raises(VerificationError):
        public_key_of(text)


def test_ids_of_other_kinds_are_refused() -> None:
    public = public_key_of(Identity.from_seed(SEED).peer_id)
    for data in (
        bytes.fromhex("1220") + public,  # the hash of an RSA key, as older peers have it
        bytes.fromhex("002408021220") + public,  # secp256k1
        bytes.fromhex("002408011220") + public + b"\0",
        bytes.fromhex("0024080112") + public,
    ):
        with pytest.raises(VerificationError):
            public_key_of(base58.b58encode(data).decode())
    with pytest.raises(VerificationError):
        public_key_of("1" * 10_000_000)


def test_a_peer_has_one_name_only() -> None:
    peer_id = Identity.from_seed(SEED).peer_id
    for name in (peer_id + "\n", peer_id + " ", " " + peer_id, "1" + peer_id, peer_id + "\0"):
        with pytest.raises(VerificationError):
            public_key_of(name)


def test_a_value_too_short_for_a_signature_is_refused() -> None:
    for size in (0, 63, 64):
        with pytest.raises(VerificationError):
            split_signed(bytes(size))
    assert split_signed(bytes(64) + b"x") == (bytes(64), b"x")
