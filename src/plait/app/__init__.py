"""What a user starts: the command line, the configuration, data, the training loop, `plait train`."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
