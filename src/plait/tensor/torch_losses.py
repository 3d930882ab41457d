"""Conversion of losses to `total` and `weight`: PyTorch's losses, and functions that return a mean.

    given                                            total(output, targets)     weight(targets)
    an object with total and weight                  its own                    its own
    nn.CrossEntropyLoss(), functional.cross_entropy  the same, reduction 'sum'  targets, or class weights
    nn.MSELoss(), functional.mse_loss …              the same, reduction 'sum'  elements of the targets
    mean_loss(function, over="rows")                 function · weight          rows, elements, or `over`

With `reduction="sum"` the loss of a step is the sum over the global batch: it is divided by 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import ModelError, PlanError
from plait.ranks.accelerator import is_accelerator, sent
from plait.tensor.autograd.paired_collectives import gather
from plait.tensor.losses import CrossEntropy, Loss, naming_unknown_targets, wide
from plait.tensor.parallel.partition import Vocabulary

GivenLoss: TypeAlias = Loss | Callable[..., Tensor]
"""A loss as `parallelize` takes it: see `as_loss`."""
Over = Literal["rows", "targets"]

# Each function with the module that calls it, and the options of both: attributes, and keyword arguments.
_CLASSES: Mapping[Callable[..., Tensor], tuple[type[nn.Module], tuple[str, ...]]] = {
    functional.cross_entropy: (nn.CrossEntropyLoss, ("weight", "ignore_index", "label_smoothing")),
    functional.nll_loss: (nn.NLLLoss, ("weight", "ignore_index")),
}
"""Losses of a class, or of class probabilities, for each row of the output."""
_ELEMENTS: Mapping[Callable[..., Tensor], tuple[type[nn.Module], tuple[str, ...]]] = {
    functional.mse_loss: (nn.MSELoss, ()),
    functional.l1_loss: (nn.L1Loss, ()),
    functional.smooth_l1_loss: (nn.SmoothL1Loss, ("beta",)),
    functional.huber_loss: (nn.HuberLoss, ("delta",)),
    functional.soft_margin_loss: (nn.SoftMarginLoss, ()),
    functional.binary_cross_entropy: (nn.BCELoss, ("weight",)),
    functional.binary_cross_entropy_with_logits: (nn.BCEWithLogitsLoss, ("weight", "pos_weight")),
    functional.kl_div: (nn.KLDivLoss, ("log_target",)),
    functional.poisson_nll_loss: (nn.PoissonNLLLoss, ("log_input", "full", "eps")),
}
"""Losses of each element of the output and the same element of the targets."""
_KNOWN = {**_CLASSES, **_ELEMENTS}
_FUNCTION_OF = {module: function for function, (module, _) in _KNOWN.items()}


def as_loss(given: object) -> Loss:
    """Return a loss of the user (of torch, a function, a `Loss`) as a `Loss` with `total` and `weight`.

    `given` is an object that has both methods, such as the result of `mean_loss`, or a loss of `torch.nn` or
    `torch.nn.functional` whose reduction is "mean" or "sum", with its options (as attributes of the module,
    or as keywords of a `functools.partial`). Raises PlanError for anything else, with the way to wrap it.
    `print` of a converted loss shows what is summed, and its divisor.
    """
    if isinstance(given, type):
        raise PlanError(f"the loss is the class {given.__name__}: give an object of it, {given.__name__}().")
    if isinstance(given, Loss) and callable(given.total) and callable(given.weight):
        return given
    if isinstance(given, nn.Module) and type(given) in _FUNCTION_OF:  # no subclasses
        function = _FUNCTION_OF[type(given)]
        _, names = _KNOWN[function]
        options = {name: getattr(given, name) for name in names}
        return _torch_loss(function, options, str(getattr(given, "reduction", "mean")), given)
    if isinstance(given, partial) and given.func in _KNOWN and not given.args:
        options = dict(given.keywords)
        return _torch_loss(given.func, options, str(options.pop("reduction", "mean")), given)
    known = next((function for function in _KNOWN if function is given), None)
    if known is not None:
        return _torch_loss(known, {}, "mean", given)
    if not callable(given):
        raise PlanError(
            f"the loss is {given!r}: give an object with total(output, targets), a sum, and weight(targets), "
            "its divisor, such as plait.cross_entropy."
        )
    raise PlanError(
        f"the loss is {_name_of(given)}, and what its mean is over is not known: give "
        "plait.tensor.mean_loss(function, over='rows') where that is dim 0 of the targets, over='targets' "
        "where it is all of their elements, over=count where count(targets) returns their number; or an "
        "object with total(output, targets), a sum, and weight(targets), its divisor."
    )


def _name_of(given: object) -> str:
    name = getattr(given, "__qualname__", None)
    return f"the function {name}" if name else repr(given)


def _torch_loss(
    function: Callable[..., Tensor], options: dict[str, Any], reduction: str, given: object
) -> Loss:
    """Return a `Loss` that calls a function of PyTorch. Raises PlanError for unsupported options."""
    _, names = _KNOWN[function]
    unknown = sorted(set(options) - set(names))
    if unknown:
        among = ", ".join([*names, "reduction"])
        raise PlanError(
            f"the loss {given!r} has {unknown[0]} = {options[unknown[0]]!r}, which is not supported: "
            f"choose among {among}, or wrap it with plait.tensor.mean_loss."
        )
    reductions = ("mean", "sum", *(("batchmean",) if function is functional.kl_div else ()))
    if reduction not in reductions:
        raise PlanError(
            f"the loss {given!r} has reduction {reduction!r}, but has to return one number: choose "
            f"{' or '.join(map(repr, reductions))}."
        )
    return (ClassLoss if function in _CLASSES else ElementLoss)(function, options, reduction)


@dataclass(frozen=True)
class TorchLoss:
    """A loss of `torch.nn.functional`, as a sum and its divisor."""

    function: Callable[..., Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    reduction: str = "mean"

    @property
    def sums(self) -> bool:
        """Whether the loss of a step is a sum over the global batch and not a mean."""
        return self.reduction == "sum"

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the loss summed over the elements, 0-d, in at least float32."""
        wide = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
        tensors = {
            name: value.to(wide) if isinstance(value, Tensor) else value
            for name, value in self.options.items()
        }
        wanted = targets.to(wide.dtype) if targets.is_floating_point() else targets
        return self.function(wide, wanted, **tensors, reduction="sum")

    def weight(self, targets: Tensor) -> Tensor:
        """Return the number of elements of the targets (for `batchmean`: of rows), 0-d."""
        counts = len(targets) if self.reduction == "batchmean" else targets.numel()
        return torch.full((), counts, device=targets.device)

    @property
    def _counted(self) -> str:
        return "rows of the targets" if self.reduction == "batchmean" else "elements of the targets"

    def __str__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options.items() if value is not None)
        by = "1, for it is a sum" if self.sums else f"the number of {self._counted}"
        return (
            f"total is {self.function.__name__}(output, targets{options}, reduction='sum'), divided by {by}"
        )


