"""Rows of tables: Parquet files, and data sets of Hugging Face, which are Arrow files on the disk.

`datasets` finds or downloads a data set; its Arrow files are read here, memory-mapped, a few rows at a time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, DataError, missing_package

HUB = "hf://"
"""How the name of a data set of Hugging Face begins: hf://OWNER/NAME/CONFIGURATION@REVISION:SPLIT."""
_NAME = re.compile(r"(?P<name>[^@:]+)(@(?P<revision>[^@:]+))?(:(?P<split>\w+(\.\w+)*))?")
_ROWS_AT_ONCE = 128


def is_dataset(source: str) -> bool:
    """Return whether a source is a data set of Hugging Face: by name, or a folder it was saved to."""
    folder = Path(source).expanduser()
    saved = (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()
    return source.startswith(HUB) or saved or (folder / "dataset_dict.json").is_file()


def dataset_files(source: str) -> list[Path]:
    """Return the Arrow files of a data set, on the disk or by name.

    A data set by name is downloaded into the cache of `datasets`, unless it is there. Raises DataError where
    it cannot be had, ConfigError where the package is missing.
    """
    datasets = _imported("datasets", source)
    datasets.disable_progress_bars()
    try:
        if source.startswith(HUB):
            found = datasets.load_dataset(**_arguments(source.removeprefix(HUB)))
        else:
            found = datasets.load_from_disk(str(Path(source).expanduser()))
    except ConnectionError as error:
        raise DataError(
            f"{source} cannot be reached, and is not in the cache: {_reason(error)}; look at the network, or "
            "copy the data set here and give its folder."
        ) from None
    except Exception as error:  # the library raises many types
        raise DataError(f"{source} cannot be read: {_reason(error)}.") from None
    if not isinstance(found, datasets.Dataset):
        raise DataError(f"{source} has several splits ({', '.join(found)}): give the folder of one of them.")
    files = [Path(one["filename"]) for one in found.cache_files]
    if sum(_arrow(str(one)).num_rows for one in files) != len(found):
        raise DataError(f"{source} is a selection of rows: save it with save_to_disk, and give that folder.")
    return files


def row_ranges(path: str, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of an Arrow file's rows, or of a Parquet file's row groups, of about `size` bytes each.

    Of each: its first, the one after its last, and its bytes.
    """
    if path.endswith(".parquet"):
        metadata = _parquet(path).metadata
        sizes = [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
        begin, held = 0, 0
        for number, one in enumerate(sizes, 1):
            held += one
            if held >= size or number == len(sizes):
                yield begin, number, held
                begin, held = number, 0
        return
    rows = _arrow(path).num_rows
    each = max(1, Path(path).stat().st_size // max(1, rows))
    step = max(1, size // each)
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        yield begin, end, (end - begin) * each


def read_rows(
    path: str, begin: int, end: int, wanted: Collection[str] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows of a range of `row_ranges` with their numbers, of the columns in `wanted` that there are.

    `wanted`: None for all. Raises DataError for a row with text that is no UTF-8.
    """
    if path.endswith(".parquet"):
        file = _parquet(path)
        columns = [one for one in file.schema_arrow.names if wanted is None or one in wanted]
        batches = file.iter_batches(_ROWS_AT_ONCE, row_groups=list(range(begin, end)), columns=columns)
        number = sum(file.metadata.row_group(group).num_rows for group in range(begin))
    else:
        table = _arrow(path)
        names = [one for one in table.column_names if wanted is None or one in wanted]
        table = table.select(names).slice(begin, end - begin)
        batches, number = table.to_batches(max_chunksize=_ROWS_AT_ONCE), begin
    for batch in batches:
        yield from enumerate(_rows(batch, path, number), number)
        number += batch.num_rows


def _rows(batch: Any, path: str, first: int) -> list[dict[str, Any]]:
    """Return a `pyarrow.RecordBatch` as dictionaries; `first`: the number of its first row."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
        return [{name: _filled(value) for name, value in row.items()} for row in rows]
    except UnicodeDecodeError:  # Arrow does not look at what a string holds
        for number in range(batch.num_rows):
            try:
                batch.slice(number, 1).to_pylist()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path} has text in row {first + number} that is no UTF-8 ({error.reason}): mend or "
                    "remove it."
                ) from None
        raise


def _filled(value: Any) -> Any:
    """Return a value without the fields of its structures that are null.

    All rows of a table have the same fields: those that a row was written without, such as the arguments of
    other tools, are null in it.
    """
    if isinstance(value, dict):
        return {name: _filled(one) for name, one in value.items() if one is not None}
    return [_filled(one) for one in value] if isinstance(value, list) else value


def column_names(path: str) -> list[str]:
    """Return the names of a table's columns."""
    names: list[str] = (
        _parquet(path).schema_arrow.names if path.endswith(".parquet") else _arrow(path).column_names
    )
    return names


def _arguments(name: str) -> Mapping[str, Any]:
    """Return the arguments of `load_dataset` for the name of a data set, or the path of a folder."""
    parts = _NAME.fullmatch(name)
    if parts is None:
        raise DataError(f"write OWNER/NAME:SPLIT after {HUB}, where SPLIT is one whole split")
    path, configuration = parts["name"], None
    if not path.startswith(("/", ".", "~")) and path.count("/") == 2:
        path, _, configuration = path.rpartition("/")
    return {
        "path": str(Path(path).expanduser()) if path.startswith("~") else path,
        "name": configuration,
        "revision": parts["revision"],
        "split": parts["split"] or "train",
    }


def _parquet(path: str) -> Any:
    """Return a `pyarrow.parquet.ParquetFile`."""
    parquet = _imported("pyarrow.parquet", path)
    try:
        return parquet.ParquetFile(path)
    except Exception as error:  # the library raises many types
        raise DataError(f"{path} cannot be read: {_reason(error)}.") from None


def _arrow(path: str) -> Any:
    """Return an Arrow file as a `pyarrow.Table`, memory-mapped."""
    pyarrow = _imported("pyarrow", path)
    try:
        return pyarrow.ipc.open_stream(pyarrow.memory_map(path)).read_all()
    except Exception as error:  # the library raises many types
        raise DataError(f"{path} cannot be read: {_reason(error)}.") from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")[:200]


def _imported(module: str, path: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise ConfigError(f"{missing_package(path, 'datasets', 'data')}.") from None
