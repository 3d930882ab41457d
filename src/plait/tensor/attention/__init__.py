"""Softmax attention over whole sequences, of which each rank of `cp` holds some positions."""

from typing import Any

from plait.package import submodule
from plait.tensor.attention.attention import SharedKeys, attend, attention, share_keys

__all__ = ["SharedKeys", "attend", "attention", "share_keys"]


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
