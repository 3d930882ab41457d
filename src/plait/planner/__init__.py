"""Deciding how to run before anything is launched: pure Python on numbers, no torch.

`balance` cuts the layers of a model into pipeline stages of even cost.
"""

from plait.planner.balance import balance

__all__ = ["balance"]
