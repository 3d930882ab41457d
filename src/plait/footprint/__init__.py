"""Predicted memory of a plan: a step's program is simulated on a ledger of allocations, without tensors."""
