"""Refuse what was given to `torch.compile`: compiled code hides the weight gradients that plait defers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from plait.errors import ModelError, PlanError
from plait.rules import join

_WHY = "plait keeps weight gradients for later, which compiled code hides, so give it as it was before"


def refuse_compiled_modules(model: nn.Module, path: str = "") -> None:
    """Raise ModelError for the first module of `model`, containers too, that runs compiled code.

    `path`: where the model stands, for the sentence. A compiled function that a forward finds elsewhere, such
    as among the globals of its file, is not seen.
    """
    for name, module in model.named_modules():
        place = f"{join(path, name) or 'the model'} ({type(module).__name__})"
        if _is_compiled_module(module):
            raise ModelError(f"{place} was given to torch.compile: {_WHY}.")
        for method in compiled_functions(module):
            raise ModelError(f"{method} of {place} was given to torch.compile: {_WHY}.")


def refuse_compiled_loss(loss: object) -> None:
    """Raise PlanError for a loss that runs compiled code, and ModelError for a module of it that does."""
    for method in compiled_functions(loss):
        raise PlanError(f"{method} of the loss {type(loss).__name__} was given to torch.compile: {_WHY}.")
    for name, value in getattr(loss, "__dict__", {}).items():
        if isinstance(value, nn.Module):
            refuse_compiled_modules(value, name)
    if isinstance(loss, nn.Module):
        refuse_compiled_modules(loss, "the loss")


def compiled_functions(owner: object) -> Iterator[str]:
    """Yield the names of the methods and attributes of an object that `torch.compile` has made."""
    found: dict[str, object] = {}
    for base in reversed(type(owner).__mro__):  # what is overridden does not run
        found |= vars(base)
    for name, value in (found | getattr(owner, "__dict__", {})).items():
        if _is_compiled_function(value):
            yield name


def _is_compiled_module(module: nn.Module) -> bool:
    """Whether a module is what `torch.compile` gives, or was compiled in place by `module.compile()`.

    Private to torch: the class `OptimizedModule`, and the attribute `_compiled_call_impl`.
    """
    wrapped = type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod")
    return wrapped or getattr(module, "_compiled_call_impl", None) is not None


def _is_compiled_function(value: object) -> bool:
    """Whether a function is what `torch.compile` gives.

    Private to torch: such a function has `_torchdynamo_orig_callable`; one that is never compiled
    (`torch.compiler.disable`) has it too, and `_torchdynamo_disable`.
    """
    held = getattr(value, "__dict__", {})
    return "_torchdynamo_orig_callable" in held and not held.get("_torchdynamo_disable", False)
