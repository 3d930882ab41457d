"""The loss stage, after the model's last layer: the loss, of whole logits or in chunks, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.engine.blueprint import Blueprint
from plait.engine.pipeline.stage import Gradients
from plait.errors import ModelError
from plait.models.layers.model_validation import refusing_changed_buffers
from plait.models.layers.stateful_layer_check import other_leaf
from plait.tensor.autograd.private_torch_functions import run_backward
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.chunked_cross_entropy import ChunkedCrossEntropy, require_cross_entropy, return_features
from plait.tensor.cross_entropy_in_place import CrossEntropyInPlace
from plait.tensor.losses import CrossEntropy, Loss, LossOverVocabulary
from plait.tensor.named_layer import NamedLayer
from plait.tensor.nested_values import Value, tensors_of
from plait.tensor.parallel.partition import Vocabulary


class LossLike(Protocol):
    """Interface of losses: `total` sums over a micro-batch; the engine scales gradients to the mean loss."""

    def total(self, output: Any, targets: Any) -> Tensor:
        """Return the summed loss of one micro-batch, 0-d."""


class LossStage:
    """Computes the loss of each micro-batch and, for training, its gradient, scaled for the mean loss."""

    def __init__(self, loss: LossLike, *, writes_output: bool = False) -> None:
        """`writes_output`: whether the loss may write to the memory of the output."""
        self.loss = loss
        self.writes_output = writes_output
        self._runs = 0
        """In training, up to two. The second may write to no buffer; the first may fill what is kept."""
        self.summed: dict[int, Tensor] = {}
        """The summed loss of each micro-batch of the latest step, by its number."""
        self.targets: list[Value] = []
        """The targets of each micro-batch."""
        self.scale: Tensor | None = None
        """The factor of the loss's gradient, 0-d."""
        self._outputs: dict[int, Value] = {}
        self._scale_in_place: Tensor | None = None
        """The factor of each step, where `keep_scale_in_place` puts it."""
        self._open: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def begin(self, targets: Sequence[Value], scale: Tensor | None) -> None:
        """Begin a step with each micro-batch's targets; the backward multiplies the summed loss by `scale`.

        `scale`, 0-d: the loss scale, divided by what makes the sum a mean; None without a backward.
        """
        self.summed, self._outputs = {}, {}
        self.targets, self.scale = list(targets), scale

    def keep_scale_in_place(self) -> None:
        """Copy this step's `scale` to fixed memory, where recorded CUDA graphs read it."""
        if self.scale is not None:
            if self._scale_in_place is None:
                self._scale_in_place = torch.empty_like(self.scale)
            self.scale = self._scale_in_place.copy_(self.scale)

    def compute(self, microbatch: int, output: Value) -> None:
        """Compute and store the summed loss of one micro-batch, with its autograd graph in training."""
        total = self._total_of(output, self.targets[microbatch])
        if not isinstance(total, Tensor) or total.dim():
            shape = list(total.shape) if isinstance(total, Tensor) else type(total).__name__
            raise ModelError(f"loss.total gave {shape}: give the summed loss as a 0-d tensor.")
        self.summed[microbatch] = total.detach()
        if torch.is_grad_enabled():
            leaves = list(tensors_of(output))
            _refuse_other_leaves(total, leaves)
            self._open[microbatch] = total, leaves

    def _total_of(self, output: Value, targets: Value) -> Any:
        if self._runs == 2 or not torch.is_grad_enabled():
            return self.loss.total(output, targets)
        self._runs += 1
        with refusing_changed_buffers(self.loss) if self._runs == 2 else nullcontext():
            return self.loss.total(output, targets)

    def total(self, microbatch: int) -> Tensor:
        """Return the summed loss of a micro-batch of the latest step."""
        return self.summed[microbatch]

    @property
    def totals(self) -> list[Tensor]:
        """The summed loss of each micro-batch, in the order of the batch."""
        return [self.summed[microbatch] for microbatch in sorted(self.summed)]

    def keep(self, microbatch: int, output: Value) -> None:
        """Keep the output of one micro-batch, in a step without targets."""
        self._outputs[microbatch] = output

    def take_outputs(self) -> list[Value]:
        """Remove and return the outputs that were kept, in the order of the batch."""
        outputs, self._outputs = self._outputs, {}
        return [outputs[microbatch] for microbatch in sorted(outputs)]

    def seed(self, microbatch: int) -> Gradients:
        """Run a micro-batch's loss backward; return the gradients of the model's output, loss-scaled.

        They are those of the mean loss over the global batch, times the loss scale.
        """
        total, leaves = self._open.pop(microbatch)
        if total.requires_grad:
            assert self.scale is not None, "a training step has a scale"
            run_backward([total], [self.scale.to(total.dtype)])
        return [leaf.grad for leaf in leaves]

    def clear(self) -> None:
        """Discard all unfinished micro-batches."""
        self._open.clear()
        self._outputs.clear()


