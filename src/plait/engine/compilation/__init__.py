"""Layers compiled to graphs, whose backward is split into input gradient and weight gradients."""
