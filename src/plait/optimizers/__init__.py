"""Optimizers that need whole matrices or whole parameters, where a rank holds shards of them."""
