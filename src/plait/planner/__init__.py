"""Deciding how to run before anything is launched: pure Python on numbers, no torch.

`balance` cuts the layers of a model into stages of even cost, `shortest_cut` for the shortest step.
"""

from plait.planner.balance import balance
from plait.planner.cut import shortest_cut

__all__ = ["balance", "shortest_cut"]
