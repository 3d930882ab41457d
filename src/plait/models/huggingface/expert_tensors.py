"""The matrices of experts in weight files: one tensor for each expert, where the model has one for all.

    model                       files, one tensor an expert
    mlp.experts.gate_up_proj    mlp.experts.0.gate_proj.weight, mlp.experts.0.up_proj.weight, …
    mlp.experts.down_proj       mlp.experts.0.down_proj.weight, …

Mixtral's files have `w1`, `w3` and `w2`, and `block_sparse_moe` for `mlp`. Files with one tensor for all
experts have the names of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from plait.errors import ModelError, listed

_TENSORS = ("gate_up_proj", "down_proj")
"""The tensors of all experts in a model."""
_MOST_LISTED = 5


@dataclass(frozen=True)
class ExpertNames:
    """Names of a block's MLP and of an expert's matrices, in weight files with one tensor per expert."""

    block: str
    gate: str
    up: str
    down: str

    def joined(self) -> Mapping[str, tuple[str, ...]]:
        """Return which matrices of an expert each tensor of the model holds, joined along the rows."""
        return dict(zip(_TENSORS, ((self.gate, self.up), (self.down,)), strict=True))

    def parse(self, key: str) -> tuple[str, int, str] | None:
        """Return path of the experts, number and matrix that a key names; None for keys of other tensors."""
        matrices = "|".join((self.gate, self.up, self.down))
        found = re.fullmatch(rf"(.*)\.{self.block}\.experts\.(\d{{1,6}})\.({matrices})\.weight", key)
        return None if found is None else (f"{found[1]}.mlp.experts", int(found[2]), found[3])

    def key(self, path: str, number: int, matrix: str) -> str:
        """Return the name in weight files of one expert's `matrix`; `path`: of the experts in the model."""
        return f"{self.in_files(path)}.{number}.{matrix}.weight"

    def in_model(self, key: str) -> str:
        """Return the name in the model of a tensor that is not of experts."""
        return key.replace(f".{self.block}.", ".mlp.")

    def in_files(self, name: str) -> str:
        """Return the name in weight files of a tensor of the model that is not of experts."""
        return name.replace(".mlp.", f".{self.block}.")


_QWEN = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
_MIXTRAL = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
SAVED_BY_TRANSFORMERS: Mapping[str, ExpertNames] = {
    "deepseek_v3": _QWEN,
    "mixtral": _MIXTRAL,
    "olmoe": _QWEN,
    "qwen2_moe": _QWEN,
    "qwen3_moe": _QWEN,
}
"""How `save_pretrained` names the matrices of an expert, by `model_type`, unless they were loaded as one."""


def is_of_experts(name: str) -> bool:
    """Return whether a tensor of a model, by its name in transformers, has the matrices of all experts."""
    return name.endswith(tuple(f".mlp.experts.{tensor}" for tensor in _TENSORS))


def expert_names_in(keys: Iterable[str]) -> ExpertNames | None:
    """Return how files with these keys name the tensors of each expert; None where they have none."""
    known = list(keys)
    return next((one for one in (_QWEN, _MIXTRAL) if any(map(one.parse, known))), None)


def joined_experts(folder: Path, slices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a folder by the model's names, with tensors of single experts joined.

    Raises ModelError where a matrix of an expert is missing, or is unlike those of the other experts.
    """
    names = expert_names_in(slices)
    if names is None:
        return dict(slices)
    found, experts = dict[str, Any](), dict[str, set[int]]()
    for key, one in slices.items():
        parsed = names.parse(key)
        if parsed is None:
            found[names.in_model(key)] = one
        else:
            experts.setdefault(parsed[0], set()).add(parsed[1])
    faults = list[str]()
    for path, numbers in experts.items():
        for tensor, matrices in names.joined().items():
            keys = [[names.key(path, one, matrix) for one in range(len(numbers))] for matrix in matrices]
            faults += _misfits(keys, slices)
            if f"{path}.{tensor}" in found:
                faults.append(f"{path}.{tensor} is there beside {keys[0][0]}")
            found[f"{path}.{tensor}"] = StackedSlices([[slices.get(key) for key in row] for row in keys])
    if faults:
        raise ModelError(
            f"the weights of experts in {folder} do not fit each other "
            f"({listed(faults, between='; ', most=_MOST_LISTED)}): give a folder that is whole."
        )
    return found


def _misfits(keys: Sequence[Sequence[str]], slices: Mapping[str, Any]) -> Iterator[str]:
    """Yield the faults of the tensors `keys`: missing ones, and those unlike the first."""
    every = [key for row in keys for key in row]
    forms = {key: (list(slices[key].get_shape()), slices[key].get_dtype()) for key in every if key in slices}
    first = next(iter(forms), "")
    for key in every:
        if key not in forms:
            yield f"{key} is missing"
        elif forms[key] != forms[first] or len(forms[key][0]) != 2:
            yield "{} is {} {}, {} is {} {}".format(key, *forms[key], first, *forms[first])


class StackedSlices:
    """The tensor `[experts, rows, columns]` of a model, read on demand from tensors of single experts.

    Has what plait uses of the slices of safetensors: `get_shape`, `get_dtype`, and `[...]`.
    """

    def __init__(self, matrices: Sequence[Sequence[Any]]) -> None:
        """`matrices`: those joined along the rows, of each the slices `[rows, columns]` of all experts."""
        self._matrices = matrices

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        first = self._matrices[0]
        rows, columns = first[0].get_shape()
        return [len(first), len(self._matrices) * rows, columns]

    def get_dtype(self) -> str:
        """Return the dtype, as safetensors names it."""
        return str(self._matrices[0][0].get_dtype())

    def __getitem__(self, index: EllipsisType) -> Tensor:
        """Return the whole tensor, read one matrix of an expert at a time."""
        first, shape = self._matrices[0][0][...], self.get_shape()
        whole = torch.empty(shape, dtype=first.dtype)
        for rows, matrices in zip(whole.chunk(len(self._matrices), dim=1), self._matrices, strict=True):
            for target, matrix in zip(rows, matrices, strict=True):
                target.copy_(matrix[...])
        return whole
