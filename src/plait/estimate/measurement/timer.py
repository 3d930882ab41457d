"""`Timer`: times functions; on a CPU relative to matrix products, because its speed changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from plait.ranks.accelerator import is_accelerator, synchronize

_PRODUCTS, _SIDE = 8, 320
"""Number and side of the products: some milliseconds."""


@dataclass(frozen=True)
class Timer:
    """Measures the median seconds of functions on a device.

    The speed of a virtual CPU changes by a factor of up to two within minutes, when others use the same
    processor. Each figure of a hardware file would be that of another moment. So on a CPU each call of a
    function takes turns with the same products, and the median of the ratio is multiplied by `unit`.
    """

    device: torch.device
    budget: float
    """Seconds that are spent on a function, unless it is called a fixed number of times."""
    unit: float | None
    """Seconds of the products when the timer was made; None on a GPU, where seconds are not compared."""

    @classmethod
    def on(cls, device: torch.device, budget: float) -> Timer:
        """Return a timer for `device`; on a CPU it first measures matrix products, its unit of speed."""
        alone = cls(device, budget, None)
        return alone if is_accelerator(device) else cls(device, budget, alone(_products))

    def __call__(
        self,
        run: Callable[[], object],
        *,
        times: int | None = None,
        before: Callable[[], object] | None = None,
    ) -> float:
        """Return the median seconds of `times` calls of `run`, each after `before`; one more is not counted.

        Without `times` it is called for about `budget` seconds, and at least three times. Ranks that
        communicate need the same `times`.
        """
        self.once(run)
        found: list[float] = []
        began = time.perf_counter()
        while len(found) < (times or 3) or (times is None and time.perf_counter() - began < self.budget):
            if before is not None:
                before()
            seconds = self.once(run)
            found.append(seconds if self.unit is None else seconds / self.once(_products) * self.unit)
        return median(found)

    def once(self, run: Callable[[], object]) -> float:
        """Call `run` once; return the seconds until the device has finished its work."""
        start = time.perf_counter()
        run()
        synchronize(self.device)
        return time.perf_counter() - start


def _products() -> None:
    factor = torch.ones(_SIDE, _SIDE)
    for _ in range(_PRODUCTS):
        factor @ factor
