"""Corpora, tokenizers, prepared token shards, and the order of training batches."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
