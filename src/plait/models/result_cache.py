"""`ResultCache`: the result of one computation, such as rotary angles, which layers share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from plait.ranks.accelerator import captures_graph

Tensors = TypeVar("Tensors", bound=tuple[Tensor, ...])


class ResultCache:
    """Holds the result of one computation, which all layers that have this cache as an attribute share.

    Neither parameter nor buffer: it is not in `state_dict`, does not move with its layers, and its copies,
    also in another process, are empty. Layers in different threads may share it.
    """

    def __init__(self) -> None:
        self._latest: tuple[Hashable, Any] | None = None

    def get(self, key: Hashable, like: Tensor, compute: Callable[[], Tensors]) -> Tensors:
        """Return `compute()`, or the cached result of the latest call if its `key` was equal.

        The result must depend on `key` and that device only; nobody may write to it. It is not kept where
        `like` is of a subclass of `Tensor`, nor within `torch.compile` or the capture of a CUDA graph: its
        memory would belong to the trace or the graph.
        """
        if type(like) is not Tensor or torch.compiler.is_compiling() or captures_graph(like.device):
            return compute()
        key, latest = (key, like.device), self._latest
        if latest is None or latest[0] != key:
            # An inference tensor could not be saved for a later backward.
            with torch.inference_mode(mode=False), torch.no_grad():
                latest = key, compute()
            self._latest = latest
        result: Tensors = latest[1]
        return result

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors in the cached result."""
        return 0 if self._latest is None else sum(tensor.nbytes for tensor in self._latest[1])

    def __reduce__(self) -> tuple[type[ResultCache], tuple[()]]:
        """Return the class without arguments, so that a copied or unpickled cache is empty."""
        return ResultCache, ()


def result_caches(module: nn.Module) -> Iterator[tuple[str, str, ResultCache]]:
    """Yield the caches that are attributes of `module` and the modules in it, each as often as it occurs.

    With the module's name and the attribute's.
    """
    for path, one in module.named_modules():
        for name, value in vars(one).items():
            if isinstance(value, ResultCache):
                yield path, name, value
