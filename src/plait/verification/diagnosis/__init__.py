"""The probable cause of the first difference, from what the wrong numbers look like."""

from plait.verification.diagnosis.cause import likely_cause
from plait.verification.diagnosis.symptoms import Symptoms

__all__ = ["Symptoms", "likely_cause"]
