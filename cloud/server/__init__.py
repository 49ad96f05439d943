"""gRPC services over one dispatcher that drives the scheduler."""
