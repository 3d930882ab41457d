"""What a user starts: the command line, the configuration, data, the training loop, `plait train`."""
