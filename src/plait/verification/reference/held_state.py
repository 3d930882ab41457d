"""The buffers and numbers of a run's modules at some time, to be set back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from plait.models.layers.layer_sequence import own_numbers
from plait.tensor.layer_values import NamedLayer


@dataclass(frozen=True)
class HeldState:
    """The buffers and the attributes that are numbers, each with the module that holds it, and its name."""

    buffers: tuple[tuple[nn.Module, str, Tensor], ...]
    numbers: tuple[tuple[nn.Module, dict[str, int | float]], ...]

    @staticmethod
    def of(layers: Iterable[NamedLayer]) -> HeldState:
        """Return the current buffers and number attributes of `layers`; the buffers are not copied."""
        modules = [module for layer in layers for module in layer.module.modules()]
        return HeldState(
            tuple(
                (one, name, buffer) for one in modules for name, buffer in one.named_buffers(recurse=False)
            ),
            tuple((one, own_numbers(one)) for one in modules),
        )

    def set_back(self) -> None:
        """Set the modules' buffers and numbers back to the recorded ones."""
        self._set({id(buffer): buffer for _, _, buffer in self.buffers})

    def set_copies(self) -> None:
        """Set the modules' numbers, and buffers to copies of the recorded ones; shared ones stay shared."""
        self._set({id(buffer): buffer.clone() for _, _, buffer in self.buffers})

    def _set(self, values: dict[int, Tensor]) -> None:
        for module, name, buffer in self.buffers:
            setattr(module, name, values[id(buffer)])
        for module, numbers in self.numbers:
            for name in own_numbers(module).keys() - numbers.keys():
                delattr(module, name)
            for name, number in numbers.items():
                setattr(module, name, number)
