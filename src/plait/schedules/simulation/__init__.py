"""Simulated costs of a schedule: exact times, bubble and memory from action costs, and pictures of them."""
