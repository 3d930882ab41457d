"""Training from a configuration: data, loop, metrics, progress and checkpoints."""
