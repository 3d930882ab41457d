"""Validation of a model before it runs: rejects layout-dependent results and compiled modules."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from plait.errors import ModelError, PlanError
from plait.models.layers.layer_sequence import LayerSequence
from plait.models.layers.lost_settings import modules_of_loss
from plait.plan.rules import join
from plait.tensor.dropout import is_plain_dropout

DROPPING = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
TRACKING_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_WHY = "plait keeps weight gradients for later, which compiled code hides, so give it as it was before"


def refuse_layout_dependence(sequence: LayerSequence) -> None:
    """Raise ModelError for the first module whose result would differ between one and several ranks."""
    for layer in sequence.layers:
        for name, module in layer.module.named_modules():
            reason = _reason(module)
            if reason is not None:
                place = join(layer.path, name)
                raise ModelError(f"{place} ({type(module).__name__}) {reason}.")


def _reason(module: nn.Module) -> str | None:
    if module.training and _drop_probability(module):
        return (
            f"drops with p = {_drop_probability(module)}: its random numbers would depend on the layout, "
            "so set p to 0, and use plait.Dropout, or call eval() on it"
        )
    if module.training and isinstance(module, BATCH_NORMS):
        return (
            "normalises over the rows it is shown: its statistics would depend on how the batch is cut, "
            "so use a norm over features or call eval() on it"
        )
    if module.training and isinstance(module, TRACKING_NORMS) and module.track_running_stats:
        return (
            "keeps running statistics: they would depend on how the batch is cut, so set "
            "track_running_stats to False or call eval() on it"
        )
    if module.training and isinstance(module, nn.RReLU):
        return "draws random slopes, which would depend on the layout, so use LeakyReLU or call eval() on it"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        return (
            f"changes its weight in the forward (max_norm = {module.max_norm}): data-parallel ranks would "
            "drift apart, so set max_norm to None"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
        return (
            "scales gradients by how often a token stands in a micro-batch: they would depend on how the "
            "batch is cut, so set scale_grad_by_freq to False"
        )
    return None


def _drop_probability(module: nn.Module) -> float:
    if isinstance(module, DROPPING) and not is_plain_dropout(module):
        return float(module.p)
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return float(module.dropout)
    return 0.0


def refuse_compiled_modules(model: nn.Module, path: str = "") -> None:
    """Raise ModelError for the first module of `model`, containers included, that runs compiled code.

    `path` is that of the model, for the message. A compiled function that a forward finds elsewhere, such as
    among the globals of its file, is not found.
    """
    for name, module in model.named_modules():
        place = f"{join(path, name) or 'the model'} ({type(module).__name__})"
        if _is_compiled_module(module):
            raise ModelError(f"{place} was given to torch.compile: {_WHY}.")
        for method in compiled_functions(module):
            raise ModelError(f"{method} of {place} was given to torch.compile: {_WHY}.")


def refuse_compiled_loss(loss: object) -> None:
    """Raise PlanError for a loss that runs compiled code, ModelError if one of its modules does."""
    for method in compiled_functions(loss):
        raise PlanError(f"{method} of the loss {type(loss).__name__} was given to torch.compile: {_WHY}.")
    for name, module in modules_of_loss(loss):
        refuse_compiled_modules(module, name or "the loss")


def compiled_functions(owner: object) -> Iterator[str]:
    """Yield the names of the compiled methods and attributes of an object."""
    found: dict[str, object] = {}
    for base in reversed(type(owner).__mro__):  # overridden methods do not run
        if base not in (nn.Module, object):
            found |= vars(base)
    for name, value in (found | getattr(owner, "__dict__", {})).items():
        if _is_compiled_function(value):
            yield name


def _is_compiled_module(module: nn.Module) -> bool:
    """Return whether a module is a result of `torch.compile`, or was compiled in place by `module.compile()`.

    Private to torch: the class `OptimizedModule`, and the attribute `_compiled_call_impl`.
    """
    wrapped = type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod")
    return wrapped or getattr(module, "_compiled_call_impl", None) is not None


def _is_compiled_function(value: object) -> bool:
    """Return whether a function is a result of `torch.compile`.

    Private to torch: such a function has `_torchdynamo_orig_callable`; one that is never compiled
    (`torch.compiler.disable`) has it too, and `_torchdynamo_disable`.
    """
    held = getattr(value, "__dict__", {})
    return "_torchdynamo_orig_callable" in held and not held.get("_torchdynamo_disable", False)
