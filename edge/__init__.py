"""The robot: client, fallback, on-robot runtime."""
