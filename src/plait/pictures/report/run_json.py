"""The content of `run.json`: environment and plan of a run, each rank's tensors, predicted memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from plait.errors import DataError
from plait.files import adapter_of, json_value, read_text, validated, write_bytes

T = TypeVar("T")

RUN_FILE = "run.json"
FORMAT = 1

AXES = ("pp", "replicate", "shard", "cp", "tp")
MOST_RANKS = 1 << 20
"""A page of more is not drawn."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
BoxBounds = tuple[tuple[Count, ...], tuple[Count, ...]]
"""Of a box in a tensor: its first index and its size along each dim."""


@dataclass(frozen=True)
class PlannedLayer:
    """A layer of the model: its path, the type of its module, its elements, and the stage that runs it."""

    path: str
    module: str
    elements: Count
    stage: Count


@dataclass(frozen=True)
class TensorShard:
    """The part of a tensor on a `tp` rank, and the ranges of it that `shard` and `cp` ranks hold."""

    boxes: tuple[BoxBounds, ...]
    """The boxes whose concatenation it is."""
    intervals: tuple[tuple[Count, Count], ...] = ()
    """Of its flattened elements, for each rank of `shard` × `cp` the first and the end; () if it is whole."""


@dataclass(frozen=True)
class PlannedTensor:
    """The layout of a parameter, which may stand for several parameters of equal shape and layout."""

    name: str
    shape: tuple[Count, ...]
    pp: tuple[Count, ...]
    """The ranks of `pp` that hold it."""
    pieces: tuple[TensorShard, ...]
    """One for each rank of `tp`; of experts, for each rank of `ep` × `etp`."""
    alike: Count = 1
    """Number of parameters of this shape and layout, with this one."""


@dataclass(frozen=True)
class PredictedRank:
    """Predicted memory of a rank of `pp`, in bytes by use, as `plait.memory` gives it."""

    rank: Count
    most: Count
    at_rest: Count
    at_peak: Mapping[str, Count]
    """Bytes by use, at the peak between two instructions."""


@dataclass(frozen=True)
class RunDescription:
    """The description of a run in `run.json`, written before the first step."""

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
    mesh: Mapping[str, Annotated[int, Field(ge=1, le=MOST_RANKS)]]
    """Number of ranks by axis, those of `AXES`."""
    strategy: str
    """What is sharded over `shard` and `cp`."""
    stage_ranks: tuple[Count, ...]
    """The rank of `pp` that runs each stage."""
    layers: tuple[PlannedLayer, ...]
    tensors: tuple[PlannedTensor, ...]
    memory: tuple[PredictedRank, ...]
    rows: Count = 0
    """Rows of a global batch; 0: unknown."""
    predicted_seconds: Annotated[float, Field(ge=0, lt=1e300)] | None = None
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


def write_description(description: RunDescription, folder: Path) -> None:
    """Write `run.json` in `folder`. Raises `OSError`."""
    write_bytes(folder / RUN_FILE, adapter_of(RunDescription).dump_json(description, indent=1))


def read_description(folder: Path) -> RunDescription | None:
    """Return the content of `run.json` in `folder`, or None without it. Raises `DataError` if damaged."""
    return read_json_file(RunDescription, folder / RUN_FILE, _contradictions)


def _contradictions(read: RunDescription) -> Iterator[str]:
    """Yield the contradictions between fields of a description, as text."""
    if set(read.mesh) != set(AXES) or read.world > MOST_RANKS:
        yield f"mesh: it has not the axes {', '.join(AXES)}, or more than {MOST_RANKS:,} ranks"
        return
    if not read.layers or not read.stage_ranks or max(read.stage_ranks) >= read.mesh["pp"]:
        yield "stage_ranks: there are no stages, or one runs on no rank of pp"
    if any(layer.stage >= len(read.stage_ranks) for layer in read.layers):
        yield "layers: one is in no stage"
    if any(one.rank >= read.mesh["pp"] for one in read.memory):
        yield "memory: it has a rank that there is not"
    for tensor in read.tensors:
        bounds = [box for shard in tensor.pieces for box in shard.boxes]
        if not tensor.pieces or any(not len(a) == len(b) == len(tensor.shape) for a, b in bounds):
            yield f"tensors.{tensor.name}: it has no shards, or of other dims"


def read_json_file(
    kind: type[T], path: Path, contradictions: Callable[[T], Iterator[str]] = lambda _: iter(())
) -> T | None:
    """Return an object of class `kind` from a JSON file of a run, or None without the file."""
    try:
        text = read_text(path)
        read = json_value(text)
        if isinstance(read, dict) and type(read.get("format")) is int and read["format"] > FORMAT:
            raise DataError(
                f"{path} has format {read['format']}, and this version of plait reads formats up to "
                f"{FORMAT}: update plait, or remove the file."
            )
        found = validated(kind, text)
        for problem in contradictions(found):
            raise ValueError(problem)
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(
            f"{path} is damaged ({reason}): remove it, and the report is made of the other files of the run."
        ) from None
