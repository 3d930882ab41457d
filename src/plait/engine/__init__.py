"""The engine: what `parallelize` gives, and the runner that carries out its programs."""

from plait.engine.engine import Engine
from plait.engine.parts import Observer, Parts

__all__ = ["Engine", "Observer", "Parts"]
