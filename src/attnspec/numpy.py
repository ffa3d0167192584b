"""The layer of NumPy."""

from .layers.numpy_layer import MultiHeadAttention as MultiHeadAttention
