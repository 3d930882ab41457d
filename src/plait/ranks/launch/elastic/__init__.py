"""Runs that outlive their ranks: a supervisor replaces ranks that are lost, and the others go on."""
