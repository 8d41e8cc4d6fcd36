"""``echo2p2p eval``."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import rich_click as click

from echo2p2p.cli.options import json_option, print_settings, resolve_layers, settings_options
from echo2p2p.cli.table import print_json
from echo2p2p.errors import SettingsError


@click.command("eval")
@click.argument(
    "source", metavar="RUN_DIR|POLICY", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.argument("version", metavar="[VERSION|latest]", default="latest")
@settings_options
@click.option("--task", "name", help="Name of the task.  [the run's]")
@click.option(
    "--prompts", type=click.IntRange(2, 10**6), default=256, show_default=True, help="Held-out prompts."
)
@click.option(
    "--samples", type=click.IntRange(1, 1024), default=1, show_default=True, help="Completions of each."
)
@json_option
def command(
    source: Path,
    version: str,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    dry_run: bool,
    name: str | None,
    prompts: int,
    samples: int,
    as_json: bool,
) -> None:
    """Mean reward of a policy on held-out prompts, with its 95 % confidence interval.

    A published version of a run folder, or a Hugging Face folder with weights. A learner's folder brings its settings
    with it; anything else takes -c and --set, as the learner does.

        echo2p2p eval runs/gpu latest --prompts 512

        echo2p2p eval ./Qwen3-0.6B -c configs/knights.toml
    """
    if version != "latest" and not (version.isascii() and version.isdigit()):
        raise click.UsageError(f"VERSION is a number or 'latest', not {version!r}")
    held_by_learner = (source / "checkpoints").is_dir()
    if (source / "store").is_dir() and not (held_by_learner or files or name):
        raise SettingsError(
            f"{source} is a worker's folder, which does not say what the run trains on",
            hint="name its settings with -c, or its task with --task",
        )
    own = source / "config.resolved.toml"
    settings, layered = resolve_layers(
        (*([own] if held_by_learner and own.is_file() else []), *files), overrides, task={"name": name}
    )
    if dry_run:
        print_settings(settings, layered)
        return
    from echo2p2p.cli.export import base_loader
    from echo2p2p.evaluate import evaluate
    from echo2p2p.parts import SEED_POLICY
    from echo2p2p.weights.export import export_version

    with TemporaryDirectory(prefix="echo2p2p-eval-") as scratch:
        folder, held = source, None
        if (source / "store").is_dir():
            folder = Path(scratch) / "policy"
            wanted = None if version == "latest" else int(version)
            base = base_loader(settings.policy.path or SEED_POLICY)  # used where the version is an adapter
            held = export_version(source / "store", wanted, folder, base=base).version
        elif not (source / "config.json").is_file():
            raise SettingsError(f"{source} is neither a run folder nor a policy folder")
        elif version != "latest":
            raise SettingsError(f"{source} is a policy folder, which has no versions")
        found = asyncio.run(evaluate(folder, settings, prompts=prompts, samples=samples))
    if as_json:
        print_json({"version": held, **asdict(found)})
        return
    of = f"version {held}" if held is not None else str(source)
    click.echo(
        f"{of} on {found.task}: held-out reward {found.reward:.4f} "
        f"(95 % between {found.low:.4f} and {found.high:.4f}; "
        f"{found.prompts} prompts × {found.samples_per_prompt}, {found.tokens_mean:.1f} tokens each)"
    )
    if found.failed:
        click.echo(f"{found.failed} rewards could not be computed and count as 0", err=True)
