"""Overnight jobs: the ledger, log readers, the summariser."""
