"""Verification: compares a parallel run with a single device, and locates the first difference.

reference run    a single device in plain PyTorch, on rank 0; every intermediate tensor is recorded
perturbation     the same run with rounding errors added to every tensor: what rounding explains
candidate run    the parallel run, compared with the recording after each instruction
report           the findings of all ranks: equal, or the first difference and its probable cause
"""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
