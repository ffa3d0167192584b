"""One example worked out by hand, step by step: one sequence of two positions, two heads.

All numbers below were found with pencil and paper; the scores are logarithms of whole numbers, so that the weights
are simple fractions.
"""

from math import inf, log

import numpy as np
import pytest
from arrays import Library, assert_same

import attnspec
from attnspec import Parameters

A_FEW_ULP = 4 * 2.0**-52

# The two positions are the unit vectors, so position 0 reads the first row of every projection and position 1 the second.
X = [[[1, 0], [0, 1]]]

# d_k = 4, so the scale is 1/2; only the first and the last of the four components are used.
W_Q = [
    [[1, 0, 0, 1], [-1, 0, 0, 0]],
    [[2, 0, 0, 0], [3, 0, 0, 0]],
]
B_Q = [
    [1, 0, 0, 0],
    [0, 0, 0, 1],
]
# Head 0 asks (1 0 0 1) + (1 0 0 0) and (-1 0 0 0) + (1 0 0 0), head 1 (2 0 0 0) + (0 0 0 1) and (3 0 0 0) + (0 0 0 1).
QUERIES = [[
    [[2, 0, 0, 1], [0, 0, 0, 0]],
    [[2, 0, 0, 1], [3, 0, 0, 1]],
]]  # fmt: skip

W_K = [
    [[log(3), 0, 0, 5], [0, 0, 0, 5]],
    [[0, 7, 0, 0], [log(2), 7, 0, 0]],
]
B_K = [
    [0, 0, 0, -5],
    [0, 0, 0, 0],
]
KEYS = [[
    [[log(3), 0, 0, 0], [0, 0, 0, 0]],
    [[0, 7, 0, 0], [log(2), 7, 0, 0]],
]]  # fmt: skip

W_V = [
    [[3], [7]],
    [[16], [31]],
]
B_V = [
    [1],
    [-1],
]
VALUES = [[
    [[4], [8]],
    [[15], [30]],
]]  # fmt: skip

# Query by key. Head 0: (2, 0) * log 3 and (0, 0) * 0; head 1: 2 * (0, log 2) and 3 * (0, log 2).
SCORE = [[
    [[2 * log(3), 0], [0, 0]],
    [[0, 2 * log(2)], [0, 3 * log(2)]],
]]  # fmt: skip
# Half of that.
SCALE = [[
    [[log(3), 0], [0, 0]],
    [[0, log(2)], [0, log(2) * 3 / 2]],
]]  # fmt: skip
# exp gives 3 : 1, 1 : 1, 1 : 2 and 1 : 2 * sqrt(2).
ROOT = 8**0.5
SOFTMAX = [[
    [[3 / 4, 1 / 4], [1 / 2, 1 / 2]],
    [[1 / 3, 2 / 3], [1 / (1 + ROOT), ROOT / (1 + ROOT)]],
]]  # fmt: skip
# 3/4 * 4 + 1/4 * 8 = 5, 1/2 * 4 + 1/2 * 8 = 6, 1/3 * 15 + 2/3 * 30 = 25, and
# (15 + 30 * sqrt 8) / (1 + sqrt 8) = 15 * (1 + 2 sqrt 8) * (sqrt 8 - 1) / 7 = 15 * (15 - sqrt 8) / 7.
LAST = 15 * (15 - ROOT) / 7
BLEND = [[
    [[5], [6]],
    [[25], [LAST]],
]]  # fmt: skip
CONCATENATE = [[[5, 25], [6, LAST]]]

W_O = [[1, 2], [3, 4]]
B_O = [10, 20]
# 5 + 75 + 10 = 90, 10 + 100 + 20 = 130; 6 + 3 * last + 10, 12 + 4 * last + 20.
MIX = [[[90, 130], [16 + 3 * LAST, 32 + 4 * LAST]]]

STEPS = {
    "project_queries": QUERIES,
    "project_keys": KEYS,
    "project_values": VALUES,
    "score": SCORE,
    "scale": SCALE,
    "softmax": SOFTMAX,
    "blend": BLEND,
    "concatenate": CONCATENATE,
    "mix": MIX,
}

# Head 0 drops key 1 for query 0, and everything for query 1; head 1 drops key 0 for query 0.
KEEP = [[
    [[True, False], [False, False]],
    [[False, True], [True, True]],
]]  # fmt: skip
MASKED = {
    "mask": [[
        [[log(3), -inf], [-inf, -inf]],
        [[-inf, log(2)], [0, log(2) * 3 / 2]],
    ]],
    "softmax": [[
        [[1, 0], [0, 0]],
        [[0, 1], [1 / (1 + ROOT), ROOT / (1 + ROOT)]],
    ]],
    "blend": [[
        [[4], [0]],
        [[30], [LAST]],
    ]],
    "concatenate": [[[4, 30], [0, LAST]]],
    # 4 + 90 + 10 = 104, 8 + 120 + 20 = 148; 0 + 3 * last + 10, 0 + 4 * last + 20.
    "mix": [[[104, 148], [10 + 3 * LAST, 20 + 4 * LAST]]],
}  # fmt: skip

# Query 0 sees key 0 alone: 4 and 15 are left, 4 + 45 + 10 = 59 and 8 + 60 + 20 = 88; query 1 sees both keys.
CAUSAL = {
    "keep_causal": [[[[True, False], [True, True]]]],
    "softmax": [[
        [[1, 0], [1 / 2, 1 / 2]],
        [[1, 0], [1 / (1 + ROOT), ROOT / (1 + ROOT)]],
    ]],
    "concatenate": [[[4, 15], [6, LAST]]],
    "mix": [[[59, 88], [16 + 3 * LAST, 32 + 4 * LAST]]],
}  # fmt: skip

# With causality on top of the mask query 0 loses its last key in head 1: 4 + 0 + 10 = 14, 8 + 0 + 20 = 28.
BOTH = {
    "keep_both": [[
        [[True, False], [False, False]],
        [[False, False], [True, True]],
    ]],
    "concatenate": [[[4, 0], [0, LAST]]],
    "mix": [[[14, 28], [10 + 3 * LAST, 20 + 4 * LAST]]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("masked", "causal", "written"),
    [(False, False, STEPS), (True, False, MASKED), (False, True, CAUSAL), (True, True, BOTH)],
    ids=["plain", "masked", "causal", "both"],
)
@pytest.mark.parametrize("library", [Library.NUMPY, Library.TORCH], ids=lambda library: library.value)
def test_every_step_gives_what_was_worked_out_by_hand(library: Library, written: dict[str, list], *, masked: bool, causal: bool) -> None:
    """To a few ulp of each number, and with the shapes as written."""
    named = {"w_q": W_Q, "w_k": W_K, "w_v": W_V, "w_o": W_O, "b_q": B_Q, "b_k": B_K, "b_v": B_V, "b_o": B_O}
    parameters = Parameters(**{name: library.wrap(np.array(numbers, np.float64)) for name, numbers in named.items()})
    x, keep = library.wrap(np.array(X, np.float64)), library.wrap(np.array(KEEP)) if masked else None
    with attnspec.trace() as calls:
        y = attnspec.multi_head_attention(x, parameters, keep=keep, causal=causal)
    for name, numbers in written.items():
        wanted = np.array(numbers, bool if name.startswith("keep") else np.float64)
        within = A_FEW_ULP * np.abs(np.where(np.isfinite(wanted), wanted, 0.0))
        assert_same(calls[name].result, library.wrap(wanted), within=within, what=name)
    assert y is calls["mix"].result
