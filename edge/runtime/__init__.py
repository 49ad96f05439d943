"""The on-robot runtime: a large scene model and a small control model on one device."""
