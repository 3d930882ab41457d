"""Detection of hooks that are registered on a model after `parallelize`, whose copies do not call them."""

from __future__ import annotations

import warnings
from collections.abc import Sized
from weakref import ref

from torch import Tensor, nn

from plait.ranks.gradient_hooks import first_gradient_hook
from plait.tensor.call_hooks import HOOKS


class LateHooks:
    """Warns once of hooks that were registered on a model's modules or parameters after `parallelize`."""

    def __init__(self, model: nn.Module) -> None:
        """Count the hooks on calls; parameters have none then. Keeps neither modules nor parameters alive."""
        self._hooks: list[tuple[str, str, Sized]] = [
            (name, register, getattr(module, kind))
            for name, module in model.named_modules()
            for kind, register in HOOKS.items()
        ]
        self._before = self._numbers()
        self._parameters = [(name, ref(parameter)) for name, parameter in model.named_parameters()]

    def warn(self) -> None:
        """Warn of a hook registered since `parallelize`, if there is one; only in the first such call."""
        if not self._hooks or (late := self._first()) is None:
            return
        self._hooks, self._parameters = [], []
        warnings.warn(
            f"a hook was registered or removed by {late} of the model after parallelize, whose copies the "
            "ranks run: they go on with the hooks that there were; register hooks before.",
            stacklevel=3,
        )

    def _numbers(self) -> list[int]:
        return [len(hooks) for _, _, hooks in self._hooks]

    def _first(self) -> str | None:
        now = self._numbers()
        if now != self._before:
            at = next(at for at, number in enumerate(now) if number != self._before[at])
            name, register, _ = self._hooks[at]
            return f"{name}.{register}" if name else register
        alive: dict[str, Tensor] = {
            name: one for name, kept in self._parameters if (one := kept()) is not None
        }
        found = first_gradient_hook(alive)
        return None if found is None else ".".join(found)
