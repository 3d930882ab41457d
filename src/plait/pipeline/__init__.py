"""Recomputation with cached operations: results of a layer's first run that its second run reuses."""
