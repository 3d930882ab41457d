"""Autograd functions: weight gradients kept for later, and collectives with a gradient, in pairs."""
