"""Diagnosis: the probable cause of the first difference, derived from the wrong values."""
