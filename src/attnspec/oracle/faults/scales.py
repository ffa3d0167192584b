"""Faults of the factor of the scores."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..problem import Array, Problem
from .fault import Fault, asks

FACTORS: Mapping[str, tuple[str, Callable[..., float]]] = {
    "1/sqrt(d_model)": ("scale_wrong_dim", lambda s: s.get("d_model", math.nan) ** -0.5),
    "1/sqrt(h * d_k)": ("scale_wrong_dim", lambda s: (s["h"] * s["d_k"]) ** -0.5),
    "1/sqrt(h)": ("scale_wrong_dim", lambda s: s["h"] ** -0.5),
    "1/sqrt(h_kv)": ("scale_wrong_dim", lambda s: s["h_kv"] ** -0.5),
    "1/sqrt(d_v)": ("scale_wrong_dim", lambda s: s["d_v"] ** -0.5),
    "1/sqrt(h * d_v)": ("scale_wrong_dim", lambda s: (s["h"] * s["d_v"]) ** -0.5),
    "1/sqrt(d_model / h)": ("scale_wrong_dim", lambda s: (s.get("d_model", math.nan) / s["h"]) ** -0.5),
    "1/sqrt(d_model // h)": ("scale_wrong_dim", lambda s: max(1, s.get("d_model", 0) // s["h"]) ** -0.5),
    "1/sqrt(seq_k)": ("scale_wrong_dim", lambda s: s["seq_k"] ** -0.5),
    "1/sqrt(seq_q)": ("scale_wrong_dim", lambda s: s["seq_q"] ** -0.5),
    "1/sqrt(batch)": ("scale_wrong_dim", lambda s: s["batch"] ** -0.5),
    "1/sqrt(d_k / 2)": ("scale_wrong_dim", lambda s: (s["d_k"] / 2) ** -0.5),
    "1/sqrt(2 * d_k)": ("scale_wrong_dim", lambda s: (s["d_k"] * 2) ** -0.5),
    "1/sqrt of d_k padded to a power of two": ("scale_wrong_dim", lambda s: 2.0 ** (-math.ceil(math.log2(s["d_k"])) / 2)),
    **{
        f"1/sqrt of d_k padded to a multiple of {n}": ("scale_wrong_dim", lambda s, n=n: (-(-s["d_k"] // n) * n) ** -0.5)
        for n in (4, 8, 16, 32, 64, 128)
    },
    "1: there is no scale": ("scale_missing_or_double", lambda _: 1.0),
    "1/d_k: it is applied twice, or its root is missing": ("scale_missing_or_double", lambda s: 1 / s["d_k"]),
    "sqrt(d_k): it multiplies where it should divide": ("scale_missing_or_double", lambda s: math.sqrt(s["d_k"])),
    "d_k": ("scale_missing_or_double", lambda s: float(s["d_k"])),
    "d_k ** -0.25": ("scale_missing_or_double", lambda s: s["d_k"] ** -0.25),
    "d_k ** -1.5": ("scale_missing_or_double", lambda s: s["d_k"] ** -1.5),
    "-1/sqrt(d_k): the scores have the wrong sign": ("scale_missing_or_double", lambda s: -(s["d_k"] ** -0.5)),
    "1/d_model": ("scale_wrong_dim", lambda s: 1 / s.get("d_model", math.nan)),
    "1/sqrt(d_k - 1)": ("scale_wrong_dim", lambda s: (s["d_k"] - 1) ** -0.5 if s["d_k"] > 1 else math.nan),
    "1/sqrt(d_k + 1)": ("scale_wrong_dim", lambda s: (s["d_k"] + 1) ** -0.5),
    "ln 2 / sqrt(d_k): powers of 2 stand where powers of e should": ("softmax_denominator", lambda s: math.log(2) * s["d_k"] ** -0.5),
    "log2(e) / sqrt(d_k)": ("softmax_denominator", lambda s: math.log2(math.e) * s["d_k"] ** -0.5),
}
"""Factors of the scores that are seen in place of 1/sqrt(d_k), in the sizes of a problem."""


def rescaled(problem: Problem, factor: float, /) -> Problem | None:
    """Solve the problem with another factor for the scores."""
    return problem.change(scale=float(factor)) if math.isfinite(factor) else None


def _has_default_scale(problem: Problem) -> bool:
    return "scale" not in problem.options and problem.policy.scale is None


def scale_faults() -> Iterator[Fault]:
    """Faults of the factor of the scores."""
    for name, (kind, factor) in FACTORS.items():
        yield Fault(
            kind, f"the scores are scaled by {name} instead of 1/sqrt(d_k)", change=lambda p, f=factor: rescaled(p, f(p.sizes)),
            applies=_has_default_scale, declare="policy=Policy(scale=...)", rank=_rank(name),
        )  # fmt: skip
    for text, change in (
        ("the scale that is given is ignored, 1/sqrt(d_k) is used", lambda p: p.change(scale=None)),
        ("the scale that is given is ignored, the scores are not scaled", lambda p: p.change(scale=1.0)),
        ("the scale that is given is applied on top of 1/sqrt(d_k)", lambda p: rescaled(p, p.options["scale"] * p.sizes["d_k"] ** -0.5)),
        ("the scores are divided by the scale that is given", lambda p: rescaled(p, 1 / p.options["scale"])),
        ("the scale that is given is applied twice", lambda p: rescaled(p, p.options["scale"] ** 2)),
        ("the square root of the scale that is given is applied", lambda p: rescaled(p, math.sqrt(abs(p.options["scale"])))),
    ):
        yield Fault("scale_option_ignored", text, change=change, applies=asks("scale"))
    ignored = "the declared factor of the scores is ignored"
    yield Fault("scale_option_ignored", f"{ignored}, 1/sqrt(d_k) is used", change=_rescaled_by_default, applies=_has_declared_scale)
    yield Fault(
        "scale_option_ignored", f"{ignored}, the scores are not scaled", change=lambda p: rescaled(p, 1.0), applies=_has_declared_scale
    )
    yield from _place_faults()


def _has_declared_scale(problem: Problem) -> bool:
    return "scale" not in problem.options and problem.policy.scale is not None


def _rescaled_by_default(problem: Problem) -> Problem | None:
    return rescaled(problem, problem.sizes["d_k"] ** -0.5)


def _place_faults() -> Iterator[Fault]:
    """The factor goes to something else than the scores, or to more."""
    place = "scale_wrong_place"
    yield Fault(place, "the weights are scaled, behind the softmax, and not the scores", steps=lambda p: _scale_behind(p, "softmax"))
    yield Fault(place, "what the heads found is scaled, and not the scores", steps=lambda p: _scale_behind(p, "blend"))
    yield Fault(place, "the weights are scaled too, behind the softmax", steps=lambda p: {"softmax": _times(factor_of(p))})
    text = "the bias is scaled together with the scores"
    yield Fault(place, text, steps=lambda p: {"bias": _scaled_bias(factor_of(p))}, applies=asks("bias", "slopes"))
    yield Fault(place, "the cap is applied before the scale", steps=_cap_before_scale, applies=has_cap)


def _rank(name: str) -> int:
    """Names that stand for the more usual mistake come first where two are the same number."""
    usual = ("1/sqrt(d_model)", "1/sqrt(h * d_k)", "1/sqrt(d_v)", "1: there is no scale")
    return 1 if name in usual else 2 + ("padded" in name)


def factor_of(problem: Problem, /) -> float:
    """Give the factor of the scores that a problem asks for."""
    given = problem.options.get("scale", problem.policy.scale)
    return float(problem.sizes["d_k"] ** -0.5 if given is None else given)


def _times(factor: float) -> Callable[..., Array]:
    return lambda step, *arrays, **options: step(*arrays, **options) * factor


def _scale_behind(problem: Problem, name: str) -> dict[str, Any]:
    return {"scale": lambda _, scores, **__: scores, name: _times(factor_of(problem))}


def _scaled_bias(factor: float) -> Callable[..., Array]:
    return lambda step, scores, addend: step(scores, addend * factor)


def has_cap(problem: Problem, /) -> bool:
    """Tell whether scores are capped."""
    return problem.effective_policy.cap is not None


def _cap_before_scale(problem: Problem) -> dict[str, Any]:
    factor = factor_of(problem)
    return {
        "scale": lambda _, scores, **__: scores,
        "cap": lambda step, scores, **options: step(scores, **options) * factor,
    }
