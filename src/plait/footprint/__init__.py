"""Prediction of the memory that a plan takes: the program of a step runs on a ledger instead of tensors."""
