"""Cuts of a model into stages, computed from layer costs alone: pure Python, no torch."""
