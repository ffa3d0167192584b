"""Which problems are put: drawn from a seed, so that every pair of what an implementation can be asked for is asked for."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, count
from typing import Any

import numpy as np

from ..spec.parameters import Heads, Parameters
from ..spec.policy import Policy
from .options import OPTIONS
from .problem import Array, Problem

PRIMES = (5, 7, 11, 13, 17, 19, 23)
TOKENS = ("wide", "square", "tall", "one query", "self")
"""How many queries there are beside the keys: fewer, as many, more, one alone; or they are the same tokens."""

SQUARE = ("square", "self")

Choice = Mapping[str, str]
"""A way to draw each option that is asked for, and `tokens`."""


@dataclass(frozen=True)
class Profile:
    """What can be asked of an implementation.

    Attributes:
        policy: the conventions that it declares.
        options: the names of the options that it has.
        causal: whether causality is built in.
        template: parameters of the shapes that a layer stores; None where attention alone is asked for.
        heads: sizes of attention alone, one after the other.
        tokens: the ways in which queries and keys may differ in number.
        sources: how many different inputs it takes: 1, 2 (values come with the keys) or 3.
        draws: the ways to draw an option that it takes, where these are not all.
        fixed: the parameters that are not drawn.
        always: the masks, or the bias, that it cannot do without; where none is asked for, one is given that drops nothing.
    """

    policy: Policy = field(default_factory=Policy)
    options: tuple[str, ...] = ()
    causal: bool = False
    template: Parameters[Any] | None = None
    heads: tuple[Heads, ...] = ()
    tokens: tuple[str, ...] = TOKENS
    sources: int = 3
    draws: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    always: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of heads that come first."""
        heads = self.heads[0] if self.template is None else self.template.heads
        return {name: int(size) for name, size in vars(heads).items()}

    @property
    def factors(self) -> dict[str, tuple[str, ...]]:
        """What can be chosen, and from what; an empty word is for not at all."""
        options = {name: ("", *self.draws.get(name, tuple(OPTIONS[name].draws))) for name in self.options}
        return {"tokens": self.tokens, **options}

    def allows(self, choice: Choice) -> bool:
        """Tell whether a choice makes sense."""
        asked = {name for name, word in choice.items() if word and name in OPTIONS}
        causal = {"causal"} if self.causal else set()
        square = choice.get("tokens", "square") in ("square", "self")
        return all(
            (square or not OPTIONS[name].square)
            and (self.sources < 2 or self.template is None or choice.get("tokens", "self") == "self" or not OPTIONS[name].square)
            and asked | causal >= set(OPTIONS[name].needs)
            and not asked & set(OPTIONS[name].excludes)
            and not (self.policy.empty_row == "any" and choice[name] == "with an empty one")
            for name in asked
        )


def choices(profile: Profile, /) -> list[Choice]:
    """Choose what to ask for: nothing, each option by itself in every way, and every pair of ways once."""
    factors = profile.factors
    first = profile.tokens[0]
    alone = [{"tokens": tokens} for tokens in profile.tokens]
    for name, words in factors.items():
        for word in words[1:] if name != "tokens" else ():
            needed = {other: next(iter(OPTIONS[other].draws)) for other in OPTIONS[name].needs if other in factors}
            alone += [{"tokens": tokens, **needed, name: word} for tokens in dict.fromkeys((first, *SQUARE)) if tokens in profile.tokens]
    pairs = pairwise(factors, profile.allows)
    return _distinct(choice for choice in [*alone, *pairs] if profile.allows(choice))


def _distinct(found: Iterable[Choice]) -> list[Choice]:
    return list(
        {tuple(sorted((n, w) for n, w in choice.items() if w)): {n: w for n, w in choice.items() if w} for choice in found}.values()
    )


def pairwise(factors: Mapping[str, tuple[str, ...]], allows: Any, /) -> Iterator[dict[str, str]]:
    """Cover every allowed pair of values of two factors, greedily."""
    rng = np.random.default_rng(0)
    left = {pair for a, b in combinations(factors, 2) for v in factors[a] for w in factors[b] if (pair := frozenset({(a, v), (b, w)}))}
    while left:
        row = dict(sorted(min(left, key=sorted)))
        left.discard(frozenset(row.items()))
        if not allows(row) and not _mended(row, factors, allows):
            continue
        for name in sorted(factors.keys() - row.keys(), key=lambda _: rng.random()):
            gains = {word: sum(frozenset({(name, word), item}) in left for item in row.items()) for word in factors[name]}
            allowed = [word for word in factors[name] if allows({**row, name: word})]
            if allowed:
                row[name] = max(allowed, key=lambda word: gains[word])  # it is used at once
        left -= {frozenset(pair) for pair in combinations(row.items(), 2)}
        yield row


def _mended(row: dict[str, str], factors: Mapping[str, tuple[str, ...]], allows: Any) -> bool:
    """Add what the options of a row need; tell whether it is allowed then."""
    for name in [name for name, word in row.items() if word and name in OPTIONS]:
        row |= {needed: factors[needed][-1] for needed in OPTIONS[name].needs if needed in factors and not row.get(needed)}
    return bool(allows(row))


