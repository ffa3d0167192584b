"""Attention for NumPy that is fast and needs little memory: blocks of keys, one after the other, on all cores.

The running peak and total are those of Milakov and Gimelshein (2018), "Online normalizer calculation for softmax"; the
walk over blocks of queries and of keys is that of FlashAttention (Dao et al., 2022).
"""

import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import threadpoolctl  # type: ignore[import-untyped]
from numpy.typing import NDArray

from ..spec.attend import Dropout

Array = NDArray[Any]
Place = tuple[slice, slice, slice]
T = TypeVar("T")

ROWS = 512
KEYS = 512
"""Queries and keys of one block of scores: they stay in a core's cache, and outweigh the calls that work on them."""

PRODUCTS = 2**26
"""Multiply-adds of a projection that outweigh the start of a thread."""


def attend(
    queries: Array,
    keys: Array,
    values: Array,
    /,
    *,
    keep: Array | None,
    bias: Array | None,
    band: tuple[int | None, int | None],
    scale: float,
    dropout: Dropout | None = None,
) -> Array:
    """Compute scaled, masked attention in every head at once, with the conventions of the default policy.

    Args:
        queries: what each position looks for.
        keys: what each position can be found by; a head of them serves equally many consecutive heads of queries.
        values: what each position has to give.
        keep: True where the query may attend to the key, an axis of size 1 stands for all; None keeps all.
        bias: what to add to the scaled scores, an axis of size 1 stands for all; None for nothing.
        band: how far behind a query, and how far ahead of it, the keys begin and end that it may attend to.
        scale: the factor for the scores.
        dropout: dropout of the weights; None for none.

    Returns:
        What each head found for each query; exactly 0 where a query keeps no key.
    """
    (batch, h, seq_q, _), seq_k = queries.shape, keys.shape[2]
    blended = np.zeros((batch, seq_q, h, values.shape[3]), queries.dtype).swapaxes(1, 2)  # as `mix` wants to read it
    if blended.size == 0 or seq_k == 0:
        return blended
    low, high = -seq_q if band[0] is None else band[0], seq_k if band[1] is None else band[1]
    problem = _Problem(queries, _wide(keys), _wide(values), keep, bias, low, high, scale)

    def work(place: Place, factors: Array | None = None) -> None:
        with np.errstate(all="ignore"):  # inside, for a thread has an error state of its own
            blended[place] = _blend(problem.at(place, factors))

    if dropout is None:
        _share_out(work, problem.places(together=True))
    else:
        draw = _factors(dropout, (batch, h, seq_q, seq_k), problem.keys.dtype)
        for place in problem.places(together=False):
            work(place, draw(place))
    return blended


def project(x: Array, w: Array, b: Array | None, /) -> Array:
    """Project tokens into every head.

    Args:
        x: the tokens.
        w: each head's weights.
        b: each head's bias; None for none.

    Returns:
        Each head's view of the tokens.
    """
    (batch, seq, d_in), (h, _, width) = x.shape, w.shape
    heads = _affine(x.reshape(batch * seq, d_in), w, None if b is None else b[:, None])
    return heads.reshape(h, batch, seq, width).swapaxes(0, 1)


def mix(blended: Array, w_o: Array, b_o: Array | None, /) -> Array:
    """Bring what all heads found into one output.

    Args:
        blended: what each head found for each query.
        w_o: the weights of the output.
        b_o: the bias of the output; None for none.

    Returns:
        The output for each token.
    """
    batch, h, seq, d_v = blended.shape
    return _affine(blended.swapaxes(1, 2).reshape(batch * seq, h * d_v), w_o, b_o).reshape(batch, seq, w_o.shape[1])


