"""The publications that docstrings name, in full."""

import re
from dataclasses import dataclass

from .blocks import block


@dataclass(frozen=True)
class Source:
    """A publication.

    Attributes:
        called: what docstrings call it: its authors, or its name.
        year: when it came out.
        full: authors, title and where it can be found.
    """

    called: str
    year: int
    full: str

    @property
    def anchor(self) -> str:
        """Its anchor on the page of sources."""
        return f"source-{re.sub(r'[^a-z0-9]+', '-', self.called.lower()).strip('-')}-{self.year}"

    @property
    def pattern(self) -> re.Pattern[str]:
        """Its name in a text: `Su et al. (2021)` or `(Su et al., 2021`."""
        return re.compile(re.escape(self.called).replace(r"\ ", r"\s+") + rf"(?:\s+\({self.year}\)|,\s+{self.year})")


SOURCES = (
    Source(
        "Ainslie et al.",
        2023,
        "J. Ainslie, J. Lee-Thorp, M. de Jong, Y. Zemlyanskiy, F. Lebrón, S. Sanghai: *GQA: training generalized multi-query transformer "
        "models from multi-head checkpoints*. EMNLP 2023, arXiv:2305.13245.",
    ),
    Source("Ba et al.", 2016, "J. L. Ba, J. R. Kiros, G. E. Hinton: *Layer normalization*. arXiv:1607.06450."),
    Source(
        "Blanchard, Higham and Higham",
        2021,
        "P. Blanchard, D. J. Higham, N. J. Higham: *Accurately computing the log-sum-exp and softmax functions*. IMA Journal of Numerical "
        "Analysis 41 (4).",
    ),
    Source("Gemma 2", 2024, "Gemma Team: *Gemma 2: improving open language models at a practical size*. arXiv:2408.00118."),
    Source("gpt-oss", 2025, "OpenAI: *gpt-oss-120b & gpt-oss-20b model card*. arXiv:2508.10925."),
    Source(
        "Henry et al.",
        2020,
        "A. Henry, P. R. Dachapally, S. Pawar, Y. Chen: *Query-key normalization for transformers*. Findings of EMNLP 2020, "
        "arXiv:2010.04245.",
    ),
    Source(
        "Michel, Levy and Neubig",
        2019,
        "P. Michel, O. Levy, G. Neubig: *Are sixteen heads really better than one?* NeurIPS 2019, arXiv:1905.10650.",
    ),
    Source(
        "Press et al.",
        2022,
        "O. Press, N. A. Smith, M. Lewis: *Train short, test long: attention with linear biases enables input length extrapolation*. "
        "ICLR 2022, arXiv:2108.12409.",
    ),
    Source(
        "Raffel et al.",
        2020,
        "C. Raffel, N. Shazeer, A. Roberts, K. Lee, S. Narang, M. Matena, Y. Zhou, W. Li, P. J. Liu: *Exploring the limits of transfer "
        "learning with a unified text-to-text transformer*. JMLR 21 (140), arXiv:1910.10683.",
    ),
    Source(
        "Srivastava et al.",
        2014,
        "N. Srivastava, G. Hinton, A. Krizhevsky, I. Sutskever, R. Salakhutdinov: *Dropout: a simple way to prevent neural networks from "
        "overfitting*. JMLR 15.",
    ),
    Source(
        "Su et al.",
        2021,
        "J. Su, Y. Lu, S. Pan, A. Murtadha, B. Wen, Y. Liu: *RoFormer: enhanced transformer with rotary position embedding*. "
        "arXiv:2104.09864.",
    ),
    Source(
        "Vaswani et al.",
        2017,
        "A. Vaswani, N. Shazeer, N. Parmar, J. Uszkoreit, L. Jones, A. N. Gomez, Ł. Kaiser, I. Polosukhin: *Attention is all you need*. "
        "NeurIPS 2017, arXiv:1706.03762.",
    ),
    Source("Zhang and Sennrich", 2019, "B. Zhang, R. Sennrich: *Root mean square layer normalization*. NeurIPS 2019, arXiv:1910.07467."),
)

_YEAR = re.compile(r"(?:\(|, ?\s*)(?:19|20)\d\d\b")


def cited_in(text: str, /) -> list[Source]:
    """The publications that a text names.

    Args:
        text: a docstring.

    Returns:
        Each of them once, in the order of the sources.

    Raises:
        ValueError: it names one that is not among the sources.
    """
    found = {source: source.pattern.findall(text) for source in SOURCES}
    if sum(map(len, found.values())) != len(_YEAR.findall(text)):
        raise ValueError(f"names a publication that is not in attnspec_docs.sources: {text}")
    return [source for source, places in found.items() if places]


def linked(text: str, /) -> str:
    """Turn the names of publications into references to the page of sources."""
    for source in cited_in(text):
        text = source.pattern.sub(rf"[\g<0>][{source.anchor}]", text)
    return text


@block
def sources() -> str:
    """Every publication, in full, under an anchor of its own."""
    return "\n\n".join(f"### {source.called} ({source.year}) {{ #{source.anchor} }}\n\n{source.full}" for source in SOURCES)
