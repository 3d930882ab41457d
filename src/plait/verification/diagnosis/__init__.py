"""Diagnosis: the probable cause of the first difference, derived from the wrong values."""

from plait.verification.diagnosis.cause import likely_cause
from plait.verification.diagnosis.symptoms import Symptoms

__all__ = ["Symptoms", "likely_cause"]
