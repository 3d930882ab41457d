"""Reads whole tensors of a checkpoint by name, on request with LoRA adapters added to the weights.

A linear at `PATH` with an adapter is saved as `PATH.base.weight`, `PATH.down.weight` and `PATH.up.weight`; an
adapter of the parameter `NAME` of experts as `NAME_adapter.down` and `NAME_adapter.up`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.box_reader import BoxReader, open_manifest, require_undamaged
from plait.checkpoint.folders import resolve
from plait.checkpoint.manifest import Manifest
from plait.checkpoint.rank_contents import parameter_key
from plait.checkpoint.tensor_file import BoxToWrite, portions
from plait.errors import CheckpointError, listed
from plait.plan.layout.layout import Box
from plait.plan.layout.shards import full_box


class FullTensors:
    """Reads whole (unsharded) tensors of a checkpoint by name; checks all files for damage when opened."""

    def __init__(self, path: Path) -> None:
        """Open the checkpoint `path`, or the newest in that folder. Raises CheckpointError if damaged."""
        self.folder = resolve(path)
        self.manifest = open_manifest(self.folder)
        require_undamaged(self.folder, portions(self.manifest.files))
        self._boxes = BoxReader(self.folder, self.manifest)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor was saved."""
        return self.manifest.tensors[name].torch_dtype

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a whole tensor on the CPU in `dtype` (None: as saved). Raises CheckpointError if incomplete.

        Memory: that tensor; the boxes of the files are memory-mapped.
        """
        return self.read_box(name, full_box(self.manifest.tensors[name].shape), dtype)

    def read_box(self, name: str, box: Box, dtype: torch.dtype | None = None) -> Tensor:
        """Return a box (a range per dim) of a tensor on the CPU, in `dtype` (None: as saved)."""
        found = torch.empty(box.sizes, dtype=dtype or self.dtype(name))
        self._boxes.fill_box(found, name, box)
        return found

    def items(self) -> list[BoxToWrite]:
        """Return each non-empty tensor as a `BoxToWrite`, whose values are read only when it is written."""
        return [
            BoxToWrite(name, full_box(one.shape), one.torch_dtype, partial(self.read, name))
            for name, one in self.manifest.tensors.items()
            if prod(one.shape)
        ]


_BASE, _PARTS = "base", ("base", "down", "up")


_OF_EXPERTS = "_adapter.down"


_MOST_LISTED = 3


@dataclass(frozen=True)
class Adapter:
    """A weight's LoRA adapter in a checkpoint: its tensors' names, and how they are added to the weight."""

    shapes: Mapping[str, tuple[int, ...]]
    """By name, in the order of the arguments of `added` after the weight."""
    added: Callable[..., Tensor]
    """Returns the weight to which the adapter's tensors are added, given the weight and the tensors."""


class MergedTensors:
    """Reads a model's tensors by name, with LoRA adapters in the checkpoint added to their linears."""

    def __init__(self, tensors: FullTensors, adapters: Mapping[str, Adapter]) -> None:
        """`adapters`: by the name of their weight. CheckpointError where others are saved."""
        _require_adapters(tensors.manifest, adapters)
        self._tensors = tensors
        self._adapters = {parameter_key(name): one for name, one in adapters.items()}
        parts = {parameter_key(name) for one in adapters.values() for name in one.shapes}
        paths = (name.rpartition(".")[0] for name in adapters)
        bases = {parameter_key(f"{path}.{_BASE}."): parameter_key(f"{path}.") for path in paths}
        self._saved: dict[str, str] = {}
        """The key in the checkpoint by the key of a tensor."""
        for key in tensors.manifest.tensors:
            path, _, attribute = key.rpartition(".")
            if key not in parts:
                self._saved[f"{bases.get(f'{path}.', f'{path}.')}{attribute}"] = key
        saved = tensors.manifest.tensors
        self.manifest = replace(
            tensors.manifest, tensors={new: saved[old] for new, old in self._saved.items()}
        )

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor was saved."""
        return self.manifest.tensors[name].torch_dtype

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a whole tensor on the CPU, its LoRA adapter added, in `dtype` (None: as saved).

        Raises CheckpointError if incomplete. Memory: that tensor, and of an adapted linear its weight in
        float32.
        """
        adapter = self._adapters.get(name)
        if adapter is None:
            return self._tensors.read(self._saved[name], dtype)
        parts = (self._tensors.read(parameter_key(part)) for part in adapter.shapes)
        return adapter.added(self._tensors.read(self._saved[name]), *parts).to(dtype or self.dtype(name))

    def read_box(self, name: str, box: Box, dtype: torch.dtype | None = None) -> Tensor:
        """Return a box (a range per dim) of a tensor on the CPU, its LoRA adapter added, as `read` does."""
        if name in self._adapters:
            return self.read(name, dtype)[box.slices].contiguous()
        return self._tensors.read_box(self._saved[name], box, dtype)


def adapted_weights(names: Iterable[str]) -> list[str]:
    """Return the names of the weights with a LoRA adapter, given the names of a model's parameters."""
    known = set(names)
    bases = (name.removesuffix(f".{_BASE}.weight") for name in known if name.endswith(f".{_BASE}.weight"))
    linears = (path for path in bases if all(f"{path}.{part}.weight" in known for part in _PARTS))
    experts = (name.removesuffix(_OF_EXPERTS) for name in known if name.endswith(_OF_EXPERTS))
    return sorted([*(f"{path}.weight" for path in linears), *(name for name in experts if name in known)])


def _require_adapters(manifest: Manifest, adapters: Mapping[str, Adapter]) -> None:
    shapes = {name: one.shape for name, one in manifest.parameters.items()}
    unknown = [name.removesuffix(".weight") for name in adapted_weights(shapes) if name not in adapters]
    if unknown:
        raise CheckpointError(
            f"the checkpoint has adapters whose scale it does not record "
            f"({listed(unknown, most=_MOST_LISTED)}), since no run of `plait train` saved it: merge them in "
            "Python by plait.models.merged_values, or save them by plait.models.save_adapter."
        )
    wanted = {name: shape for one in adapters.values() for name, shape in one.shapes.items()}
    others = [name for name, shape in wanted.items() if shapes.get(name) != shape]
    if others:
        raise CheckpointError(
            f"the checkpoint has other adapters than its configuration says "
            f"({listed(others, most=_MOST_LISTED)}): give the folder of the model that was trained."
        )
