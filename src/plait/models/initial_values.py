"""Initial values that depend only on a tensor's name, the seed and an element's index, not on the sharding.

The generator is Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): counter-based,
so element `i` of a tensor is a pure function of `(seed, name, i)`.

Where no distribution is named, a module's `reset_parameters()` gives the values, with a check that it writes
every element. The module is copied to CPU memory in which each byte is known. Modules inside are reset first,
then those around them, as when they are built. A number that stays, or that depends on what was there, shows:
NaN in, NaN out. Where a result holds NaN, or has a dtype without it, the reset runs once more on other bytes,
and each byte of its result has to be the same.
"""

from __future__ import annotations

import copy
import hashlib
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.plan.rules import join
from plait.tensor.find_module_hooks import computed_by_hooks, weight_utility

FIRST_BYTE, OTHER_BYTE = 0xFF, 0x5A
"""What memory holds before a reset: NaN and -1, then numbers that are neither small nor NaN in any dtype."""
WITH_NAN = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
"""Dtypes whose arithmetic passes NaN on, and in which `FIRST_BYTE` is NaN."""


@dataclass(frozen=True)
class Normal:
    """Normal distribution around zero; `Normal(0.0)` is all zeros."""

    std: float


@dataclass(frozen=True)
class Constant:
    """Constant initial value, the same for every element."""

    value: float


Initial = Normal | Constant
"""The initial distribution of a parameter."""


def normal_values(name: str, seed: int, count: int, std: float) -> Tensor:
    """Return normal initial values of the elements of tensor `name`, flat; float64, on the CPU."""
    if std == 0.0:
        return torch.zeros(count, dtype=torch.float64)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
    # 52 bits, moved to the middle of their interval: strictly inside (0, 1), so the inverse is finite.
    uniform = torch.from_numpy((words >> np.uint64(12)).astype(np.float64)).add_(0.5).mul_(2.0**-52)
    return uniform.mul_(2).sub_(1).erfinv_().mul_(std * math.sqrt(2))


def initial_value(
    layer: nn.Module, path: str, name: str, seed: int, latest: ModuleReset | None = None
) -> Tensor:
    """Return the whole initial value of the parameter or buffer `name` of `layer`, whose path is `path`.

    A tensor with a value keeps it. One on the meta device gets the distribution that `initial_values()` of
    the innermost module around it, up to the layer, names for it; else what the `reset_parameters()` of
    modules around it set, see `ModuleReset`. `latest`: the reset of which other tensors were read before.
    Raises ModelError where neither exists, or a reset leaves a part of the tensor unwritten.
    """
    current: Tensor = _current(layer, name)
    if not current.is_meta:
        return current
    rule = _rule(layer, name)
    if isinstance(rule, Constant):
        return torch.full(current.shape, rule.value, dtype=current.dtype, device="cpu")
    if rule is not None:
        values = normal_values(join(path, name), seed, current.numel(), rule.std)
        return values.to(current.dtype).view(current.shape)
    return (latest or ModuleReset()).value(layer, path, name, seed)


def _rule(layer: nn.Module, name: str) -> Initial | None:
    """Return the distribution that the innermost module of `layer` around tensor `name` gives it, or None."""
    parts = name.split(".")
    for count in range(len(parts) - 1, -1, -1):
        module = layer.get_submodule(".".join(parts[:count]))
        rules: dict[str, Initial] = getattr(module, "initial_values", dict)()
        rule = rules.get(".".join(parts[count:]))
        if rule is not None:
            return rule
    return None


@dataclass
class ModuleReset:
    """Caches the tensors of the latest `reset_parameters()` of a module, which are read one by one."""

    _of: tuple[nn.Module, str, int] | None = None
    """The module, its path, and the seed."""
    _first: dict[str, Tensor] = field(default_factory=dict)
    _other: dict[str, Tensor] = field(default_factory=dict)
    """Results on other bytes, once they were needed."""

    def value(self, layer: nn.Module, path: str, name: str, seed: int) -> Tensor:
        """Return what `reset_parameters()` of a module around it gives the meta tensor `name` of `layer`.

        `path` is that of the layer. Of the modules around the tensor the outermost with `reset_parameters` is
        reset, with those inside it; each under a seed that is a hash of its path. Raises ModelError where
        there is none, where it fails, and where it does not write the whole tensor.
        """
        root_name = _outermost_reset(layer, path, name)
        root, local = layer.get_submodule(root_name), name[len(root_name) + bool(root_name) :]
        root_path = f"{path}.{root_name}"
        if self._of != (root, root_path, seed) or local not in self._first:
            self._of, self._other = (root, root_path, seed), {}
            self._first = _reset(root, root_path, seed, FIRST_BYTE)
        value = self._first.pop(local)
        _require_like(_current(layer, name), join(path, name), value)
        # What was there, NaN in such dtypes, would show.
        if value.dtype not in WITH_NAN or bool(value.sum().isnan()):
            self._other = self._other or _reset(root, root_path, seed, OTHER_BYTE)
            if not torch.equal(_bytes_of(value), _bytes_of(self._other[local])):
                place, part = _described(root, root_path), _how_much(value, self._other[local])
                if utility := weight_utility(root):
                    raise ModelError(
                        f"{join(path, name)} is on the meta device, and nothing draws it: {utility} computes "
                        f"a weight of {place} from it; build the model with real values."
                    )
                raise ModelError(
                    f"{join(path, name)} is on the meta device, and reset_parameters() of {place} does not "
                    f"set {part} of it: let it set the whole, give the layer an initial_values() that names "
                    "it, or build the model with real values."
                )
        return value