def _refuse_other_leaves(total: Tensor, outputs: Sequence[Tensor]) -> None:
    """Raise ModelError where a loss depends on a leaf tensor besides `outputs`, such as a parameter.

    In each run: a gradient buffer holds nothing of this step yet when the loss's backward would add to it.
    """
    leaf = other_leaf([total], outputs)
    if leaf is not None:
        raise ModelError(
            f"the loss computes with a tensor {list(leaf.shape)} that requires a gradient but is not the "
            "model's output: detach it, or compute with it in a layer that returns what the loss needs."
        )


class OverwritingLossStage(LossStage):
    """Computes the cross-entropy of each micro-batch and, for training, writes its gradient over the logits.

    So no autograd graph is recorded, and loss and gradient are computed at once, in the forward.
    """

    def __init__(self, loss: CrossEntropyInPlace) -> None:
        super().__init__(loss, writes_output=True)
        self._gradients: dict[int, Tensor] = {}

    def compute(self, microbatch: int, output: Value) -> None:
        """Compute the summed loss of one micro-batch; in training write the gradient over `output`."""
        loss, learns = self.loss, isinstance(output, Tensor) and output.requires_grad
        if not (isinstance(loss, CrossEntropyInPlace) and learns and torch.is_grad_enabled()):
            super().compute(microbatch, output)
            return
        assert self.scale is not None, "a training step has a scale"
        found = loss.gradient(output, self.targets[microbatch], self.scale)
        self.summed[microbatch], self._gradients[microbatch] = found

    def seed(self, microbatch: int) -> Gradients:
        """Return the loss-scaled gradient of the global mean loss by the logits of a micro-batch."""
        if microbatch in self._gradients:
            return [self._gradients.pop(microbatch)]
        return super().seed(microbatch)

    def clear(self) -> None:
        """Discard all unfinished micro-batches."""
        super().clear()
        self._gradients.clear()


class ChunkedLossStage(LossStage):
    """Computes loss and gradients of each micro-batch in chunks of rows, when its backward starts.

    So in a training step the loss of a micro-batch is known after `seed`. The last layer's parameters have to
    be gathered in `compute`, `seed` and `keep`, and its gradients allocated in `seed`.
    """

    def __init__(self, loss: ChunkedCrossEntropy) -> None:
        super().__init__(loss)
        self._chunks = loss
        self._features: dict[int, Value] = {}

    def compute(self, microbatch: int, output: Value) -> None:
        """Keep the features of one micro-batch for `seed`; without gradients compute its summed loss."""
        if torch.is_grad_enabled():
            self._features[microbatch] = output
        else:
            super().compute(microbatch, output)

    def keep(self, microbatch: int, output: Value) -> None:
        """Keep the logits of one micro-batch, in a step without targets."""
        super().keep(microbatch, self._chunks.logits(output))

    def seed(self, microbatch: int) -> Gradients:
        """Compute the loss and its gradients, by chunks of rows; return the gradient of the features."""
        features, targets = self._features.pop(microbatch), self.targets[microbatch]
        assert self.scale is not None, "a training step has a scale"
        self.summed[microbatch], gradient = self._chunks.gradient(features, targets, self.scale)
        return [gradient]

    def clear(self) -> None:
        """Discard all unfinished micro-batches."""
        super().clear()
        self._features.clear()


def build_loss_stage(
    blueprint: Blueprint,
    loss: Loss,
    vocabulary: Vocabulary | None,
    last: NamedLayer | None,
    queue: WeightGradientQueue,
) -> LossStage:
    """Return the loss stage of a rank; with `plan.loss_rows`, make its `last` layer return features.

    `last`: this rank's copy of the model's last layer, None on ranks of other stages, which compute no loss.
    Raises PlanError for `plan.loss_rows` with another loss than a `CrossEntropy`.
    """
    rows, name = blueprint.plan.loss_rows, blueprint.output_linear
    if rows is None or name is None:
        if type(loss) is CrossEntropy:  # a subclass may compute something else
            return OverwritingLossStage(CrossEntropyInPlace(loss, vocabulary))
        if vocabulary is None:
            return LossStage(loss)
        return LossStage(LossOverVocabulary(loss, vocabulary), writes_output=True)
    terms = require_cross_entropy(loss, rows)
    if last is None:
        return LossStage(loss)
    linear = return_features(last.module, name)
    if vocabulary is None:
        vocabulary = Vocabulary.of_one_rank(linear.out_features)
    return ChunkedLossStage(ChunkedCrossEntropy(terms, linear, vocabulary, rows, queue))
