"""Implementations that the oracle is asked about: of others' packages, of the libraries, and right ones that look wrong."""
