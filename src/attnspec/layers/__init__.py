"""The fast layers: the chain of the specification, with kernels in the place of several steps."""
