"""Stages, the executor that runs their programs, and the exchange of tensors between stages."""
