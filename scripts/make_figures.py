"""Write the pictures that stand outside of the built documentation, for the README: `python scripts/make_figures.py`."""  # noqa: INP001

from pathlib import Path

from attnspec.bookkeeping.figures import chain_figure
from attnspec.bookkeeping.svg import standalone

(Path(__file__).parents[1] / "docs" / "assets" / "chain.svg").write_text(standalone(chain_figure()))
