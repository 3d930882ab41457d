"""Softmax attention over whole sequences, of which each rank of `cp` holds some positions."""

from plait.context_attention.attention import SharedKeys, attend, attention, share_keys

__all__ = ["SharedKeys", "attend", "attention", "share_keys"]
