"""What `run.json` holds: environment and plan of a run, what each rank holds, predicted memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from plait.errors import DataError

RUN_FILE = "run.json"
FORMAT = 1

BoxBounds = tuple[tuple[int, ...], tuple[int, ...]]
"""Of a box in a tensor: its first index and its size along each dim."""


@dataclass(frozen=True)
class PlannedLayer:
    """A layer of the model: its path, the type of its module, its elements, and the stage that runs it."""

    path: str
    module: str
    elements: int
    stage: int


@dataclass(frozen=True)
class TensorPiece:
    """A piece of a tensor that a rank of `tp` has, and how it is divided further over `shard` and `cp`."""

    boxes: tuple[BoxBounds, ...]
    """The boxes whose concatenation it is."""
    intervals: tuple[tuple[int, int], ...] = ()
    """Of its flattened elements, for each rank of `shard` × `cp` the first and the end; () if it is whole."""


@dataclass(frozen=True)
class PlannedTensor:
    """The layout of a parameter, and of others of the same shape and layout."""

    name: str
    shape: tuple[int, ...]
    pp: tuple[int, ...]
    """The ranks of `pp` that hold it."""
    pieces: tuple[TensorPiece, ...]
    """One for each rank of `tp`."""
    alike: int = 1
    """Number of parameters of this shape and layout, with this one."""


@dataclass(frozen=True)
class PredictedRank:
    """Predicted memory of a rank of `pp`, in bytes: see `plait.memory`."""

    rank: int
    most: int
    at_rest: int
    at_peak: Mapping[str, int]
    """Bytes by use, at the peak between two instructions."""


@dataclass(frozen=True)
class RunDescription:
    """The content of `run.json`, written before the first step."""

    format: int
    started: str
    """Date and time with its zone, as ISO 8601."""
    title: str
    lines: tuple[str, ...]
    """What was printed before the first step: model, plan and data in sentences."""
    environment: Mapping[str, str]
    changed_fields: tuple[str, ...]
    """Fields of the configuration that differ from their default."""
    accelerated: bool
    """Whether layers run on an accelerator; its peak memory then counts tensors only."""
    mesh: Mapping[str, int]
    """Number of ranks by axis: pp, replicate, shard, cp, tp."""
    strategy: str
    """What is sharded over `shard` and `cp`."""
    stage_ranks: tuple[int, ...]
    """The rank of `pp` that runs each stage."""
    layers: tuple[PlannedLayer, ...]
    tensors: tuple[PlannedTensor, ...]
    memory: tuple[PredictedRank, ...]
    rows: int = 0
    """Rows of a global batch; 0: unknown."""
    predicted_seconds: float | None = None
    """Predicted time of a step, where the hardware is known."""
    id: str = ""
    """A random text, the same after a resumption; "" of an earlier version of plait."""
    notes: str = ""
    """Text of the user."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.mesh.values())

    @property
    def predicted_memory(self) -> int | None:
        """The most bytes predicted on any rank, or None."""
        return max((rank.most for rank in self.memory), default=None)


@cache
def _adapter() -> TypeAdapter[RunDescription]:
    return TypeAdapter(RunDescription)


def write_description(description: RunDescription, folder: Path) -> None:
    """Write `run.json` in `folder`. Raises `OSError`."""
    (folder / RUN_FILE).write_bytes(_adapter().dump_json(description, indent=1))


def read_description(folder: Path) -> RunDescription | None:
    """Return what `run.json` in `folder` holds, or None without one. Raises `DataError` where damaged."""
    path = folder / RUN_FILE
    if not path.is_file():
        return None
    try:
        read = json.loads(path.read_bytes())
        if isinstance(read, dict) and isinstance(read.get("format"), int) and read["format"] > FORMAT:
            raise DataError(
                f"{path} has format {read['format']}, and this version of plait reads formats up to "
                f"{FORMAT}: update plait, or remove the file."
            )
        return _adapter().validate_python(read)
    except (ValidationError, ValueError) as error:
        raise damaged(path, error) from None


def damaged(path: Path, error: Exception) -> DataError:
    """Return the error for a file of a run that is not as plait wrote it."""
    first = str(error)
    if isinstance(error, ValidationError):
        told = error.errors()[0]
        first = ": ".join(filter(None, [".".join(map(str, told["loc"])), told["msg"]]))
    return DataError(
        f"{path} is damaged ({first}): remove it, and the report is made of the other files of the run."
    )
