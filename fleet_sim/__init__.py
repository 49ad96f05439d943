"""The fleet simulator."""
