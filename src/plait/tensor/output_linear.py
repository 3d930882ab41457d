"""The output linear: the linear at the end of a model, whose logits the loss computes in chunks of rows.

With `Plan.loss_rows` the last layer returns the input of its output linear, the features, in place of the
logits; the loss stage computes logits from features.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import cast

from torch import Tensor, nn

from plait.errors import PlanError
from plait.plan.rules import Rule, join
from plait.tensor.layer_values import NamedLayer
from plait.tensor.parallel.linear import ColumnParallelLinear

OutputLinear = nn.Linear | ColumnParallelLinear
"""With `weight` `[classes, features]` (this rank's classes, if partitioned), and perhaps `bias`."""


def output_linear_name(
    last: NamedLayer, rules: Mapping[str, Rule], loss_rows: int, *, ends_in_pieces: bool = False
) -> str:
    """Return the name, within the last layer, of its last `nn.Linear`.

    Whether the layer returns the linear's output is known when it runs: see `require_features`. Raises
    PlanError where there is no `nn.Linear`, where `rules` partition it otherwise than by vocabulary, or where
    the layer `ends_in_pieces`: each rank of `tp` runs the linear on its piece of the sequence.
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
    if ends_in_pieces:
        raise PlanError(
            f"plan.loss_rows is {loss_rows}, but the last layer {last.path!r} runs on pieces of the sequence "
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
    """Make `layer`, a private copy, return the input of its output linear `name`; return that linear.

    Where the linear enters a region of tensor parallelism, the features are what is inside. `returned` gets
    what the linear returns.
    """
    linear = cast(OutputLinear, layer.get_submodule(name))
    # setattr, because mypy refuses to assign to a method; nn.Module calls an instance's own forward.
    setattr(linear, "forward", partial(_features, linear, returned))  # noqa: B010
    return linear


def _features(linear: OutputLinear, returned: list[Tensor] | None, input: Tensor) -> Tensor:
    enters = isinstance(linear, ColumnParallelLinear) and linear.enters
    features = linear.boundary.enter(input) if enters else input  # type: ignore[union-attr,operator]
    features = features.view_as(features)  # a tensor of its own, also where the linear is the whole layer
    if returned is not None:
        returned.append(features)
    return cast(Tensor, features)


def require_features(output: object, returned: list[Tensor], layer: NamedLayer, name: str) -> None:
    """Raise PlanError unless `output` of the last layer is what its output linear has `returned`."""
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
