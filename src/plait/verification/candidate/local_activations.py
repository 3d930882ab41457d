"""This rank's parts of recorded activations: its positions of a sequence, its classes of the logits.

The reference run records whole tensors. Under context parallelism a rank holds some positions (dim 1) of each
tensor between layers, of the inputs and of the targets; `tp` partitions this part again, along the sequence
or along the classes. The parts are computed from the plan, not taken from the engine, which may be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.engine.runner import Runtime
from plait.plan.layout.layout import divide
from plait.plan.layout.sequence_layout import sequence_layout
from plait.tensor.losses import Loss, SequenceLoss
from plait.tensor.nested_values import Value, map_tensors
from plait.verification.findings import ComparedBox
from plait.verification.reference.recording import Tolerance
from plait.verification.step_location import RecordKey


class ActivationParts:
    """Cuts out of recorded activations, inputs and targets the parts that one rank holds."""

    def __init__(self, runtime: Runtime) -> None:
        self.blueprint, self.mesh = runtime.blueprint, runtime.mesh
        self.has_vocabulary = runtime.vocabulary is not None and self.blueprint.output_linear is None
        """Whether the last layer's output is logits of this rank's classes."""
        self.cp = self.blueprint.plan.cp

    def box(self, key: RecordKey, shape: Sequence[int]) -> ComparedBox | None:
        """Return which part of a recorded output or gradient of `shape` this rank holds; None: all of it."""
        dim, cuts = self.tp_dim(key), self.cp > 1 and len(shape) > 1
        if dim is None and not cuts:
            return None
        cp, tp = self.mesh.index("cp"), self.mesh.index("tp")

        def of(whole: Tensor) -> Tensor:
            part = self.at_positions(whole, cp) if cuts else whole
            if dim is None:
                return part
            own = divide(part.shape[dim], self.mesh.size("tp"))[tp]
            return part.narrow(dim, own.start, len(own))

        return ComparedBox(tuple(shape), of)

    def of_tokens(self, shape: Sequence[int], count: int) -> ComparedBox:
        """Return which part of a tensor `[rows, length, n]` is at this rank's tokens, taken as `[count, n]`.

        Its positions, or its part of them along `tp`.
        """
        cp, tp = self.mesh.index("cp"), self.mesh.index("tp")

        def of(whole: Tensor) -> Tensor:
            part = self.at_positions(whole, cp) if whole.dim() > 2 else whole
            if part[..., 0].numel() != count and whole.dim() > 2:
                own = divide(part.shape[1], self.mesh.size("tp"))[tp]
                part = part.narrow(1, own.start, len(own))
            return part.flatten(0, -2)

        return ComparedBox(tuple(shape), of)

    def of_cp(self, value: Value, index: int | None = None) -> Value:
        """Return the parts of all tensors that the rank at `index` along `cp` holds (None: this rank)."""
        index = self.mesh.index("cp") if index is None else index
        return map_tensors(lambda one: self.at_positions(one, index) if one.dim() > 1 else one, value)

    def at_positions(self, whole: Tensor, index: int) -> Tensor:
        """Return `whole` at the positions, along dim 1, of the rank at `index` along `cp`."""
        if self.cp == 1:
            return whole
        layout = sequence_layout(whole.shape[1], self.cp, self.blueprint.plan.context_layout)
        return layout.cut(whole, index)

    def positions(self, length: int) -> Tensor | None:
        """Return this rank's positions in sequences of `length`; None: all of them."""
        if self.cp == 1:
            return None
        layout = sequence_layout(length, self.cp, self.blueprint.plan.context_layout)
        return layout.positions(self.mesh.index("cp"))

    def targets_shifted_late(self, targets: Value) -> list[tuple[str, Value]]:
        """Return this rank's targets as a common mistake makes them: shifted after the sequence is cut."""
        if self.cp == 1 or not isinstance(targets, Tensor) or targets.dim() < 2:
            return []
        tokens = self.at_positions(targets.roll(1, 1), self.mesh.index("cp"))
        return [("targets that are shifted after the cut, within this rank's positions", tokens.roll(-1, 1))]

    def total(
        self, loss: Loss, output: Value, targets: Value, recorded: Tensor, tolerance: Tolerance
    ) -> tuple[Tensor, Tolerance]:
        """Return this rank's part of a micro-batch's summed loss, and the tolerance for it.

        The summand is the `recorded` total less the loss of the other ranks' parts of the recorded `output`:
        a loss that is not a sum over positions differs on every rank.
        """
        if self.cp == 1:
            return recorded, tolerance
        if isinstance(loss, SequenceLoss):
            return (recorded if self.mesh.index("cp") == 0 else torch.zeros_like(recorded)), tolerance
        others = [index for index in range(self.cp) if index != self.mesh.index("cp")]
        with torch.no_grad():
            parts = [
                loss.total(map_tensors(torch.clone, self.of_cp(output, index)), self.of_cp(targets, index))
                for index in others
            ]
        each = torch.stack(parts).to(recorded.device).double()
        slack = 0.0
        if tolerance.allowed:  # in mode exact nothing is rounded
            slack = 8 * torch.finfo(recorded.dtype).eps * float(each.abs().sum() + recorded.abs())
        own = (recorded.double() - each.sum()).to(recorded.dtype)
        return own, tolerance._replace(allowed=tolerance.allowed + slack)

    def tp_dim(self, key: RecordKey) -> int | None:
        """Return the dim along which `tp` partitions a recorded tensor (classes or sequence), or None."""
        if self.has_vocabulary and key.layer == self.blueprint.stage_layers[-1][-1]:
            return -1
        if key.layer < 0 or key.name != "0":
            return None
        return self.blueprint.sequence_dims[key.layer].next
