"""The edges: how what plait holds looks to torch's own tools, and what is written for them is read.

Inside, every tensor is a plain local one with a `Layout`; a `DTensor` is made here, and nowhere else.
"""

from plait.checkpoint.dtensor import DTensor, as_dtensor, expressible
from plait.checkpoint.torch_plan import rules_from_torch

__all__ = ["DTensor", "as_dtensor", "expressible", "rules_from_torch"]
