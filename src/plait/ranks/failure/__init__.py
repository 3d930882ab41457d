"""Failures of ranks: records, the root cause of several, hanging operations, orphaned ranks."""
