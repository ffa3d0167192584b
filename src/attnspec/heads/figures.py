"""Pictures of what heads look at and of masks, as SVG that follows light and dark mode."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from ..bookkeeping.svg import document, grid

_NOTHING = 0.005


def heatmap(weights: Float[np.ndarray, "_rows _columns"], rows: Sequence[str], columns: Sequence[str], /, *, title: str) -> str:
    """Draw weights as cells, the deeper the larger, with the number in each.

    Args:
        weights: the shares of each row.
        rows: who shares: words, or heads.
        columns: the words that get a share.
        title: what it is; pictures on one page differ in it.

    Returns:
        The picture as SVG.
    """
    most = "; ".join(f"{row}: {columns[shares.argmax()]} {shares.max():.2f}" for row, shares in zip(rows, weights, strict=True))
    cells = grid(weights, rows, columns, write=lambda share: f"{share:.2f}" if share >= _NOTHING else "·")
    return document(cells, title, f"The largest share of each row. {most}.")


def mask_grid(keep: Bool[np.ndarray, "seq_q seq_k"], rows: Sequence[str], columns: Sequence[str], /, *, title: str) -> str:
    """Draw a mask as cells: a tick where the query may attend to the key.

    Args:
        keep: the mask.
        rows: the queries.
        columns: the keys.
        title: what it is; pictures on one page differ in it.

    Returns:
        The picture as SVG.
    """
    kept = "; ".join(f"{row}: {', '.join(np.array(columns)[seen]) or 'none'}" for row, seen in zip(rows, keep, strict=True))
    return document(grid(keep, rows, columns, write=lambda one: "✓" if one else "·"), title, f"The keys of each query. {kept}.")
