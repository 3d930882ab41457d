"""Proofs before the first step: positions stay apart, rules fit gradients, optimizers can be sharded."""
