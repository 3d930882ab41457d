"""Cuts of a model into stages, decided on numbers: pure Python, no torch."""
