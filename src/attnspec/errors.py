"""What can go wrong, each with a call that makes it happen."""


class AttnspecError(Exception):
    """Anything that attnspec refuses; catch it to catch them all."""


class ShapeError(AttnspecError, TypeError):
    """An array's shape contradicts another argument, a setting or the annotation.

    Examples:
        >>> import numpy as np, attnspec
        >>> attnspec.score(np.ones((2, 3, 5, 7)), np.ones((2, 3, 11, 6)))
        Traceback (most recent call last):
            ...
        attnspec.errors.ShapeError: score: keys (2, 3, 11, 6) has d_k=6, but d_k=7 was set by queries (2, 3, 5, 7).
    """


class DtypeError(AttnspecError, TypeError):
    """An array holds another kind of number than the step works on, or two arrays differ in it.

    Examples:
        >>> import numpy as np, attnspec
        >>> attnspec.score(np.ones((2, 3, 5, 7), int), np.ones((2, 3, 11, 7)))
        Traceback (most recent call last):
            ...
        attnspec.errors.DtypeError: score: queries is int64, but must be floating-point.
    """


class BackendError(AttnspecError, TypeError):
    """Arrays of two libraries or two devices meet in one call, or something is no array at all.

    Examples:
        >>> import numpy as np, attnspec
        >>> attnspec.score([[1.0]], np.ones((2, 3, 11, 7)))
        Traceback (most recent call last):
            ...
        attnspec.errors.BackendError: score: queries is a list, but must be an array (of NumPy, PyTorch or another array-API library).
    """


class ConfigError(AttnspecError, ValueError):
    """A setting is impossible, or two of them exclude each other.

    Examples:
        >>> import attnspec
        >>> attnspec.Heads(d_model=512, h=7)
        Traceback (most recent call last):
            ...
        attnspec.errors.ConfigError: Heads: h=7 does not divide d_model=512; h=4 and h=8 would, or give d_k.
    """
