"""From one living layout to another: `reshard` moves a run's state between ranks, without files."""
