"""Initial values that depend on a tensor's name, the seed and the global index only, never on the layout.

The generator is Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): counter-based,
so element `i` of a tensor is a pure function of `(seed, name, i)` and any piece can be made by itself.
"""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from plait.errors import ModelError

WORDS_PER_BLOCK = 4
"""64-bit words that one Philox counter value gives."""


@dataclass(frozen=True)
class Normal:
    """Normally distributed around zero; `Normal(0.0)` is all zeros."""

    spread: float


@dataclass(frozen=True)
class Constant:
    """Everywhere the same."""

    value: float


Initial = Normal | Constant
"""How a parameter starts."""


def normal_values(name: str, seed: int, start: int, stop: int, spread: float) -> Tensor:
    """Elements `start:stop` of the flattened tensor `name`, float64 `[stop - start]`, on the CPU."""
    if spread == 0.0:
        return torch.zeros(stop - start, dtype=torch.float64)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    generator = np.random.Philox(key=int.from_bytes(digest, "little"))
    first_block = start // WORDS_PER_BLOCK
    generator.advance(first_block)
    skipped = start - first_block * WORDS_PER_BLOCK
    words = generator.random_raw(stop - start + skipped)[skipped:]
    # 52 bits, moved to the middle of their interval: strictly inside (0, 1), so the inverse is finite.
    uniform = torch.from_numpy((words >> np.uint64(12)).astype(np.float64)).add_(0.5).mul_(2.0**-52)
    return uniform.mul_(2).sub_(1).erfinv_().mul_(spread * math.sqrt(2))


def initial_value(layer: nn.Module, path: str, name: str, seed: int) -> Tensor:
    """The whole initial value of the parameter or buffer `name` of `layer`, which stands at `path`.

    A tensor that has a value keeps it. One on the meta device is made by the rule that the layer's
    `initial_values()` gives for it, else by its module's own `reset_parameters()` under a seed that is
    made of the module's path. ModelError when there is no way to make it.
    """
    owner_name, _, attribute = name.rpartition(".")
    owner = layer.get_submodule(owner_name)
    current: Tensor = getattr(owner, attribute)
    if not current.is_meta:
        return current.detach()
    rules: dict[str, Initial] = getattr(layer, "initial_values", dict)()
    full_name = f"{path}.{name}" if path else name
    rule = rules.get(name)
    if isinstance(rule, Constant):
        return torch.full(current.shape, rule.value, dtype=current.dtype, device="cpu")
    if rule is not None:
        values = normal_values(full_name, seed, 0, current.numel(), rule.spread)
        return values.to(current.dtype).view(current.shape)
    if not hasattr(owner, "reset_parameters"):
        raise ModelError(
            f"{full_name} is on the meta device and nothing says how it starts: give layer {path!r} an "
            "initial_values() that names it, or build the model with real values."
        )
    return _reset(owner, attribute, f"{path}.{owner_name}", seed)


def _reset(owner: nn.Module, attribute: str, path: str, seed: int) -> Tensor:
    """One tensor of `owner` as its own `reset_parameters` makes it; `owner` stays on the meta device."""
    twin = copy.deepcopy(owner).to_empty(device="cpu")
    digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=7).digest()
    with torch.random.fork_rng(devices=[]):
        # The CPU's generator alone: torch.manual_seed would also seed every accelerator's, for good.
        torch.default_generator.manual_seed(int.from_bytes(digest, "little"))
        twin.reset_parameters()  # type: ignore[operator]
    result: Tensor = getattr(twin, attribute)
    return result.detach()
