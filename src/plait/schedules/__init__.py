"""Schedules as data: actions, where stages live, policies, rules, and the lowering to programs."""
