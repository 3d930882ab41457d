"""Stages, the executor that runs programs, and the exchange of boundary tensors."""
