"""The search for plans: which there are, bounds on their time and memory, the fastest that fit."""
