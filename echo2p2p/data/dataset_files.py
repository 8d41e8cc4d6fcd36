"""The files of a Hugging Face data set on the disk: which there are, in which split, and what their columns hold.

pyarrow alone reads them: no code of a data set is run, nothing is unpickled, and no more than a batch is in memory.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from echo2p2p.errors import SettingsError

_BATCH_ROWS = 1024
_MAX_FILES = 100_000
_MAX_STATE_BYTES = 2**24
_SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
"""How the hub's files name their splits."""


def find_splits(folder: Path) -> dict[str, list[Path]]:
    """The files of each split of the data set in ``folder``, in order.

    Raises:
        SettingsError: there is no such folder, it holds no data set, or several.
    """
    if not folder.is_dir():
        raise SettingsError(
            f"there is no folder {folder}", hint="task.options.path names a data set's folder"
        )
    if (folder / "dataset_dict.json").is_file():
        names = _state(folder / "dataset_dict.json").get("splits")
        if not isinstance(names, list) or not all(isinstance(n, str) and Path(n).name == n for n in names):
            raise SettingsError(f"{folder / 'dataset_dict.json'} names no splits")
        return {name: _saved(folder / name) for name in names}
    if (folder / "state.json").is_file():
        return {"train": _saved(folder)}
    return _parquet(folder)


def batches(path: Path, names: Sequence[str]) -> Iterator[list[list[Any]]]:
    """The columns ``names`` of a parquet or arrow file, some rows at a time: for each name its values.

    Raises:
        SettingsError: pyarrow is not installed, the file cannot be read, or a column is not there.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise SettingsError(
            f"the task dataset needs pyarrow: {error}", hint="pip install 'echo2p2p[tasks]'"
        ) from error
    try:
        for batch in (
            _parquet_batches(path, names) if path.suffix == ".parquet" else _arrow_batches(path, names)
        ):
            yield [_values(batch, name) for name in names]
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error


def _saved(folder: Path) -> list[Path]:
    """The files of one split that ``save_to_disk`` wrote."""
    if not (folder / "state.json").is_file():
        raise SettingsError(f"there is no file {folder / 'state.json'}")
    files = _state(folder / "state.json").get("_data_files")
    try:
        names = [str(file["filename"]) for file in files]  # type: ignore[union-attr]
    except (TypeError, KeyError) as error:
        raise SettingsError(f"{folder / 'state.json'} names no data files") from error
    paths = [folder / name for name in names]
    for name, path in zip(names, paths, strict=True):
        if Path(name).name != name or not path.is_file():
            raise SettingsError(f"there is no file {path}")
    if not paths:
        raise SettingsError(f"{folder} is empty")
    return paths


def _parquet(folder: Path) -> dict[str, list[Path]]:
    # Regular files alone: to open a pipe is to wait for its other end.
    regular = (path for path in folder.rglob("*.parquet") if path.is_file())
    found = sorted(islice(regular, _MAX_FILES + 1))
    if len(found) > _MAX_FILES:
        raise SettingsError(f"{folder} holds more than {_MAX_FILES} parquet files")
    if not found:
        raise SettingsError(
            f"{folder} holds no data set: neither parquet files nor what save_to_disk writes",
            hint="the task jsonl reads JSON lines",
        )
    splits: dict[str, list[Path]] = defaultdict(list)
    for path in found:
        splits[_split_of(path.relative_to(folder))].append(path)
    for files in splits.values():
        folders = sorted({str(path.parent.relative_to(folder)) for path in files})
        if len(folders) > 1:
            raise SettingsError(
                f"{folder} holds several data sets: {', '.join(folders[:8])}",
                hint="name one of these folders with task.options.path",
            )
    return dict(splits)


def _split_of(path: Path) -> str:
    """As the hub does: by the words of the file's name, or else of its folders'; train if none says it."""
    for part in reversed(path.with_suffix("").parts):
        for word in re.split(r"[^A-Za-z]+", part.lower()):
            if word in _SPLITS:
                return _SPLITS[word]
    return "train"


def _state(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_STATE_BYTES:
            raise SettingsError(f"{path} is larger than {_MAX_STATE_BYTES} bytes")
        state = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    return state if isinstance(state, dict) else {}


def _parquet_batches(path: Path, names: Sequence[str]) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path, memory_map=True) as file:
        columns = _columns(path, file.schema_arrow.names, names)
        yield from file.iter_batches(batch_size=_BATCH_ROWS, columns=columns)


def _arrow_batches(path: Path, names: Sequence[str]) -> Iterator[Any]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
        columns = _columns(path, stream.schema.names, names)
        for batch in stream:
            for start in range(0, len(batch), _BATCH_ROWS):
                yield batch.slice(start, _BATCH_ROWS).select(columns)


def _columns(path: Path, existing: Sequence[str], names: Sequence[str]) -> list[str]:
    """The columns that hold ``names``, each once."""
    columns = [name if name in existing else name.partition(".")[0] for name in names]
    for column, name in zip(columns, names, strict=True):
        if column not in existing:
            raise SettingsError(
                f"{path} has no column {name!r}; it has {', '.join(existing)}",
                hint="name the columns with the options question and answer",
            )
    return list(dict.fromkeys(columns))


def _values(batch: Any, name: str) -> list[Any]:
    """Python values of a column, or of a field within one."""
    if name in batch.schema.names:
        values: list[Any] = batch.column(name).to_pylist()
        return values
    column, *fields = name.split(".")
    values = batch.column(column).to_pylist()
    for field in fields:
        if any(isinstance(value, dict) and field not in value for value in values):
            raise SettingsError(f"column {column!r} has no field {name!r}")
        values = [value[field] if isinstance(value, dict) else None for value in values]
    return values
