"""Segments of a program as CUDA graphs: recorded once for each shape and slot, then replayed."""
