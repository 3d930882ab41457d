"""The batteries: configuration, data, the training loop, metrics and progress."""
