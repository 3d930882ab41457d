"""Initial values that depend only on a tensor's name, the seed and an element's index, not on the sharding.

The generator is Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): counter-based,
so element `i` of a tensor is a pure function of `(seed, name, i)`, and any part can be computed by itself.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from plait.models.module_reset import ModuleReset

WORDS_PER_BLOCK = 4
"""64-bit words per value of the Philox counter."""


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


def normal_values(name: str, seed: int, start: int, stop: int, std: float) -> Tensor:
    """Return normal initial values of elements `start:stop` of tensor `name`, flat; float64, on the CPU."""
    if std == 0.0:
        return torch.zeros(stop - start, dtype=torch.float64)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    generator = np.random.Philox(key=int.from_bytes(digest, "little"))
    first_block = start // WORDS_PER_BLOCK
    generator.advance(first_block)
    skipped = start - first_block * WORDS_PER_BLOCK
    words = generator.random_raw(stop - start + skipped)[skipped:]
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
    current = _tensor(layer, name)
    if not current.is_meta:
        return current.detach()
    full_name = f"{path}.{name}" if path else name
    rule = _rule(layer, name)
    if isinstance(rule, Constant):
        return torch.full(current.shape, rule.value, dtype=current.dtype, device="cpu")
    if rule is not None:
        values = normal_values(full_name, seed, 0, current.numel(), rule.std)
        return values.to(current.dtype).view(current.shape)
    return (latest or ModuleReset()).value(layer, path, name, seed)


def _tensor(layer: nn.Module, name: str) -> Tensor:
    owner, _, attribute = name.rpartition(".")
    found: Tensor = getattr(layer.get_submodule(owner), attribute)
    return found


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