@dataclass(frozen=True)
class ElementLoss(TorchLoss):
    """A loss of each element of the output and the corresponding element of the targets."""

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss. ModelError if targets differ in shape or options have a value per row."""
        name = self.function.__name__
        if output.shape != targets.shape:
            raise ModelError(
                f"{name} was given an output {list(output.shape)} and targets {list(targets.shape)}, whose "
                "mean would be over their broadcast shape: give targets of the output's shape."
            )
        for option, value in self.options.items():
            if isinstance(value, Tensor) and value.dim() == output.dim() and len(value) > 1:
                raise ModelError(
                    f"{name} has a {option} {list(value.shape)} with a value for each row of a batch, but "
                    "rows are split into micro-batches: give them with the targets, to a loss of your own."
                )
        return super().total(output, targets)


@dataclass(frozen=True)
class ClassLoss(TorchLoss):
    """A loss of class logits or log-probabilities, with classes as dim 1 of the output, as in PyTorch."""

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the loss summed over all targets, 0-d.

        Raises ModelError where the classes are the last of more than two dims, DataError (on a CPU) for a
        target that is no class.
        """
        shape = (*output.shape[:1], *output.shape[2:])
        if not targets.is_floating_point() and output.dim() > 2 and tuple(targets.shape) != shape:
            raise ModelError(
                f"{self.function.__name__} was given an output {list(output.shape)} and targets "
                f"{list(targets.shape)}: PyTorch takes classes as dim 1, so give plait.cross_entropy, or a "
                "CrossEntropy of plait.tensor, which take them as the last dim."
            )
        classes, ignored = output.shape[:2][-1], self.options.get("ignore_index", -100)
        targets = targets if targets.is_floating_point() else targets.long()
        with naming_unknown_targets(targets.reshape(-1), classes, ignored):
            return super().total(output, targets)

    def weight(self, targets: Tensor) -> Tensor:
        """Return the number of targets not ignored, or the sum of their class weights if given; 0-d.

        For targets that are class probabilities: the number of distributions.
        """
        if targets.is_floating_point():
            classes = targets.shape[1] if targets.dim() > 1 else targets.shape[0]
            return torch.full((), targets.numel() // max(classes, 1), device=targets.device)
        targets = targets.long()  # as uint8 the number to ignore would be taken modulo 256
        counted: Tensor = targets != self.options.get("ignore_index", -100)
        weights = self.options.get("weight")
        if weights is None:
            return counted.sum()
        known: Tensor = sent(weights, targets.device)[targets.masked_fill(~counted, 0)]
        return known.double().where(counted, 0).sum()

    def total_of_pieces(self, logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
        """Return the summed loss from this rank's classes of the logits, which it may overwrite.

        `logits` are `[rows, len(own)]`. Uses `CrossEntropy`, with its communication, for class numbers
        without class weights; else one all-gather of the logits.
        """
        terms = {name: value for name, value in self.options.items() if value is not None}
        plain = self.function is functional.cross_entropy and "weight" not in terms
        if not plain or targets.is_floating_point() or logits.dim() > 2:
            return self.total(gather(logits, vocabulary.group, -1, vocabulary.classes), targets)
        return CrossEntropy(**terms).total_of_pieces(logits, targets, vocabulary)

    @property
    def _counted(self) -> str:
        ignored = f"targets but those of {self.options.get('ignore_index', -100)}"
        return ignored if self.options.get("weight") is None else f"{ignored}, each by its class's weight"


@dataclass(frozen=True)
class MeanLoss:
    """A `Loss` made of a function that returns a mean, which is multiplied by the number averaged `over`."""

    function: Callable[[Any, Any], Tensor]
    over: Over | Callable[[Any], Tensor | float] = "rows"

    def total(self, output: Any, targets: Any) -> Tensor:
        """Return the summed loss: the mean times `weight(targets)`, in at least float32.

        On the CPU zero where that weight is zero.
        """
        mean, weight = self.function(output, targets), self.weight(targets)
        if not isinstance(mean, Tensor) or mean.dim():
            shape = list(mean.shape) if isinstance(mean, Tensor) else type(mean).__name__
            raise ModelError(
                f"{_name_of(self.function)} returned {shape}: a function in mean_loss returns its mean, a "
                "0-d tensor."
            )
        mean = wide(mean)  # in 16 bits the sum of a few hundred targets would be rounded
        if not is_accelerator(weight) and not weight:
            return torch.zeros_like(mean).detach()
        return mean * weight.to(mean)

    def weight(self, targets: Any) -> Tensor:
        """Return the number of averaged rows or elements, or `over(targets)`; 0-d."""
        if callable(self.over):
            return torch.as_tensor(self.over(targets))
        if not isinstance(targets, Tensor) or not targets.dim():
            raise ModelError(
                f"mean_loss(over={self.over!r}) was given a {type(targets).__name__} without rows as "
                "targets: give over=count, where count(targets) returns their number."
            )
        counts = len(targets) if self.over == "rows" else targets.numel()
        return torch.full((), counts, device=targets.device)


def mean_loss(
    function: Callable[[Any, Any], Tensor], over: Over | Callable[[Any], Tensor | float] = "rows"
) -> Loss:
    """Return a `Loss` made of `function(output, targets)`, which returns a mean as a 0-d tensor.

    `over` is what that mean is over: "rows", dim 0 of the targets; "targets", all of their elements; or a
    function that returns the number of the targets, additive over micro-batches, such as
    `lambda targets: (targets != -100).sum()`. The loss of a step is then one mean over the global batch.
    """
    if not callable(function) or not (callable(over) or over in ("rows", "targets")):
        raise PlanError(
            f"mean_loss was given {function!r} and over = {over!r}: give a function of output and targets, "
            "and 'rows', 'targets' or a function of the targets."
        )
    return MeanLoss(function, over)


def divisor(loss: Loss, weight: Tensor) -> Tensor:
    """Return the number by which a summed loss is divided: `weight`, or 1 if its reduction is 'sum'."""
    return torch.ones_like(weight) if getattr(loss, "sums", False) else weight
