"""The demonstration: a server, robots, and batch work beside them."""
