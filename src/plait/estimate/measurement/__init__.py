"""Measurement of the machine that it runs on, as a hardware file for predictions."""
