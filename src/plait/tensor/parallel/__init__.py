"""Parallel layers over `tp`, and the rules that put them in the place of a model's modules."""
