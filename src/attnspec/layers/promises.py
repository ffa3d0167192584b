"""What the call of a layer promises, as annotations, and the judge of its calls."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxtyping import Bool, Float

from ..arrays import A
from ..judge import judge
from ..signature import Signature
from ..spec.cache import Cache
from ..spec.parameters import Heads, Parameters
from ..spec.positions import Positions
from ..spec.rules import Mask
from ..step import is_known, remember

_FLOAT: Any = Float
_BOOL: Any = Bool


class Promise:
    """Annotations of a call that are worked out, not written down; each signature is judged once."""

    def __init__(self, name: str, hints: Mapping[str, Any], /) -> None:
        """Make the promise.

        Args:
            name: who makes it, in errors.
            hints: the annotations of the arguments, and of the result under `return`.
        """

        def call(**arguments: Any) -> Any:
            """Only its annotations are read."""

        call.__name__ = name
        call.__annotations__ = dict(hints)
        self.signature = Signature(call)
        self._known: dict[Any, None] = {}

    def holds_for(self, key: tuple[Any, ...], /) -> bool:
        """Tell whether a call of this signature has been judged."""
        return is_known(key, self._known)

    def judge(self, key: tuple[Any, ...], arguments: Mapping[str, Any], run: Callable[[], Any], /) -> None:
        """Run a call, and see that its arguments and its result are what was promised.

        Args:
            key: what the verdict depends on.
            arguments: the arguments by name.
            run: the call with these arguments.

        Raises:
            AttnspecError: what is wrong, and who set what it should be.
        """
        judge(self.signature, arguments, run, derive=False)
        remember(key, self._known)


def _of_layer(seq_k: str) -> Promise:
    """The call of a layer, whose queries see `seq_k` keys."""
    hints = {
        "layer": Heads,
        "parameters": Parameters,
        "cache": Cache | None,
        "x": _FLOAT[A, "batch seq_q d_model"],
        "context": _FLOAT[A, "batch seq_k d_key_in"] | None,
        "context_v": _FLOAT[A, "batch seq_k d_value_in"] | None,
        "keep": _BOOL[A, f"#batch #h #seq_q {seq_k}"] | Mask | None,
        "bias": _FLOAT[A, f"#batch #h #seq_q #{seq_k}"] | None,
        "causal": bool | None,
        "offset": int | None,
        "positions": Positions | None,
        "need": Literal["weights"] | None,
        "return": _FLOAT[A, "batch seq_q d_model"],
    }
    return Promise("MultiHeadAttention", hints)


SELF = _of_layer("seq_q")
CROSS = _of_layer("seq_k")
CACHED = _of_layer("past+seq_q")
