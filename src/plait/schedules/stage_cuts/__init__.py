"""Deciding how to run before anything is launched: pure Python on numbers, no torch.

`balance` cuts the layers of a model into stages of even cost, `shortest_cut` for the shortest step of a
schedule; `ordered_cut` chooses the schedule too.
"""

from plait.schedules.stage_cuts.balance import balance
from plait.schedules.stage_cuts.cut import shortest_cut
from plait.schedules.stage_cuts.layer_costs import LayerCosts
from plait.schedules.stage_cuts.order import ordered_cut

__all__ = ["LayerCosts", "balance", "ordered_cut", "shortest_cut"]
