"""Single-device models as sequences of layers: plait's own, or converted from Hugging Face."""

from typing import Any

from plait.models.gpt2 import gpt2
from plait.models.huggingface import from_huggingface
from plait.models.llama import llama
from plait.models.lora import merged_values
from plait.models.peft_files import load_adapter, save_adapter
from plait.package import submodule

__all__ = ["from_huggingface", "gpt2", "llama", "load_adapter", "merged_values", "save_adapter"]


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
