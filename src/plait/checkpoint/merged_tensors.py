"""The model in a checkpoint without its adapters: those of LoRA are added to the weights of their linears.

A linear at `PATH` with an adapter is saved as `PATH.base.weight`, `PATH.down.weight` and `PATH.up.weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.checkpoint.box_reader import FullTensors
from plait.checkpoint.manifest import Manifest
from plait.checkpoint.rank_contents import parameter_key
from plait.errors import CheckpointError, listed

_BASE, _PARTS = "base", ("base", "down", "up")
_MOST_LISTED = 3


@dataclass(frozen=True)
class Adapter:
    """The adapter of a linear in a checkpoint: the names of its tensors, and how they are added."""

    shapes: Mapping[str, tuple[int, ...]]
    """By name, in the order of the arguments of `added` after the weight."""
    added: Callable[..., Tensor]
    """Returns the weight to which the adapter's tensors are added, given the weight and the tensors."""


class MergedTensors:
    """The tensors of a model without adapters, read by name from a checkpoint with them; as `FullTensors`."""

    def __init__(self, tensors: FullTensors, adapters: Mapping[str, Adapter]) -> None:
        """`adapters`: those of all adapted linears, by path. CheckpointError where others are saved."""
        _require_adapters(tensors.manifest, adapters)
        self._tensors = tensors
        self._adapters = {parameter_key(f"{path}.weight"): one for path, one in adapters.items()}
        parts = {parameter_key(name) for one in adapters.values() for name in one.shapes}
        bases = {parameter_key(f"{path}.{_BASE}."): parameter_key(f"{path}.") for path in adapters}
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
        """Return a whole tensor on the CPU in `dtype` (None: as saved). Raises CheckpointError if incomplete.

        Memory: that tensor, and of an adapted linear its weight in float32.
        """
        adapter = self._adapters.get(name)
        if adapter is None:
            return self._tensors.read(self._saved[name], dtype)
        parts = (self._tensors.read(parameter_key(part)) for part in adapter.shapes)
        return adapter.added(self._tensors.read(self._saved[name]), *parts).to(dtype or self.dtype(name))


def adapted_linears(names: Iterable[str]) -> list[str]:
    """Return the paths of the linears with an adapter, given the names of a model's parameters."""
    known = set(names)
    bases = (name.removesuffix(f".{_BASE}.weight") for name in known if name.endswith(f".{_BASE}.weight"))
    return sorted(path for path in bases if all(f"{path}.{part}.weight" in known for part in _PARTS))


def _require_adapters(manifest: Manifest, adapters: Mapping[str, Adapter]) -> None:
    prefix = parameter_key("")
    shapes = {
        name.removeprefix(prefix): one.shape
        for name, one in manifest.tensors.items()
        if name.startswith(prefix)
    }
    unknown = [path for path in adapted_linears(shapes) if path not in adapters]
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
