"""Predictions before a run: the time and memory of a step of a plan on given hardware; no ranks, no torch."""
