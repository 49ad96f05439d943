"""Executes the scheduler's step plans."""
