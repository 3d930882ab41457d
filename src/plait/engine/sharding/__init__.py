"""Sharded data parallelism: units of parameters in flat buffers, gathered, reduced and clipped."""
