"""Finding schedules: the shortest that a memory limit allows, for given costs; pure Python, no model needed.

A problem's tables; patterns and policies to start from; settled and justified; raced; in small cases searched
exactly; fused.
"""
