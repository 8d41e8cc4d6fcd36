"""``echo2p2p export``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from echo2p2p.errors import SettingsError

if TYPE_CHECKING:
    from torch import nn

    from echo2p2p.weights.adapter import AdapterSpec


@click.command("export")
@click.argument("version", metavar="VERSION|latest")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--run-dir",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a learner or worker that holds the version.",
)
@click.option(
    "--base",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where adapters are trained: the policy folder to merge them into; without it they are written for peft.",
)
def command(version: str, folder: Path, run_dir: Path, base: Path | None) -> None:
    """Write a published version as a Hugging Face folder that loads with from_pretrained.

    The version is put together from verified chunks; nothing is written unless all of it is right.
    """
    if version != "latest" and not (version.isascii() and version.isdigit()):
        raise click.UsageError(f"VERSION is a number or 'latest', not {version!r}")
    if folder.exists() and any(folder.iterdir()):
        raise SettingsError(f"{folder} is not empty", hint="name a new folder")
    from echo2p2p.weights.export import export_version

    wanted = None if version == "latest" else int(version)
    manifest = export_version(run_dir / "store", wanted, folder, base=base_loader(base) if base else None)
    click.echo(f"version {manifest.version} of {manifest.run} is in {folder}", err=True)


def base_loader(base: Path) -> Callable[[AdapterSpec], nn.Module]:
    """What :func:`export_version` merges adapters into: the policy in the folder ``base``."""
    from echo2p2p.data.policy import DTYPES, build_model

    return lambda spec: build_model(base, dtype=DTYPES[spec.dtype], device="cpu", weights=True)
