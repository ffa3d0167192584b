"""The cache: the keys and values of tokens that came before, so that a new token costs one row."""

from dataclasses import dataclass, replace
from typing import Generic, Self

from jaxtyping import Float, Int

from ..arrays import A, backend_of
from ..errors import ConfigError
from ..step import check_fields, step


@step("fan out", equation=r"K_i \leftarrow [K^{past}_i; K_i]")
def append_to_cache(
    cached: Float[A, "batch h_kv past width"], new: Float[A, "batch h_kv seq_k width"], /
) -> Float[A, "batch h_kv past+seq_k width"]:
    """Put the keys, or the values, of new tokens behind those of the tokens before.

    Args:
        cached: those of the tokens before.
        new: those of the new tokens.

    Returns:
        All of them, in the order of the tokens.

    Raises:
        AttnspecError: the arguments do not fit together.

    Laws:
        The parts of a sequence, one behind the other, are the sequence.
        One call of n tokens gives what n calls of one give.

    Examples: Edge cases
        Behind an empty cache the new tokens are all that there is; without new tokens the cache stays.

        >>> import numpy as np, attnspec
        >>> tokens, none = np.array([[[[5.0], [7.0]]]]), np.ones((1, 1, 0, 1))
        >>> attnspec.append_to_cache(none, tokens).ravel()
        array([5., 7.])
        >>> attnspec.append_to_cache(tokens, none).ravel()
        array([5., 7.])

        A cache of another batch is refused.

        >>> attnspec.append_to_cache(np.ones((5, 1, 3, 1)), tokens)
        Traceback (most recent call last):
            ...
        attnspec.errors.ShapeError: append_to_cache: new (1, 1, 2, 1) has batch=1, but batch=5 was set by cached (5, 1, 3, 1).
    """
    return backend_of(new).concat((cached, new), axis=2)


@dataclass(frozen=True, eq=False)
class Cache(Generic[A]):
    """The keys and values of the tokens so far, after normalisation and rotation, of each key/value head.

    Attributes:
        keys: what the tokens can be found by.
        values: what they have to give.
        evicted: how many tokens before these are forgotten.
    """

    keys: Float[A, "batch h_kv past d_k"]
    values: Float[A, "batch h_kv past d_v"]
    evicted: int = 0

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def seen(self) -> int:
        """How many tokens there were, forgotten ones included: the position of the next one."""
        return self.evicted + int(self.keys.shape[2])

    def append(self, keys: Float[A, "batch h_kv seq_k d_k"], values: Float[A, "batch h_kv seq_k d_v"], /) -> Self:
        """Add the keys and values of new tokens.

        Args:
            keys: their keys.
            values: their values.

        Returns:
            The longer cache.

        Raises:
            ShapeError: they do not fit those of the tokens before.
        """
        return replace(self, keys=append_to_cache(self.keys, keys), values=append_to_cache(self.values, values))

    def crop(self, seen: int, /) -> Self:
        """Go back to an earlier moment.

        Args:
            seen: how many tokens there were then.

        Returns:
            The cache as it was.

        Raises:
            ConfigError: there were never so many, or some of them are forgotten.
        """
        if not self.evicted <= seen <= self.seen:
            raise ConfigError(f"crop: seen={seen} must lie between the {self.evicted} forgotten and the {self.seen} seen tokens.")
        kept = seen - self.evicted
        return replace(self, keys=self.keys[:, :, :kept, :], values=self.values[:, :, :kept, :])

    def reorder(self, sequences: Int[A, " batch_new"], /) -> Self:
        """Pick sequences, as beam search does.

        Args:
            sequences: which sequence goes on in each place.

        Returns:
            The cache of those sequences.
        """
        xp = backend_of(self.keys)
        return replace(self, keys=xp.take(self.keys, sequences, axis=0), values=xp.take(self.values, sequences, axis=0))

    def evict(self, window: int, /) -> Self:
        """Forget all but the latest tokens; the positions of those go on.

        Args:
            window: how many tokens to keep.

        Returns:
            The shorter cache.

        Raises:
            ConfigError: the window is negative.
        """
        if window < 0:
            raise ConfigError(f"evict: window={window} must count tokens.")
        gone = max(0, int(self.keys.shape[2]) - window)
        return replace(self, keys=self.keys[:, :, gone:, :], values=self.values[:, :, gone:, :], evicted=self.evicted + gone)
