"""Search for the shortest schedule within a memory limit, for given costs; pure Python, without a model.

Steps of `auto`: a problem's tables; initial orders from policies and building blocks; list scheduling with
justification; local search; exact search of small problems; joining of `I` and `W` to `B`.
"""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
