"""What lies between a step's matrix multiplies, in C++ that is built on the spot."""
