"""Rows of tables: Parquet files, and data sets of Hugging Face, which are Arrow files on the disk.

`datasets` finds or downloads a data set; its Arrow files are read here, a few rows at a time. Neither format
says that what a file holds is what its schema promises: each batch is validated before a value is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, DataError, missing_package
from plait.files import require_file

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
    """Return the Arrow files of a Hugging Face data set: a folder, or a name, which may be downloaded.

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
    if sum(_arrow_rows(str(one)) for one in files) != len(found):
        raise DataError(f"{source} is a selection of rows: save it with save_to_disk, and give that folder.")
    return files


def row_ranges(path: str, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield start, stop and bytes of ranges of about `size` bytes: of Arrow rows, of Parquet row groups."""
    if path.lower().endswith(".parquet"):
        with _parquet(path) as file:
            metadata = file.metadata
            sizes = [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
        begin, held = 0, 0
        for number, one in enumerate(sizes, 1):
            held += one
            if held >= size or number == len(sizes):
                yield begin, number, held
                begin, held = number, 0
        return
    rows = _arrow_rows(path)
    each = max(1, Path(path).stat().st_size // max(1, rows))
    step = max(1, size // each)
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        yield begin, end, (end - begin) * each


def read_rows(
    path: str, begin: int, end: int, wanted: Collection[str] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a range that `row_ranges` gave, with their numbers; `wanted`: columns (None: all).

    `wanted`: None for all. Raises DataError for a row with text that is no UTF-8.
    """
    read = _parquet_batches if path.lower().endswith(".parquet") else _arrow_batches
    for number, batch in read(path, begin, end, wanted):
        yield from enumerate(_rows(batch, path, number), number)


def _parquet_batches(
    path: str, begin: int, end: int, wanted: Collection[str] | None
) -> Iterator[tuple[int, Any]]:
    """Yield the batches of some row groups, each with the number of its first row."""
    with _parquet(path) as file:
        columns = [one for one in file.schema_arrow.names if wanted is None or one in wanted]
        number = sum(file.metadata.row_group(group).num_rows for group in range(begin))
        for group in range(begin, end):
            with _one_sentence(path, f" in row group {group}"):
                for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=columns):
                    yield number, batch
                    number += batch.num_rows


def _arrow_batches(
    path: str, begin: int, end: int, wanted: Collection[str] | None
) -> Iterator[tuple[int, Any]]:
    """Yield batches of some rows of an Arrow file, each with the number of its first row."""
    number = 0
    for batch in _arrow(path):
        after = number + batch.num_rows
        with _one_sentence(path):
            names = [one for one in batch.schema.names if wanted is None or one in wanted]
        for first in range(max(begin, number), min(end, after), _ROWS_AT_ONCE):
            count = min(_ROWS_AT_ONCE, min(end, after) - first)
            yield first, batch.select(names).slice(first - number, count)
        number = after
        if number >= end:
            return


def _rows(batch: Any, path: str, first: int) -> list[dict[str, Any]]:
    """Return a `pyarrow.RecordBatch` as dictionaries; `first`: the number of its first row."""
    is_valid = _is_valid(batch, full=True)
    number = None if is_valid else _invalid_row(batch)
    where = f" in row {first + number}" if number is not None else f" from row {first} on"
    with _one_sentence(path, where):
        if not is_valid:
            batch.validate(full=True)
        rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
    return [{name: _filled(value) for name, value in row.items()} for row in rows]


def _invalid_row(batch: Any) -> int | None:
    """Return the first invalid row of a batch, None where more than its values are invalid."""
    if not _is_valid(batch, full=False):  # then no slice of it is safe
        return None
    rows = (number for number in range(batch.num_rows) if not _is_valid(batch.slice(number, 1), full=True))
    return next(rows, None)


def _is_valid(batch: Any, *, full: bool) -> bool:
    """Return whether a batch's sizes, and in `full` also its values, fit its schema."""
    try:
        batch.validate(full=full)
    except Exception:  # the library raises many types
        return False
    return True


def _filled(value: Any) -> Any:
    """Return a cell's value without the null fields in it that stand for fields which were not written."""
    if isinstance(value, dict):
        return {name: _filled(one) for name, one in value.items() if one is not None}
    return [_filled(one) for one in value] if isinstance(value, list) else value


def column_names(path: str) -> list[str]:
    """Return the names of a table's columns."""
    if path.lower().endswith(".parquet"):
        with _parquet(path) as file:
            return list(file.schema_arrow.names)
    with _one_sentence(path):
        return list(_arrow_reader(path).schema.names)


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
    with _one_sentence(path):
        require_file(Path(path))
        return parquet.ParquetFile(path, page_checksum_verification=True)


def _arrow(path: str) -> Iterator[Any]:
    """Yield the `pyarrow.RecordBatch`es of an Arrow file."""
    reader = _arrow_reader(path)
    while True:
        with _one_sentence(path):
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                return
        yield batch


def _arrow_reader(path: str) -> Any:
    """Return the reader of an Arrow file, which is memory-mapped."""
    pyarrow = _imported("pyarrow", path)
    with _one_sentence(path):
        require_file(Path(path))
        return pyarrow.ipc.open_stream(pyarrow.memory_map(path))


def _arrow_rows(path: str) -> int:
    return sum(batch.num_rows for batch in _arrow(path))


@contextmanager
def _one_sentence(path: str, where: str = "") -> Iterator[None]:
    """Context manager that raises DataError for any error of pyarrow's, with the file and `where` in it."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # the library raises many types
        reason = (isinstance(error, OSError) and error.strerror) or _reason(error)
        raise DataError(f"{path} cannot be read{where}: {reason}.") from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")[:200]


def _imported(module: str, path: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise ConfigError(f"{missing_package(path, 'datasets', 'data')}.") from None
