"""`reshard`: moves a run's state from its present layout to another, between ranks, without files."""
