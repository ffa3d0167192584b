"""The layers of PyTorch: `MultiHeadAttention`, and `MultiheadAttention` in the place of PyTorch's own."""

from .layers.torch_dropin import MultiheadAttention as MultiheadAttention
from .layers.torch_layer import MultiHeadAttention as MultiHeadAttention
