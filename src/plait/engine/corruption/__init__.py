"""Checks that memory between steps, and the computations of layers, have no wrong bits."""
