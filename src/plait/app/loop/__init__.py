"""The training loop: `plait.fit`, its callbacks, loggers, checkpoints, validation and learning rates."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
