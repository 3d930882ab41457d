"""The loss stage that a plan asks for: of whole logits, of this rank's classes, or of logits in chunks."""

from __future__ import annotations

from plait.engine.blueprint import Blueprint
from plait.engine.pipeline.chunked_loss_stage import ChunkedLossStage
from plait.engine.pipeline.loss_stage import LossStage
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.chunked_cross_entropy import ChunkedCrossEntropy, require_cross_entropy
from plait.tensor.layer_values import NamedLayer
from plait.tensor.losses import Loss, loss_of_pieces
from plait.tensor.output_linear import return_features
from plait.tensor.parallel.vocabulary_partition import Vocabulary


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
        if vocabulary is None:
            return LossStage(loss)
        return LossStage(loss_of_pieces(loss, vocabulary), writes_output=True)
    terms = require_cross_entropy(loss, rows)
    if last is None:
        return LossStage(loss)
    linear = return_features(last.module, name)
    if vocabulary is None:
        vocabulary = Vocabulary.of_one_rank(linear.out_features)
    adds_late = blueprint.lowering_spec.adds_late
    return ChunkedLossStage(ChunkedCrossEntropy(terms, linear, vocabulary, rows, queue, adds_late))
