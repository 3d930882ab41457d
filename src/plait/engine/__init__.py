"""The engine: what `parallelize` gives, and the runner that carries out its programs."""

from plait.engine.engine import Engine
from plait.engine.parts import Observer, Parts
from plait.engine.recording import Recording

__all__ = ["Engine", "Observer", "Parts", "Recording"]
