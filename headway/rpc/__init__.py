"""The wire: status table, channels, metadata."""
