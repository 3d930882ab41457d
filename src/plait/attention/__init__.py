"""Attention of some queries to some keys of a sequence: which keys each query sees, kernels, their merge."""
