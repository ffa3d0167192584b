"""The specification: multi-head attention as a chain of short typed functions."""