@dataclass(frozen=True, eq=False)
class _Problem:
    """Queries, of some heads, and what they meet; `low` and `high` count from the first of them."""

    queries: Array
    keys: Array
    values: Array
    keep: Array | None
    bias: Array | None
    low: int
    high: int
    scale: float
    factors: Array | None = None
    width: int = 0

    def places(self, *, together: bool) -> list[Place]:
        """Cut into pieces with the scores of about one block; not `together`, with one head each."""
        (batch, h, seq_q, _), (_, h_kv, seq_k, _) = self.queries.shape, self.keys.shape
        group = h // h_kv if together else 1
        rows = min(seq_q, max(1, ROWS // group))
        scores = group * rows * min(seq_k, _width(group * rows))
        least = ROWS * KEYS * min(4, group * rows) // 8  # what outweighs a thread; for few rows, it is keys that take time
        most = min(ROWS * KEYS, max(least, batch * h * seq_q * seq_k // CORES))
        shared = max(1, most // scores) if together else 1
        heads = [slice(group * part.start, group * part.stop) for part in _slices(h // group, shared)]
        return list(itertools.product(_slices(batch, max(1, shared * group // h)), heads, _slices(seq_q, rows)))

    def at(self, place: Place, factors: Array | None) -> "_Problem":
        """Look at one piece of the work, without a copy of anything but the queries."""
        batches, heads, rows = place
        group = self.queries.shape[1] // self.keys.shape[1]
        shared = (batches, slice(heads.start // group, -(-heads.stop // group)))
        queries = self.queries[place].astype(self.keys.dtype, order="C")
        queries *= self.scale
        keep, bias = (None if x is None else x[_fitting(x, place)] for x in (self.keep, self.bias))
        low, high = self.low + rows.start, self.high + rows.start
        width = _width(queries.shape[2] * queries.shape[1] // (shared[1].stop - shared[1].start))
        return _Problem(queries, self.keys[shared], self.values[shared], keep, bias, low, high, 1.0, factors, width)

    def blocks(self) -> list[slice]:
        """List the blocks of keys that any query sees."""
        first, last = max(0, self.low), min(self.keys.shape[2], self.high + self.queries.shape[2])
        return [slice(start, min(start + self.width, last)) for start in range(first, last, self.width)]

    def score(self, block: slice) -> Array:
        """Compare all queries with some keys; minus infinity where a key is dropped."""
        keys, (_, h, rows, _) = self.keys[:, :, block], self.queries.shape
        scores = _product(self.queries, keys.mT)
        if not np.isfinite(scores[:, :, 0]).all():  # a key that is not finite spoils the score of every query
            clean, broken = _without_broken(keys, h)
            scores = np.where(broken, math.nan, _product(self.queries, clean.mT))
        if self.bias is not None:
            bias = self.bias if self.bias.shape[3] == 1 else self.bias[..., block]
            scores += bias.astype(scores.dtype, copy=False)
        if self.keep is not None:
            np.copyto(scores, -np.inf, where=~self.keep[..., block])
        if block.start < self.low + rows - 1 or block.stop - 1 > self.high:
            distance = np.arange(block.start, block.stop) - np.arange(rows)[:, None]
            np.copyto(scores, -np.inf, where=(distance < self.low) | (distance > self.high))
        return scores


def _blend(problem: _Problem) -> Array:
    """Attend in one walk over the keys."""
    peak: Any = -np.inf
    total: Any = 0.0
    blended: Any = 0.0
    for block in problem.blocks():
        shares, peak, fade, total = _absorb(problem.score(block), peak, total)
        if problem.factors is not None:
            shares *= problem.factors[..., block]
        blended = blended * fade + _product(shares, problem.values[:, :, block])
    blended = blended / np.where(total == 0, 1, total)
    # a value that is not finite spoils the sum of every query that walks past, even if its weight is 0
    return blended if np.isfinite(np.sum(blended)) else _blend_warily(problem)


def _blend_warily(problem: _Problem) -> Array:
    """Attend in two walks, for only the total tells which weights are 0; no sum exceeds the largest value."""
    peak: Any = -np.inf
    total: Any = 0.0
    blended: Any = 0.0
    spoilt: Any = False
    for block in problem.blocks():
        _, peak, _, total = _absorb(problem.score(block), peak, total)
    for block in problem.blocks():
        weights = np.exp(problem.score(block) - _shift(peak)) / np.where(total == 0, 1, total)
        if problem.factors is not None:
            weights *= problem.factors[..., block]
        values, broken = _without_broken(problem.values[:, :, block], weights.shape[1])
        blended = blended + _product(weights, values)
        spoilt |= ((weights != 0) & broken).any(axis=-1, keepdims=True)
    return np.where(spoilt, math.nan, blended)


def _absorb(scores: Array, peak: Any, total: Any) -> tuple[Array, Array, Array, Array]:
    """Turn scores into shares of a new total, in place; what was added up before fades."""
    top = np.maximum(peak, scores.max(axis=-1, keepdims=True))
    shift = _shift(top)
    shares = np.exp(np.subtract(scores, shift, out=scores), out=scores)
    fade = np.exp(peak - shift)
    return shares, top, fade, total * fade + shares.sum(axis=-1, keepdims=True)


def _shift(peak: Array) -> Array:
    return np.where(peak == -np.inf, 0, peak)


def _product(rows: Array, columns: Array) -> Array:
    """Multiply head by head; the rows of all heads that share a head of columns are stacked."""
    (batch, h, n, inner), (_, shared, _, width) = rows.shape, columns.shape
    return (rows.reshape(batch, shared, h // shared * n, inner) @ columns).reshape(batch, h, n, width)


def _without_broken(x: Array, h: int) -> tuple[Array, Array]:
    """Zero what is not finite, and tell for each of `h` heads which rows had any, in a row of its own."""
    finite = np.isfinite(x)
    return np.where(finite, x, 0), np.repeat(~finite.all(axis=-1), h // x.shape[1], axis=1)[:, :, None]


def _factors(dropout: Dropout, shape: tuple[int, ...], dtype: Any) -> Callable[[Place], Array]:
    """Draw by what the weights of a piece are multiplied; pieces in row-major order get what one draw for all would give."""
    drawn = dropout.generator(shape) if callable(dropout.generator) else None

    def draw(place: Place) -> Array:
        size = (*(axis.stop - axis.start for axis in place), shape[3])
        chances = dropout.generator.random(size) if drawn is None else drawn[place]
        return np.where(chances >= dropout.rate, dtype.type(1 / (1 - dropout.rate)), 0)

    return draw


def _affine(tokens: Array, w: Array, b: Array | None) -> Array:
    """Multiply tokens by weights, in one product or in chunks on all cores."""
    out = np.empty((*w.shape[:-2], len(tokens), w.shape[-1]), tokens.dtype)
    w = _wide(w)

    def work(rows: slice) -> None:
        with np.errstate(all="ignore"):
            product = _wide(tokens[rows]) @ w
            out[..., rows, :] = product if b is None else np.add(product, b, out=product)

    # a thread of the BLAS stays busy for a while after its work, and costs the next call of `attend` more than it saved
    with _crew if len(tokens) * w.size < PRODUCTS // 16 else nullcontext():
        _share_out(work, _slices(len(tokens), max(ROWS // 4, PRODUCTS // max(1, w.size))))
    return out


def _wide(x: Array) -> Array:
    """Convert what is narrower than float32."""
    return x.astype(np.promote_types(x.dtype, np.float32), copy=False)


def _slices(n: int, size: int) -> list[slice]:
    even = -(-n // max(1, -(-n // size)))
    return [slice(start, min(start + even, n)) for start in range(0, n, max(1, even))]


def _width(rows: int) -> int:
    return max(KEYS, ROWS * KEYS // rows)


def _fitting(x: Array, place: Place) -> tuple[slice, ...]:
    return tuple(at if n > 1 else slice(None) for n, at in zip(x.shape, place, strict=False))


def _cores() -> int:
    if hasattr(os, "process_cpu_count"):
        return os.process_cpu_count() or 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


CORES = _cores()


class _Crew:
    """Threads that help, and the BLAS, which is to use one thread as long as anyone works with helpers."""

    def __init__(self) -> None:
        self.blas = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
        self.start()

    def start(self) -> None:
        """Begin anew; a fork copies no threads, but the locks that they hold."""
        self.pool = ThreadPoolExecutor(max(1, CORES - 1), "attnspec")
        self.lock = threading.Lock()
        self.users = 0

    def __enter__(self) -> ThreadPoolExecutor:
        with self.lock:
            self.users += 1
            if self.users == 1:
                self.before = [library.get_num_threads() for library in self.blas]
                self.set_blas_threads([1] * len(self.blas))
        return self.pool

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self.set_blas_threads(self.before)

    def set_blas_threads(self, counts: list[int]) -> None:
        for library, count in zip(self.blas, counts, strict=True):
            library.set_num_threads(count)


_crew = _Crew()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_crew.start)


def _share_out(work: Callable[[T], None], pieces: Sequence[T]) -> None:
    """Do all the work, the caller and the helpers each the next piece; without helpers, the BLAS has its threads."""
    helpers = min(CORES, len(pieces)) - 1
    if helpers < 1:
        for piece in pieces:
            work(piece)
        return
    queue = deque([*pieces, *[None] * (helpers + 1)])

    def drain() -> None:
        for piece in iter(queue.popleft, None):
            work(piece)

    with _crew as pool:
        futures = [pool.submit(drain) for _ in range(helpers)]
        try:
            drain()
        finally:
            begun = [future for future in futures if not future.cancel()]
            wait(begun)
    for future in begun:
        future.result()
