"""Schedules to programs of instructions: lowering, messages, and checks of what the ranks then run."""
