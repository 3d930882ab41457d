"""Plain single-device models, as sequences of layers on the meta device."""

from plait.models.gpt2 import gpt2
from plait.models.llama import llama

__all__ = ["gpt2", "llama"]
