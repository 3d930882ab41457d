"""Ranks of one host: words over sockets, and memory that all of them reach.

door → line → lines (words between all ranks of a group) → memory → scratch (tensors shown for a moment)
"""
