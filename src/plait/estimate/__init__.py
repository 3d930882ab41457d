"""Estimates before a run: memory, time, the search for plans; measurements of this machine for them."""
