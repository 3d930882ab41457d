"""Failures of ranks: which one failed first, what is blocked, and the end of ranks that nobody waits for."""