def draw(profile: Profile, choice: Choice, /, *, seed: int, spread: float = 1.0, sizes: Mapping[str, int] | None = None) -> Problem:
    """Draw the problem of a choice.

    Args:
        profile: what the implementation can be asked for.
        choice: what is asked for.
        seed: which draw.
        spread: the standard deviation of the scaled scores.
        sizes: sizes that differ from those that would be chosen.

    Returns:
        The problem.
    """
    rng = np.random.default_rng([seed, *map(ord, "".join(sorted(choice.values())))])
    sizes = {**_sizes(profile, choice, seed), **(sizes or {})}
    asked = {name: OPTIONS[name].draws[word](rng, sizes) for name, word in choice.items() if name in OPTIONS}
    asked = {name: _neutral(name, sizes) for name in profile.always} | asked
    if "survivors" in asked:
        asked["dropout"] = 0.3
    problem = _core(profile, sizes, rng) if profile.template is None else _layer(profile, choice, sizes, rng)
    problem = replace(problem, options=asked, policy=profile.policy, causal=profile.causal, seed=seed, spread=spread)
    return spread_out(problem, spread)


def _neutral(name: str, sizes: Mapping[str, int]) -> Array:
    """Make a mask that drops nothing, or a bias of zeros."""
    batch, h, seq_q, seq_k = (sizes[axis] for axis in ("batch", "h", "seq_q", "seq_k"))
    if name == "bias":
        return np.zeros((batch, h, seq_q, seq_k))
    if name == "lengths":
        return np.full(batch, seq_k)
    return np.ones((batch, 1, seq_q, seq_k) if name == "keep" else (batch, seq_k), bool)


NEUTRAL = ("keep", "padding", "lengths", "bias")
"""What an implementation may be unable to do without."""


def _sizes(profile: Profile, choice: Choice, seed: int) -> dict[str, int]:
    heads = profile.template.heads if profile.template is not None else profile.heads[seed % len(profile.heads)]
    taken = set(vars(heads).values())
    few, more = [size for size in PRIMES if size not in taken][:2]
    batch = 1 if "cumulative" in choice else next(size for size in count(2) if size not in taken)
    unequal = {"wide": (few, more), "tall": (more, few), "one query": (1, few)}
    seq_q, seq_k = unequal.get(choice["tokens"], (few, few))
    return {"batch": batch, "seq_q": seq_q, "seq_k": seq_k, **vars(heads)}


def _core(profile: Profile, sizes: Mapping[str, int], rng: np.random.Generator) -> Problem:
    def tokens(h: str, seq: str, width: str) -> Array:
        return rng.normal(size=(sizes["batch"], sizes[h], sizes[seq], sizes[width]))

    return Problem(tokens("h", "seq_q", "d_k"), tokens("h_kv", "seq_k", "d_k"), tokens("h_kv", "seq_k", "d_v"), policy=profile.policy)


def _layer(profile: Profile, choice: Choice, sizes: Mapping[str, int], rng: np.random.Generator) -> Problem:
    heads = profile.template.heads  # type: ignore[union-attr]  # a layer has a template

    def tokens(seq: str, width: int) -> Array:
        return rng.normal(size=(sizes["batch"], sizes[seq], width))

    queries = keys = values = tokens("seq_q", heads.d_model)
    if profile.sources > 1 and choice["tokens"] != "self":
        keys = values = tokens("seq_k", heads.d_key_in)
    if profile.sources > 2 and keys is not queries:
        values = tokens("seq_k", heads.d_value_in)
    return Problem(queries, keys, values, redraw(profile.template, rng, profile.fixed), policy=profile.policy)  # type: ignore[arg-type]


def redraw(template: Parameters[Any], rng: np.random.Generator, fixed: frozenset[str] = frozenset(), /) -> Parameters[Array]:
    """Draw parameters of the same shapes, biases included, but for those that are fixed."""
    drawn = {name: getattr(template, name) for name in fixed}
    for name, array in vars(template).items():
        if array is not None and name not in fixed:
            spread = array.shape[-2] ** -0.5 if name.startswith("w_") else 0.5
            drawn[name] = rng.normal(1.0 if name.startswith("gain_") else 0.0, spread, array.shape)
    return Parameters(**drawn)


def spread_out(problem: Problem, spread: float, /) -> Problem:
    """Scale queries, or the weights that make them, so that the scaled scores have this standard deviation."""
    plain = replace(
        problem, options={n: v for n, v in problem.options.items() if n in ("scale", "positions", "offset")}, policy=problem.policy
    )
    _, steps = plain.traced()
    found = float(np.std(steps["scale"].result))
    factor = spread / found if found > 0 and np.isfinite(found) else 1.0
    if problem.parameters is None:
        return replace(problem, queries=problem.queries * factor)
    parameters = problem.parameters
    if problem.policy.normalise is not None:
        return problem
    b_q = None if parameters.b_q is None else parameters.b_q * factor
    return replace(problem, parameters=replace(parameters, w_q=parameters.w_q * factor, b_q=b_q))
