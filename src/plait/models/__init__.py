"""Plain single-device models, as sequences of layers on the meta device."""

from plait.models.gpt2 import gpt2

__all__ = ["gpt2"]
