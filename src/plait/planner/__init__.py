"""Deciding how to run before anything is launched: pure Python on numbers, no torch.

`balance` cuts the layers of a model into stages of even cost, `shortest_cut` for the shortest step of a
schedule; `ordered_cut` chooses the schedule too.
"""

from plait.planner.balance import balance
from plait.planner.cut import shortest_cut
from plait.planner.layer_costs import LayerCosts
from plait.planner.order import ordered_cut

__all__ = ["LayerCosts", "balance", "ordered_cut", "shortest_cut"]
