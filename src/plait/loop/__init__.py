"""The training loop: steps with an optimizer, callbacks, measurements, loggers, checkpoints."""
