"""A cache with room for tokens to come, so that a new token does not copy the old ones."""

import sys
from dataclasses import dataclass
from typing import Any, Self

from ..arrays import A, backend_of, library_of
from ..spec.cache import Cache
from ..step import is_compiling, is_watched

_LEAST_ROOM = 32


@dataclass
class _Room:
    """Arrays with room for more tokens, how many places are taken, and what all their tokens have in common."""

    keys: Any
    values: Any
    taken: int
    kind: tuple[Any, ...]


class GrowingCache(Cache[A]):
    """A `Cache` that writes new tokens behind the old ones while there is room, and doubles the room when there is none.

    It never changes what an earlier cache holds: of two caches that go on from the same moment, the second copies.
    Where gradients are recorded it joins arrays, as `Cache` does.
    """

    _room: _Room | None = None

    @classmethod
    def empty(cls, keys: A, values: A, /) -> Self:
        """Start with no token.

        Args:
            keys: an array with room for as many tokens as are expected.
            values: the same for the values.

        Returns:
            The cache.
        """
        return cls._of(_Room(keys, values, 0, kind_of(keys, values)), evicted=0, taken=0)

    @classmethod
    def _of(cls, room: _Room, *, evicted: int, taken: int) -> Self:
        cache = object.__new__(cls)  # what a room holds was checked when it was made
        vars(cache).update(keys=room.keys[:, :, :taken], values=room.values[:, :, :taken], evicted=evicted, _room=room)
        return cache

    def append(self, keys: Any, values: Any, /) -> Self:
        """Add the keys and values of new tokens.

        Args:
            keys: their keys.
            values: their values.

        Returns:
            The longer cache.

        Raises:
            ShapeError: they do not fit those of the tokens before.
        """
        past, total = self.keys.shape[2], self.keys.shape[2] + keys.shape[2]
        if is_compiling() or is_watched() or _records(keys, values, self.keys) or kind_of(keys, values) != self.kind:
            return super().append(keys, values)  # the step says what does not fit
        room = self._room
        if room is None or room.taken != past or total > room.keys.shape[2]:
            more = max(total, _LEAST_ROOM)
            room = _Room(_widened(self.keys, more), _widened(self.values, more), past, self.kind)
        room.keys[:, :, past:total], room.values[:, :, past:total] = keys, values
        room.taken = total
        return self._of(room, evicted=self.evicted, taken=total)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What all its tokens have in common."""
        return kind_of(self.keys, self.values) if self._room is None else self._room.kind


def kind_of(keys: Any, values: Any, /) -> tuple[Any, ...]:
    """Tell what the tokens of one cache have in common.

    Args:
        keys: their keys.
        values: their values.

    Returns:
        All that shows in their arrays but how many they are.
    """
    return tuple((type(row), row.dtype, row.device, row.shape[:2], row.shape[3]) for row in (keys, values))


def _widened(old: A, more: int) -> A:
    """Copy the old tokens in front of room for more new ones."""
    return backend_of(old).concat((old, _blank(old, more)), axis=2)


def _blank(like: Any, places: int) -> Any:
    shape = (*like.shape[:2], places, like.shape[3])
    return like.new_empty(shape) if library_of(like) == "torch" else type(like)(shape, like.dtype)


def _records(*arrays: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.is_grad_enabled() and any(getattr(array, "requires_grad", False) for array in arrays)
