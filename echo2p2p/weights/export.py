"""A published version as a Hugging Face folder, put together from a node's chunk store."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from echo2p2p.errors import ChunkError, OutOfDisk, SettingsError
from echo2p2p.swarm.identity import split_signed
from echo2p2p.swarm.messages import decode
from echo2p2p.weights.manifest import Manifest, ManifestVerifier
from echo2p2p.weights.rebuild import is_whole, rebuild
from echo2p2p.weights.snapshot import Snapshot
from echo2p2p.weights.store import DiskStore

if TYPE_CHECKING:
    from torch import nn

    from echo2p2p.weights.adapter import AdapterSpec

WEIGHTS = "model.safetensors"
PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"


def export_version(
    store_dir: Path,
    version: int | None,
    folder: Path,
    *,
    base: Callable[[AdapterSpec], nn.Module] | None = None,
) -> Manifest:
    """Write ``version`` (None: the newest that is whole) to ``folder``, bit by bit as it was published.

    A version that is an adapter is merged into its base, or, where no base is given, written as a folder for peft.
    The folder appears whole or not at all.

    Args:
        base: makes the model, in ``dtype``, that the run's adapters belong to.

    Raises:
        SettingsError: the store does not hold that version, or ``base`` is not its base.
        VerificationError: what it holds is not what the learner signed.
    """
    if not store_dir.is_dir():
        raise SettingsError(
            f"there is no chunk store {store_dir}", hint="name the folder of a learner or worker that has run"
        )
    store = DiskStore(store_dir)
    bodies = store.manifests()
    wanted = [version] if version is not None else sorted(bodies, reverse=True)
    for candidate in wanted:
        if candidate in bodies and (version is not None or is_whole(_parse(bodies[candidate]), store)):
            manifest = _parse(bodies[candidate])
            snapshot = rebuild(manifest, store)
            break
    else:
        held = ", ".join(map(str, sorted(bodies))) or "none"
        raise SettingsError(f"{store_dir} does not hold version {version}", hint=f"versions there: {held}")
    assets = {asset.name: _held(store, asset.digest, asset.name) for asset in manifest.assets}
    from echo2p2p.weights.adapter import ADAPTER_FILE, decode_spec, for_peft, merge

    weights = WEIGHTS
    if ADAPTER_FILE in assets:
        spec = decode_spec(assets.pop(ADAPTER_FILE))
        if base is not None:
            snapshot = merge(base(spec), snapshot, spec)
        else:
            snapshot, assets[PEFT_CONFIG] = for_peft(snapshot, spec)
            weights = PEFT_WEIGHTS
    try:
        write_folder(folder, snapshot, assets, weights=weights)
    except OSError as error:
        kind = OutOfDisk if error.errno == errno.ENOSPC else SettingsError
        raise kind(f"{folder} cannot be written: {error.strerror}") from error
    return manifest


def write_folder(
    folder: Path, snapshot: Snapshot, assets: Mapping[str, bytes], *, weights: str = WEIGHTS
) -> None:
    """Write a Hugging Face folder of ``snapshot`` and the files ``assets``; it appears at the end, whole.

    Raises:
        OSError: it cannot be written, or is there already and not empty.
    """
    from safetensors.torch import save_file

    partial = folder.with_name(folder.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    for name, data in assets.items():
        (partial / name).write_bytes(data)
    state = {name: tensor.contiguous() for name, tensor in snapshot.state_dict().items()}
    aliases = snapshot.layout.aliases
    save_file(
        {n: t for n, t in state.items() if n not in aliases}, partial / weights, metadata={"format": "pt"}
    )
    (partial / weights).chmod(0o644)  # safetensors writes for its owner alone
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)


def _parse(body: bytes) -> Manifest:
    """The manifest, verified against the learner that its own run names."""
    claimed: Manifest = decode(split_signed(body)[1], Manifest)
    return ManifestVerifier(claimed.run).accept(body)


def _held(store: DiskStore, digest: bytes, what: str) -> bytes:
    data = store.get(digest)
    if data is None:
        raise ChunkError(
            f"{what} is not in the store", hint="export from a node that holds the whole version"
        )
    return data
