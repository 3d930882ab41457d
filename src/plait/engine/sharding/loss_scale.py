"""`LossScale`: the factor of the loss that keeps gradients in fp16 from underflowing, fixed or dynamic.

A dynamic scale (Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2) is halved after
a step whose gradients are not finite, and doubled after many steps whose gradients are.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.errors import PlanError

FIRST = 2.0**16


GROWS_AFTER = 2000
"""Steps in a row with finite gradients."""


@dataclass
class LossScale:
    """The loss scale of the next step, and the state by which a dynamic scale adapts."""

    value: float = 1.0
    dynamic: bool = False
    good_steps: int = 0
    checked: bool = True
    """Whether the gradients of the latest step were checked for finite values."""

    def require_checked(self, *, anew: bool) -> None:
        """Raise PlanError where gradients begin `anew`, and the last ones were not checked for overflow.

        With a dynamic scale only: the optimizer may have used values that are not finite.
        """
        if self.dynamic and anew and not self.checked:
            raise PlanError(
                "in fp16 gradients may overflow, and they were not checked: call "
                "engine.clip_grad_norm_ (with float('inf') to clip nothing) before each optimizer.step()."
            )

    def end(self) -> None:
        """End a successful step: mark its gradients as not yet checked for overflow."""
        self.checked = False

    @property
    def guards(self) -> bool:
        """Whether all gradients of a step are set to None if any of them overflowed (is not finite)."""
        return self.dynamic or self.value != 1

    def update(self, *, finite: bool) -> None:
        """Adapt a dynamic scale: halve it if gradients were not finite, double it after many finite steps."""
        self.checked = True
        self.good_steps = self.good_steps + 1 if finite else 0
        if not self.dynamic:
            return
        if not finite:
            self.value /= 2
        elif self.good_steps == GROWS_AFTER:
            self.value, self.good_steps = self.value * 2, 0


def loss_scale(given: float | None, *, in_fp16: bool) -> LossScale:
    """Return the first step's loss scale: `given`, or dynamic if anything is in fp16, or else 1."""
    if given is not None:
        return LossScale(given)
    return LossScale(FIRST, dynamic=True) if in_fp16 else LossScale()
