"""Layers compiled to graphs, whose backward is split in the input's and the weights' gradients."""
