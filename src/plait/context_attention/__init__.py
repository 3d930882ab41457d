"""Softmax attention over whole sequences, of which each rank of `cp` holds some positions."""

from typing import Any

from plait.context_attention.attention import SharedKeys, attend, attention, share_keys
from plait.submodules import submodule

__all__ = ["SharedKeys", "attend", "attention", "share_keys"]


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
