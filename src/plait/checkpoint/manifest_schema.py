"""The schema of a manifest: its keys, their types, and the consistency of its parts.

A valid checksum does not make a manifest well formed; all code that reads checkpoints relies on these checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

Size = Annotated[StrictInt, Field(ge=0, lt=2**63)]
Dtype = Literal[
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip
"""Names of the dtypes that a file can hold, those of `tensor_file.DTYPES`."""
Plain = dict[StrictStr, Any]
_MOST_ELEMENTS = 2**62
_MOST_LEVELS = 200
"""Most nested dictionaries and lists: functions that walk them are recursive."""


class _Form(BaseModel):
    model_config = ConfigDict(extra="ignore")  # for keys that a later version adds


class _Tensor(_Form):
    shape: tuple[Size, ...]
    dtype: Dtype


class _File(_Form):
    name: StrictStr
    bytes: Size
    header: StrictStr
    boxes: list[tuple[StrictStr, tuple[Size, ...], tuple[Size, ...], Size, StrictStr]]


class _Optimizer(_Form):
    kind: StrictStr = Field(alias="class")
    groups: list[Plain]
    group_of: dict[StrictStr, Size]
    plain: dict[StrictStr, Plain]


class _LossScale(_Form):
    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    good_steps: Size


class _Order(_Form):
    microbatches: Size
    rank_of: list[Size]
    order: StrictStr


class _Run(_Form):
    passes: Size
    loss_scale: _LossScale | None
    order: _Order | None = None


class _Content(_Form):
    tensors: dict[StrictStr, _Tensor]
    files: list[_File]
    optimizer: _Optimizer | None = None
    run: _Run | Annotated[dict[StrictStr, Any], Field(max_length=0)] = Field(default_factory=dict)
    state: Plain = Field(default_factory=dict)
    plan: Plain = Field(default_factory=dict)
    versions: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    aliases: dict[StrictStr, StrictStr] = Field(default_factory=dict)


def schema_error(content: object) -> str | None:
    """Return the first error in the content of a manifest, as "KEY: …", or None."""
    if _is_deep(content):
        return f"content: it is nested more than {_MOST_LEVELS} times"
    try:
        found = _Content.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "content"
        return f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}"
    return next(_inconsistencies(found), None)


def _is_deep(content: object) -> bool:
    level = [content]
    for _ in range(_MOST_LEVELS):
        inner = (
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        )
        level = [one for values in inner for one in values]
        if not level:
            return False
    return True


def _inconsistencies(found: _Content) -> Iterator[str]:
    """Yield errors between parts that have the right types."""
    for name, one in found.tensors.items():
        if prod(one.shape) >= _MOST_ELEMENTS:
            yield f"tensors.{name}: {list(one.shape)} is larger than any memory"
    for name, count in Counter(file.name for file in found.files).items():
        if count > 1:
            yield f"files: {name!r} is listed several times"
    for file in found.files:
        yield from _box_errors(file, found.tensors)
    if found.optimizer is not None:
        for name, group in found.optimizer.group_of.items():
            if group >= len(found.optimizer.groups):
                yield f"optimizer.group_of.{name}: there is no group {group}"
    for alias, name in found.aliases.items():
        if f"model.{name}" not in found.tensors:
            yield f"aliases.{alias}: there is no tensor {name}"


def _box_errors(file: _File, tensors: Mapping[str, _Tensor]) -> Iterator[str]:
    end = 0
    for tensor, offsets, sizes, start, _ in file.boxes:
        known = tensors.get(tensor)
        if known is None:
            yield f"files.{file.name}: it has a box of {tensor}, which is no tensor of the checkpoint"
        elif not len(known.shape) == len(offsets) == len(sizes) or any(
            offset + size > most for offset, size, most in zip(offsets, sizes, known.shape, strict=True)
        ):
            yield f"files.{file.name}: it has a box of {tensor} at {list(offsets)} that is outside of it"
        if not end <= start <= file.bytes:
            yield f"files.{file.name}: its box of {tensor} begins at byte {start}, out of order"
        end = start
