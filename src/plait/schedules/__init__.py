"""Schedules as data: actions, placement of stages, policies, rules, and the lowering to programs."""
