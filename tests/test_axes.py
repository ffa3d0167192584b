"""Annotations read as data: the parser against jaxtyping's own, and shapes of any annotated function."""

import random
import re
from dataclasses import dataclass

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Bool, Float, Int

from attnspec import ConfigError, multi_head_attention
from attnspec.bookkeeping import evaluate, parse, shape_of, shapes_of

NAMES = ["batch", "h", "seq_q", "d_k", "x1", "_foo", "_"]
EXPRESSIONS = ["h*d_k", "n-1", "2*n", "min(a,b)", "(a+b)//2", "{h}", "{h}+1"]
MARKS = ["", "", "", "#", "*", "_", "?", "#*", "*#", "_*", "*_", "#_", "##", "**", "#?", "_?"]


def random_word(rng: random.Random) -> str:
    core = rng.choice([*NAMES, *EXPRESSIONS, str(rng.randrange(9)), "-1", ""])
    label = rng.choice(["", "", "", "rows=", "_rows="])
    word = rng.choice(MARKS) + label + core
    return rng.choice([word, word, word, "...", "*...", word + "#", "a,b"]) if rng.random() < 0.2 else word


def as_jaxtyping_reads(text):
    """Jaxtyping's private reading, in this test alone; a change there must fail here and nowhere else."""
    hint = Float[np.ndarray, text]
    names = {"_NamedDim": "name", "_NamedVariadicDim": "name", "_FixedDim": "size", "_SymbolicDim": "elem"}
    read = []
    for dim in hint.dims:
        kind = type(dim).__name__
        if kind in names:
            read.append((str(getattr(dim, names[kind])), dim.broadcastable, "Variadic" in kind, getattr(dim, "treepath", False)))
        else:
            read.append(("anonymous", False, "variadic" in repr(dim) or dim is jaxtyping._array_types._anonymous_variadic_dim, False))
    return read


def as_we_read(text):
    return [
        ("anonymous", False, axis.variadic, False) if axis.anonymous else (axis.text, axis.broadcast, axis.variadic, axis.per_leaf)
        for axis in parse(text)
    ]


def test_the_parser_reads_what_jaxtyping_reads():
    rng = random.Random(0)  # noqa: S311
    agreed, refused = 0, 0
    for _ in range(10_000):
        text = " ".join(filter(None, (random_word(rng) for _ in range(rng.randrange(1, 5)))))
        try:
            wanted = as_jaxtyping_reads(text)
        except ValueError:
            refused += 1
            with pytest.raises(ConfigError):
                parse(text)
        else:
            agreed += 1
            assert as_we_read(text) == wanted, text
    assert agreed > 1000
    assert refused > 1000


def test_labels_and_anonymous_names_survive():
    rows, foo = parse("rows=4 _foo")
    assert (rows.label, rows.text, foo.text, foo.anonymous) == ("rows", "4", "foo", True)


@given(st.lists(st.sampled_from(["batch", "#h", "*rest", "4", "rows=4", "h*d_k", "_x", "...", "?leaf"]), max_size=5))
def test_a_parsed_shape_writes_itself_as_it_was_read(words):
    text = " ".join(words)
    if sum(word.startswith(("*", "...")) for word in words) <= 1:
        assert " ".join(map(str, parse(text))) == text


def test_two_lists_of_axes_are_refused():
    with pytest.raises(ConfigError, match=re.escape("the shape '*a *b' is malformed: at most one axis can stand for several")):
        parse("*a *b")


def test_sizes_of_expressions():
    sizes = {"h": 3, "d_v": 13}
    assert evaluate("h*d_v", sizes) == 39
    assert evaluate("4", {}) == 4
    assert evaluate("2*(h*d_v)", {"h*d_v": 5}) == 10
    with pytest.raises(ConfigError, match=re.escape("h*d_w cannot be worked out: d_w is not among h, d_v")):
        evaluate("h*d_w", sizes)


def test_shapes_of_a_function_that_is_not_ours():
    @dataclass
    class Pair:
        left: Float[np.ndarray, "rows cols"]

    def strange(
        x: Float[np.ndarray | torch.Tensor, "*batch n"], pair: Pair, y: "Int[np.ndarray, ' n'] | Bool[np.ndarray, 'n n'] | None" = None
    ) -> tuple[Float[np.ndarray, " n"], int, Float[np.ndarray, "n 2*n"]]: ...

    strange.__annotations__["pair"] = Pair
    shapes = {name: [str(shape) for shape in found] for name, found in shapes_of(strange).items()}
    assert shapes == {"x": ["*batch n"], "pair.left": ["rows cols"], "y": ["n", "n n"], "return[0]": ["n"], "return[2]": ["n 2*n"]}
    assert [shape.kind for shape in shapes_of(strange)["y"]] == ["Int", "Bool"]


def test_an_annotation_that_names_nothing_is_loud():
    def wrong(x: "Float[Nowhere, 'a b']"): ...

    with pytest.raises(NameError, match="Nowhere"):
        shapes_of(wrong)


def test_shapes_of_the_layer_include_its_parameters():
    shapes = {name: str(shape) for name, (shape,) in shapes_of(multi_head_attention).items()}
    assert shapes["x"] == "batch seq_q d_model"
    assert shapes["parameters.w_o"] == "h*d_v d_model"
    assert shapes["keep"] == "#batch #h #seq_q seq_k"
    assert shapes["return"] == "batch seq_q d_model"


def test_shape_of_one_annotation():
    shape = shape_of(Float[np.ndarray, "batch h*d_v"])
    assert (str(shape), shape.kind, shape.axes[1].names) == ("batch h*d_v", "Float", {"h", "d_v"})
