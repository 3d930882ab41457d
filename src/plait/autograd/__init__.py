"""Autograd functions that plait adds to a model's own: weight gradients kept for later."""
