"""The reference's update of parameters: it removes the loss scale, clips, and lets the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.verification.formats import ReferenceLossScale
from plait.verification.location import WHOLE_STEP, RecordKey, Records, RecordScope
from plait.verification.options import VerifyOptions
from plait.verification.perturbation import Perturbation
from plait.verification.reference_recording import ReferenceRecording

FRACTION = 1 / 3
"""Of the first norm, in a step that clips. No binary number: a factor that was rounded is another one."""
TINY = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to the norm before it divides by it."""


class ReferenceUpdate:
    """The optimizer of one run on one device, and what it is given."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        options: VerifyOptions,
        perturbation: Perturbation,
        clip: float | None,
        baseline: ReferenceRecording | None,
        *,
        scale: ReferenceLossScale,
    ) -> None:
        self.parameters = parameters
        self.trainable = {name: p for name, p in parameters.items() if p.requires_grad}
        self.norm_type = options.norm_type
        self.perturbation = perturbation
        self.given = clip
        self.clip = clip
        """The bound of the first step, once that is done."""
        self.baseline = baseline
        self.overflowed = False
        """Whether gradients were not finite at the loss scale."""
        self.scale = scale
        matrices = [p for p in self.trainable.values() if p.dim() >= 2]
        vectors = [p for p in self.trainable.values() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = options.optimizer(groups)

    def update(self, step: int) -> Records:
        """Update the parameters from their `.grad`, which the loss scale is still in; record all of it."""
        records = {RecordKey("scale"): torch.tensor(self.scale.value, dtype=torch.float64)}
        for name, parameter in self.trainable.items():
            assert parameter.grad is not None
            if self.scale.value != 1:
                parameter.grad.div_(self.scale.value)
            records[RecordKey("final", name=name)] = parameter.grad.clone()
        self._reset_gradients(step, "final")
        records |= self._clip(step)
        self._reset_gradients(step, "clipped")
        self.optimizer.step()
        self.scale.update(finite=True)
        records |= self.values() | self._states()
        self._reset_parameters(step)
        return records

    def values(self) -> Records:
        """Copies of all parameters, as the optimizer has them."""
        return {RecordKey("value", name=name): p.detach().clone() for name, p in self.parameters.items()}

    def _clip(self, step: int) -> Records:
        gradients = [p.grad.double() for p in self.trainable.values() if p.grad is not None]
        norms = {"norm": nn.utils.get_total_norm(gradients).double()}
        if math.isinf(self.norm_type):
            norms["largest"] = nn.utils.get_total_norm(gradients, math.inf).double()
        norm = norms["largest" if math.isinf(self.norm_type) else "norm"]
        if (self.scale.dynamic or self.scale.value != 1) and not bool(norm.isfinite()):
            self.overflowed = True
            raise ModelError(
                f"the reference's gradients are not finite in step {step + 1} at a loss scale of "
                f"{self.scale.value:g}: set plan.loss_scale to less."
            )
        bound = self._bound(step, norm)
        nn.utils.clip_grads_with_norm_(self.trainable.values(), bound, norm)
        records = {RecordKey(kind): value for kind, value in norms.items()}
        records[RecordKey("clip")] = torch.tensor(bound, dtype=torch.float64)
        for name, parameter in self.trainable.items():
            assert parameter.grad is not None
            records[RecordKey("clipped", name=name)] = parameter.grad.clone()
        return records

    def _bound(self, step: int, norm: Tensor) -> float:
        """The largest norm of a step: as told, or a third of the first step's.

        Under a dynamic loss scale, which allows for one look at the gradients a step, every second step has a
        bound of twice its own norm.
        """
        if self.baseline is not None:
            return float(self.baseline.values[RecordScope(step, WHOLE_STEP)][RecordKey("clip")])
        if self.given is not None:
            return self.given
        measured = float(norm) + TINY
        if self.clip is None and math.isinf(self.norm_type):
            self.clip = exact_bound(norm)
        elif self.clip is None:
            self.clip = measured * FRACTION if float(norm) else math.inf
        return 2 * measured if self.scale.dynamic and step % 2 else self.clip

    def _states(self) -> Records:
        return {
            RecordKey("state", name=f"{name}/{entry}"): state.detach().clone()
            for name, parameter in self.trainable.items()
            for entry, state in self.optimizer.state.get(parameter, {}).items()
            if isinstance(state, Tensor)
        }

    def _reset_gradients(self, step: int, kind: str) -> None:
        """Set the gradients to those of the baseline, each with a rounding error."""
        if self.baseline is not None:
            recorded = self.baseline.values[RecordScope(step, WHOLE_STEP)]
            for name, parameter in self.trainable.items():
                parameter.grad = self.perturbation.perturb_elementwise(
                    recorded[RecordKey(kind, name=name)].clone()
                )

    def _reset_parameters(self, step: int) -> None:
        """Set the parameters and the optimizer state to those of the baseline."""
        if self.baseline is None:
            return
        recorded = self.baseline.values[RecordScope(step, WHOLE_STEP)]
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(recorded[RecordKey("value", name=name)])
                for entry, state in self.optimizer.state.get(parameter, {}).items():
                    if isinstance(state, Tensor):
                        state.copy_(recorded[RecordKey("state", name=f"{name}/{entry}")])


def exact_bound(norm: Tensor) -> float:
    """A bound by which gradients are scaled by 1/2, or else 3/4, 5/8 or 7/8, without a rounding error.

    PyTorch divides by multiplying with the reciprocal, so that half of a number over it need not be 1/2.
    """
    whole = norm + TINY
    for factor in (1 / 2, 3 / 4, 5 / 8, 7 / 8):
        near = factor * float(whole)
        for bound in (near, math.nextafter(near, 0), math.nextafter(near, math.inf)):
            if float(norm) and float(bound / whole) == factor:
                return bound
    return math.inf
