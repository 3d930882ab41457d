"""The parameter update of the reference run: loss scale removed, gradients clipped, optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plait.errors import ModelError
from plait.verification.expected_dtypes import ReferenceLossScale
from plait.verification.options import VerifyOptions
from plait.verification.reference.recording import ReferenceRecording
from plait.verification.reference.rounding_errors import Perturbation
from plait.verification.step_location import RecordKey, Records, RecordScope

CLIP_FRACTION = 1 / 3
"""Default clip bound over the first norm: not a binary fraction, so that a factor in few digits differs."""
CLIP_EPSILON = 1e-6
"""Added to the norm by `torch.nn.utils.clip_grad_norm_`, before it divides by it."""


class ReferenceUpdate:
    """The optimizer of one reference run, with the loss scale and the clip bound."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        options: VerifyOptions,
        perturbation: Perturbation,
        clip: float | None,
        baseline: ReferenceRecording | None,
        *,
        scale: ReferenceLossScale,
        make: Callable[..., Optimizer],
    ) -> None:
        """`make`: makes the optimizer of parameter groups and all parameters by name."""
        self.parameters = parameters
        self.trainable = {name: p for name, p in parameters.items() if p.requires_grad}
        self.norm_type = options.norm_type
        self.perturbation = perturbation
        self.given_clip = clip
        self.clip = clip
        """The maximum gradient norm, known after the first step."""
        self.baseline = baseline
        self.overflowed = False
        """Whether a gradient has overflowed at the loss scale."""
        self.scale = scale
        matrices = [p for p in self.trainable.values() if p.dim() >= 2]
        vectors = [p for p in self.trainable.values() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = make(groups, self.parameters)

    def apply(self, step: int) -> Records:
        """Divide each `.grad` by the loss scale, clip, and update parameters; return tensors to record."""
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
        self.scale.update()
        updated = dict(self._updated())
        records |= {key: tensor.detach().clone() for key, tensor in updated.items()}
        if self.baseline is not None:
            with torch.no_grad():
                for key, tensor in updated.items():
                    tensor.copy_(self.baseline.values[RecordScope(step)][key])
        return records

    def values(self) -> Records:
        """Return copies of all parameters."""
        return {RecordKey("value", name=name): p.detach().clone() for name, p in self.parameters.items()}

    def _updated(self) -> Iterator[tuple[RecordKey, Tensor]]:
        """Yield the parameters, and the tensors of their optimizer state."""
        for name, parameter in self.parameters.items():
            yield RecordKey("value", name=name), parameter
            for entry, state in self.optimizer.state.get(parameter, {}).items():
                if isinstance(state, Tensor):
                    yield RecordKey("state", name=f"{name}/{entry}"), state

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
        """Return the maximum gradient norm of a step: the given one, or a third of the first step's norm.

        Under a dynamic loss scale, where gradients are checked once a step, every second step has a bound of
        twice its own norm.
        """
        if self.baseline is not None:
            return float(self.baseline.values[RecordScope(step)][RecordKey("clip")])
        if self.given_clip is not None:
            return self.given_clip
        measured = float(norm) + CLIP_EPSILON
        if self.clip is None and math.isinf(self.norm_type):
            self.clip = exact_bound(norm)
        elif self.clip is None:
            self.clip = measured * CLIP_FRACTION if float(norm) else math.inf
        return 2 * measured if self.scale.dynamic and step % 2 else self.clip

    def _reset_gradients(self, step: int, kind: str) -> None:
        """Set gradients to the `kind` ones that `baseline`, if any, recorded; add rounding errors to them."""
        if self.baseline is not None:
            recorded = self.baseline.values[RecordScope(step)]
            for name, parameter in self.trainable.items():
                parameter.grad = self.perturbation.perturb_elementwise(
                    recorded[RecordKey(kind, name=name)].clone()
                )


def exact_bound(norm: Tensor) -> float:
    """Return a clip bound that scales gradients by exactly 1/2, or else 3/4, 5/8 or 7/8.

    PyTorch multiplies by the reciprocal of the norm, so that a bound of half the norm need not give 1/2.
    """
    whole = norm + CLIP_EPSILON
    for factor in (1 / 2, 3 / 4, 5 / 8, 7 / 8):
        near = factor * float(whole)
        for bound in (near, math.nextafter(near, 0), math.nextafter(near, math.inf)):
            if float(norm) and float(bound / whole) == factor:
                return bound
    return math.inf
