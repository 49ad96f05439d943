"""The service: scheduler, engine, server, overnight batch."""
