"""Inspection of module instances for hooks on their calls and for a `forward` set on the instance."""

from __future__ import annotations

import io
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

HOOKS = {
    "_forward_pre_hooks": "register_forward_pre_hook",
    "_forward_hooks": "register_forward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
    "_backward_hooks": "register_full_backward_hook",
}
"""Attributes of `nn.Module` that hold hooks, private to torch, and what registers them."""
_OLDER_UTILITIES = ("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm", "torch.nn.utils.prune")
"""Modules of torch whose objects are hooks that compute a weight."""
_UNCOPIED = (
    *(type(threading.Lock()), type(threading.RLock()), threading.Event, threading.Condition),
    *(threading.Semaphore, threading.Barrier, threading.local, queue.Queue, queue.SimpleQueue),
    *(io.IOBase, socket.socket, ModuleType),
)
"""What `copy.deepcopy` refuses, and holds no tensors of a model."""


def call_hooks(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the hooks on calls of `module`, each after the name of the method that registered it."""
    for kind, register in HOOKS.items():
        for hook in getattr(module, kind).values():
            yield register, hook


def has_own_forward(module: nn.Module) -> bool:
    """Return whether `forward` was set on the instance."""
    return "forward" in vars(module)


def is_altered(module: nn.Module) -> bool:
    """Return whether `module` has hooks on its calls, or a `forward` set on the instance."""
    return has_own_forward(module) or next(call_hooks(module), None) is not None


def has_load_hooks(module: nn.Module) -> bool:
    """Return whether modules in `module` have hooks, other than torch's own, on the loading of a state dict.

    Reads a private attribute of torch, and the hooks in its private wrappers.
    """
    hooks = (hook for one in module.modules() for hook in one._load_state_dict_pre_hooks.values())
    own = (getattr(hook, "hook", hook) for hook in hooks)
    homes = (getattr(hook, "__module__", type(hook).__module__) for hook in own)
    return any(not str(home).startswith("torch.") for home in homes)


def computed_by_hooks(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors, such as a `weight`, that hooks in `module` compute before each forward.

    Those of `nn.utils.weight_norm` and `nn.utils.prune`, which compute `weight` from other parameters.
    Private to torch: that such a hook has the name of what it computes as `name` or `_tensor_name`.
    """
    for one in module.modules():
        for _, hook in call_hooks(one):
            value = vars(one).get(getattr(hook, "name", getattr(hook, "_tensor_name", "")))
            if isinstance(value, Tensor) and not value.is_leaf:
                yield value


def weight_utility(module: nn.Module) -> str | None:
    """Return the torch module (as `torch.nn.utils.weight_norm`) that computes a weight of `module`, or None.

    For a parametrization, such as `parametrizations.weight_norm`, that is `torch.nn.utils.parametrize`; for
    the older utilities, which have a hook, the module of that.
    """
    homes = (type(hook).__module__ for _, hook in call_hooks(module))
    older = next((home for home in homes if home in _OLDER_UTILITIES), None)
    return older or ("torch.nn.utils.parametrize" if is_parametrized(module) else None)


def hook_objects(module: nn.Module) -> Iterator[object]:
    """Yield the hooks on calls of `module`, or the owners of hook methods, that hold no modules or tensors.

    A copy of the module has to call the same object, such as one that records what the module gives. Hooks
    that hold modules or tensors are left out, since they have to be copied with these.
    """
    for _, hook in call_hooks(module):
        owner = getattr(hook, "__self__", hook)
        held = getattr(owner, "__dict__", {}).values()
        if not isinstance(owner, nn.Module) and not any(isinstance(one, nn.Module | Tensor) for one in held):
            yield owner


def shared_objects(module: nn.Module) -> Iterator[object]:
    """Yield attribute values of `module` that cannot be copied: locks, queues, files, Python modules."""
    for value in vars(module).values():
        if isinstance(value, _UNCOPIED):
            yield value
