"""The array libraries, one file each, with the members of `attnspec.arrays.Backend` in its order."""
