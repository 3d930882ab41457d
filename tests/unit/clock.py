"""A clock in place of the module `time`, for what sleeps until another process has done something."""

from __future__ import annotations

from collections.abc import Callable


class Clock:
    """Stands for the module `time`: a sleep takes a second, in which `happens` is called with its number."""

    def __init__(self, happens: Callable[[float], object]) -> None:
        self.now: float = 0
        self.happens = happens

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 1
        self.happens(self.now)