def _require_like(current: Tensor, place: str, value: object) -> None:
    """Raise ModelError unless a reset left a CPU tensor of the shape and dtype that the model has."""
    wanted = f"{current.dtype} {list(current.shape)}"
    found = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        found = f"{value.dtype} {list(value.shape)}{' on the meta device' if value.is_meta else ''}"
    if found != wanted:
        raise ModelError(
            f"{place} is {wanted}, but reset_parameters() leaves {found}: let it write to the tensor in "
            "place, such as by nn.init."
        )


def _outermost_reset(layer: nn.Module, path: str, name: str) -> str:
    """Return the path in `layer` of the outermost module with `reset_parameters` that has tensor `name`."""
    parts = name.split(".")[:-1]
    for count in range(len(parts) + 1):
        found = ".".join(parts[:count])
        if hasattr(layer.get_submodule(found), "reset_parameters"):
            return found
    raise ModelError(
        f"{join(path, name)} is on the meta device and has no initial value: give layer {path!r} an "
        "initial_values() that names it, or build the model with real values."
    )


def _reset(root: nn.Module, path: str, seed: int, byte: int) -> dict[str, Tensor]:
    """Return by name the tensors of a copy of `root` that are on the meta device there, after all resets.

    Other tensors have their values. Memory is filled with `byte` before.
    """
    tensors = {id(one): one for one in (*root.parameters(), *root.buffers()) if one.is_meta}
    memo = {id(one): one.detach() for one in computed_by_hooks(root)}
    copied = copy.deepcopy(root, memo | {number: _filled(one, byte) for number, one in tensors.items()})
    originals = dict(root.named_modules(remove_duplicate=False))
    for name, module in _children_first(copied, ""):
        original = originals[name]
        has_meta = any(id(one) in tensors for one in (*original.parameters(), *original.buffers()))
        if has_meta and hasattr(module, "reset_parameters"):
            where = join(path, name)
            with _seeded(f"{seed}/{where}"):
                _call_reset(module, where)
    parameters = root.named_parameters(remove_duplicate=False)
    named = (*parameters, *root.named_buffers(remove_duplicate=False))
    return {name: _current(copied, name) for name, tensor in named if id(tensor) in tensors}


def _call_reset(module: nn.Module, path: str) -> None:
    try:
        module.reset_parameters()  # type: ignore[operator]
    except Exception as error:
        raise ModelError(
            f"reset_parameters() of {_described(module, path)} fails on memory on the CPU, "
            f"{type(error).__name__}: {error}: mend it, give the layer an initial_values(), or build the "
            "model with real values."
        ) from error


def _children_first(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in `module` with their names, each after those inside it."""
    for child_name, child in module.named_children():
        yield from _children_first(child, join(name, child_name))
    yield name, module


def _current(module: nn.Module, name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    found: Any = getattr(module.get_submodule(owner), attribute, None)
    return found.detach() if isinstance(found, Tensor) else found


@contextmanager
def _seeded(text: str) -> Iterator[None]:
    """Context: seed the CPU's generators of torch, numpy and Python with a hash of `text`; restore them."""
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        # The CPU's generator only: torch.manual_seed would also seed every accelerator's.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def _filled(tensor: Tensor, byte: int) -> Tensor:
    """Return a CPU tensor like the meta tensor `tensor`, a parameter if it is one, whose bytes are `byte`."""
    byte = byte % 2 if tensor.dtype == torch.bool else byte
    count = tensor.numel() * tensor.element_size()
    filled = torch.full((count,), byte, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
    return nn.Parameter(filled, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else filled


def _bytes_of(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def _how_much(one: Tensor, other: Tensor) -> str:
    """Return how many elements of two tensors differ, as text."""
    size = max(one.element_size(), 1)
    differs = (_bytes_of(one) != _bytes_of(other)).view(-1, size).any(1)
    return "any element" if differs.all() else f"{int(differs.sum())} of the {differs.numel()} elements"


def _described(module: nn.Module, path: str) -> str:
    return f"{path.strip('.') or 'the model'} ({type(module).__name__})"
