"""Snapshots of a run in shared memory, which outlives its processes: written between steps, restored from."""
