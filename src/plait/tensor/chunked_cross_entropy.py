"""The cross-entropy of a model's last linear, computed in chunks of rows, so that whole logits never exist.

Forward and backward run in one pass over the chunks. For the features `x` `[rows, hidden]` of a chunk:

    logits      y = x Wᵀ + b
    loss        and the gradient of the logits `g`, written over them: see `plait.tensor.losses`
    gradients   of x: g W      added to that of W: gᵀ x      added to that of b: Σ g over the rows

Three matrix products, as with whole logits. (Peak memory with chunks is that of one chunk's logits.)

With `Plan.loss_rows` the last layer returns the input of its output linear, the features, in place of the
logits; the loss stage computes logits from features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import PlanError
from plait.plan.rules import Rule, join
from plait.tensor.autograd.deferred_weight_gradients import add_product, bind_forward
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.losses import (
    CrossEntropy,
    LocalTargets,
    Loss,
    local_targets,
    overwrite_logits,
    softmax_terms,
    wide,
)
from plait.tensor.named_layer import NamedLayer
from plait.tensor.parallel.linear import ColumnParallelLinear
from plait.tensor.parallel.partition import Vocabulary

OutputLinear = nn.Linear | ColumnParallelLinear
"""With `weight` `[classes, features]` (this rank's classes, if partitioned), and perhaps `bias`."""


def output_linear_name(
    last: NamedLayer, rules: Mapping[str, Rule], loss_rows: int, *, ends_in_parts: bool = False
) -> str:
    """Return the name, within the last layer, of its last `nn.Linear`.

    Whether the layer returns the linear's output is known when it runs: see `require_features`. Raises
    PlanError where there is no `nn.Linear`, where `rules` partition it otherwise than by vocabulary, or where
    the layer `ends_in_parts`: each rank of `tp` runs the linear on its part of the sequence.
    """
    names = [name for name, module in last.module.named_modules() if type(module) is nn.Linear]
    if not names:
        raise PlanError(
            f"plan.loss_rows is {loss_rows}, but the last layer {last.path!r} ({type(last.module).__name__}) "
            "has no nn.Linear whose output could be computed in chunks of rows: set loss_rows to None."
        )
    full = join(last.path, names[-1])
    rule = rules.get(full)
    if "forward" in vars(last.module.get_submodule(names[-1])):
        raise PlanError(
            f"plan.loss_rows is {loss_rows}, but {full} has a forward of its own: set loss_rows to None."
        )
    if ends_in_parts:
        raise PlanError(
            f"plan.loss_rows is {loss_rows}, but the last layer {last.path!r} runs on parts of the sequence "
            f"to its end: give {full} the rule vocabulary, or remove the layer's rule sequence."
        )
    if rule is not None and (rule.kind != "vocabulary" or rule.gather_output):
        kind = f"{rule.kind}, gathered" if rule.gather_output else rule.kind
        raise PlanError(
            f"plan.loss_rows is {loss_rows}, but the rule of {full} is {kind}: give it the rule vocabulary, "
            "not gathered, or set loss_rows to None."
        )
    return str(names[-1])


def return_features(layer: nn.Module, name: str, returned: list[Tensor] | None = None) -> OutputLinear:
    """Change `layer`, a private copy, to return the input of its output linear; return that linear.

    Where the linear enters a region of tensor parallelism, the features are what is inside. `returned` gets
    what the linear returns.
    """
    linear = cast(OutputLinear, layer.get_submodule(name))
    bind_forward(linear, partial(_features, linear, returned))
    return linear


def _features(linear: OutputLinear, returned: list[Tensor] | None, input: Tensor) -> Tensor:
    enters = isinstance(linear, ColumnParallelLinear) and linear.enters
    features = linear.boundary.enter(input) if enters else input  # type: ignore[union-attr,operator]
    features = features.view_as(features)  # a tensor of its own, also where the linear is the whole layer
    if returned is not None:
        returned.append(features)
    return cast(Tensor, features)


def require_features(output: object, returned: list[Tensor], layer: NamedLayer, name: str) -> None:
    """Raise PlanError unless `output` of the last layer is the input of its output linear, `returned`."""
    if not returned or output is not returned[-1]:
        raise PlanError(
            f"plan.loss_rows is set, but the output of the last layer {layer.path!r} is not that of its last "
            f"nn.Linear, {join(layer.path, name)}: make this linear the layer's last operation, or set "
            "loss_rows to None."
        )
    if any(one is not returned[-1] for one in returned):
        raise PlanError(
            f"plan.loss_rows is set, but {join(layer.path, name)} is called {len(returned)} times in a "
            "forward, and its logits are computed in the loss: set loss_rows to None."
        )


def require_cross_entropy(loss: Loss, loss_rows: int) -> CrossEntropy:
    """Return `loss`, if it is a `CrossEntropy`, else raise PlanError."""
    if type(loss) is CrossEntropy:  # a subclass may compute something else
        return loss
    raise PlanError(
        f"plan.loss_rows is {loss_rows}, but the loss is {loss}, of which plait does not know how to compute "
        "it in chunks of rows: give plait.cross_entropy, or set loss_rows to None."
    )


@dataclass(frozen=True)
class ChunkedCrossEntropy:
    """Cross-entropy of the output of `linear`, computed from the linear's input, in chunks of rows.

    Communication of a pass: for each chunk the two all-reduces of `softmax_terms` over the vocabulary's
    group. The parameters of the linear have to be gathered, and their gradients allocated.
    """

    loss: CrossEntropy
    linear: OutputLinear
    vocabulary: Vocabulary
    """How the classes are partitioned; over a group of one rank, where they are whole."""
    rows: int
    """The most rows of a chunk."""
    queue: WeightGradientQueue
    """Where `W` adds weight gradients, they are kept, in memory of their own, until it."""

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of `features` for this rank's classes, in the dtype of `features`."""
        return functional.linear(features, self.linear.weight, self.linear.bias)

    @torch.no_grad()
    def total(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of `features` `[..., hidden]`, 0-d, equal on all ranks; no gradients.

        `targets`: a class number for each row. Raises DataError as `local_targets`.
        """
        rows, found = features.reshape(-1, features.shape[-1]), self._targets(features, targets)
        losses = []
        for chunk in self._chunks(len(rows)):
            part = wide(self.logits(rows[chunk]))
            each, _ = softmax_terms(part, found.rows(chunk), self.vocabulary, self.loss)
            losses.append(each.sum())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def gradient(self, features: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the summed loss and the gradient of `features`; add weight and bias gradients.

        Arguments and errors as for `total`. The gradients are those of the loss times `scale`, 0-d. That of
        `features` is None where they need none; where classes are partitioned it is this rank's summand.
        """
        rows, found = features.reshape(-1, features.shape[-1]), self._targets(features, targets)
        of_rows = torch.empty_like(rows) if features.requires_grad else None
        weight, bias = self._buffer(self.linear.weight), self._buffer(self.linear.bias)
        losses = []
        for chunk in self._chunks(len(rows)):
            loss, gradient = self._logits_gradient(rows[chunk], found.rows(chunk), scale)
            losses.append(loss)
            if of_rows is not None:
                torch.mm(gradient, self.linear.weight, out=of_rows[chunk])
            if weight is not None:
                add_product(weight, gradient.t(), rows[chunk])
            if bias is not None:
                bias.add_(gradient.sum(0))
            del gradient
        if self.queue.adds_late:
            for parameter, total in ((self.linear.weight, weight), (self.linear.bias, bias)):
                if parameter is not None and total is not None:
                    self.queue.add(partial(_add, self.queue, parameter, total))
        return torch.stack(losses).sum(), None if of_rows is None else of_rows.view_as(features)

    def _logits_gradient(self, rows: Tensor, found: LocalTargets, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a chunk, and the gradient of its logits, in the dtype of `rows`."""
        part = wide(self.logits(rows))
        loss = overwrite_logits(part, found, self.vocabulary, self.loss, scale)
        return loss, part.to(rows.dtype)

    def _targets(self, features: Tensor, targets: Tensor) -> LocalTargets:
        shape = torch.Size((*features.shape[:-1], self.vocabulary.classes))
        return local_targets(targets, shape, self.vocabulary, self.loss.ignore_index)

    def _buffer(self, parameter: Tensor | None) -> Tensor | None:
        """Return the tensor to which a parameter's gradient is added; None if it is missing or frozen."""
        if parameter is None or not parameter.requires_grad:
            return None
        buffer = self.queue.buffer_of(parameter)
        return buffer.new_zeros(parameter.shape) if self.queue.adds_late else buffer

    def _chunks(self, count: int) -> Iterator[slice]:
        for start in range(0, max(count, 1), self.rows):
            yield slice(start, start + self.rows)


def _add(queue: WeightGradientQueue, parameter: Tensor, gradient: Tensor) -> None:
    queue.buffer_of(parameter).add_(gradient)
