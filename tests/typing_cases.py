"""What the type checker reveals; read by mypy in test_typing.py, never run."""

from typing import Any, assert_type

import numpy as np
import torch
from numpy.typing import NDArray

import attnspec

array: NDArray[Any] = np.ones((2, 3, 5, 7))
flags: NDArray[np.bool_] = np.ones((1, 1, 5, 5), bool)
tensor = torch.ones(2, 3, 5, 7)

assert_type(attnspec.score(array, array), NDArray[Any])
assert_type(attnspec.score(tensor, tensor), torch.Tensor)
assert_type(attnspec.mask(tensor, tensor > 0), torch.Tensor)
assert_type(attnspec.mask(array, flags), NDArray[Any])
assert_type(attnspec.attend(tensor, tensor, tensor, keep=tensor > 0, causal=True), torch.Tensor)
assert_type(attnspec.attend(array, array, array), NDArray[Any])

heads = attnspec.Heads(d_model=24, h=4)
assert_type(heads.d_k, int)
parameters = attnspec.Parameters.random(heads)
assert_type(parameters, attnspec.Parameters[NDArray[Any]])
assert_type(parameters.to_torch(), attnspec.Parameters[torch.Tensor])
assert_type(attnspec.multi_head_attention(array, parameters), NDArray[Any])
assert_type(attnspec.multi_head_attention(tensor, parameters.to_torch()), torch.Tensor)

attnspec.score(array, tensor)  # error: type-var
attnspec.attend(tensor, tensor, array)  # error: type-var
attnspec.score([1.0], [1.0])  # error: type-var
attnspec.multi_head_attention(array, parameters.to_torch())  # error: misc
attnspec.softmax(array, precision="float16")  # error: arg-type
attnspec.attend(array, array, array, True)  # error: call-arg type-var
attnspec.score(queries=array, keys=array)  # error: call-arg
attnspec.Heads(512, 8)  # error: call-arg
heads.d_k = 3  # error: misc
