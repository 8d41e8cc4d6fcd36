"""``echo2p2p export``."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from echo2p2p.errors import SettingsError


@click.command("export")
@click.argument("version", metavar="VERSION|latest")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--run-dir",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a learner or worker that holds the version.",
)
def command(version: str, folder: Path, run_dir: Path) -> None:
    """Write a published version as a Hugging Face folder that loads with from_pretrained.

    The version is put together from verified chunks; nothing is written unless all of it is right.
    """
    if version != "latest" and not (version.isascii() and version.isdigit()):
        raise click.UsageError(f"VERSION is a number or 'latest', not {version!r}")
    if folder.exists() and any(folder.iterdir()):
        raise SettingsError(f"{folder} is not empty", hint="name a new folder")
    from echo2p2p.weights.export import export_version

    manifest = export_version(run_dir / "store", None if version == "latest" else int(version), folder)
    click.echo(f"version {manifest.version} of {manifest.run} is in {folder}", err=True)
