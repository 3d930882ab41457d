"""The loss scale: what gradients in half precision are multiplied by on their way, and divided by after.

Dynamic, as Micikevicius et al. describe it (Mixed Precision Training, arXiv:1710.03740, section 3.2): halved
after a step whose gradients are not finite, doubled after many steps whose are.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.errors import PlanError

FIRST = 2.0**16
GROWS_AFTER = 2000
"""Steps in a row with finite gradients."""


@dataclass
class LossScale:
    """The scale of the next step."""

    value: float = 1.0
    dynamic: bool = False
    good_steps: int = 0
    checked: bool = True
    """Whether the gradients of the latest step were looked at."""

    def begin(self, *, anew: bool) -> None:
        """A step begins; `anew`: the gradients before it were used, or thrown away.

        PlanError where nobody asked whether these were finite: the optimizer may have used what is not.
        """
        if self.dynamic and anew and not self.checked:
            raise PlanError(
                "in fp16 gradients may overflow, and nobody looked: call "
                "engine.clip_grad_norm_ (with float('inf') to clip nothing) before each optimizer.step()."
            )

    def end(self) -> None:
        """A step is done: there are new gradients. After one that failed there are none."""
        self.checked = False

    @property
    def guards(self) -> bool:
        """Whether gradients that overflowed are to be thrown away."""
        return self.dynamic or self.value != 1

    def update(self, *, finite: bool) -> None:
        """Gradients were looked at."""
        self.checked = True
        self.good_steps = self.good_steps + 1 if finite else 0
        if not self.dynamic:
            return
        if not finite:
            self.value /= 2
        elif self.good_steps == GROWS_AFTER:
            self.value, self.good_steps = self.value * 2, 0


def loss_scale(told: float | None, *, in_fp16: bool) -> LossScale:
    """The first scale: as told; else dynamic where gradients may overflow, and none otherwise."""
    if told is not None:
        return LossScale(told)
    return LossScale(FIRST, dynamic=True) if in_fp16 else LossScale()
