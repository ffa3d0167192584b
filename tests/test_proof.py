"""The proof that the chain fits, and the books: both read from the annotations, so wrong annotations must break them."""

import functools

import numpy as np
import pytest
import sympy
import torch
from jaxtyping import Float
from torch.utils.flop_counter import FlopCounterMode

import attnspec
from attnspec import Policy, Rotation, ShapeError
from attnspec.arrays import A
from attnspec.axes import evaluate
from attnspec.bookkeeping import ledger_of, prove
from attnspec.bookkeeping.export import formulas
from attnspec.bookkeeping.ledger import Cell
from attnspec.spec import chain
from attnspec.step import step, step_of

SIZES = [(2, 5, 11, 17, 6, 3, 7, 13, 19, 23), (3, 7, 2, 13, 10, 5, 11, 17, 29, 31), (5, 3, 13, 7, 4, 4, 11, 2, 17, 19)]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_chain_fits_for_all_sizes(grouped, bias):
    proof = prove(grouped=grouped, bias=bias)
    names = [call.step.name for call in proof.calls]
    assert names[0] == "project_queries"
    assert names[-1] == "mix"
    assert ("share_keys" in names) == grouped
    assert any(link.argument == "b_o" for link in proof.links) == bias
    assert proof.calls[-1].result.shape == proof.calls[0].arguments["x"].shape
    steps_taken = {(link.source, link.target) for link in proof.links}
    assert {("softmax", "blend"), ("blend", "concatenate"), ("concatenate", "mix"), ("mask", "softmax")} <= steps_taken


def test_concatenated_heads_are_as_wide_as_the_mixing_matrix_is_high():
    h, d_v = sympy.Symbol("h", integer=True, positive=True), sympy.Symbol("d_v", integer=True, positive=True)
    (link,) = [link for link in prove().links if link.argument == "concatenated"]
    assert link.shape[-1] == h * d_v
    (w_o,) = [link for link in prove().links if link.argument == "w_o"]
    assert w_o.shape[0] == h * d_v


ANNOTATIONS = {
    "blend": {"weights": "batch h seq_q seq_k", "values": "batch h seq_k d_v", "return": "batch h seq_k d_v"},
    "concatenate": {"blended": "batch h seq_q d_v", "return": "batch seq_q h+d_v"},
    "score": {"queries": "batch h seq_q d_k", "keys": "batch h seq_k d_k", "return": "batch h seq_k seq_q"},
    "softmax": {"scores": "batch seq_q h seq_k", "return": "batch seq_q h seq_k"},  # consistent, but under wrong names
}


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_a_wrong_annotation_breaks_the_proof(name, monkeypatch):
    function = getattr(attnspec, name).__wrapped__
    monkeypatch.setattr(function, "__annotations__", {argument: Float[A, text] for argument, text in ANNOTATIONS[name].items()})
    monkeypatch.setattr("attnspec.step._steps", dict(attnspec.step._steps))
    monkeypatch.setattr(chain, name, step("attend", equation="")(function))
    with pytest.raises(ShapeError):
        prove()


def test_the_chain_fits_with_every_optional_step():
    everything = Policy(rotation=Rotation(), normalise="rms", cap=3.0, window=(2, None))
    proof = prove(causal=True, present=("gain_q", "gain_k", "sinks", "gates", "bias"), policy=everything)
    names = [call.step.name for call in proof.calls]
    assert {"normalise", "rotate", "keep_causal", "keep_window", "keep_both", "cap", "bias", "gate"} <= set(names)
    assert names.index("scale") < names.index("cap") < names.index("bias") < names.index("mask") < names.index("softmax")


@pytest.mark.parametrize("sizes", SIZES)
def test_the_declared_cost_is_what_the_flop_counter_counts(sizes):
    batch, seq, seq_k, d_model, h, h_kv, d_k, d_v, d_key_in, d_value_in = sizes
    heads = attnspec.Heads(d_model=d_model, h=h, h_kv=h_kv, d_k=d_k, d_v=d_v, d_key_in=d_key_in, d_value_in=d_value_in)
    parameters = attnspec.Parameters.random(heads).to_torch()
    counted = {}

    def counting(name):
        raw = getattr(attnspec, name).__wrapped__

        @functools.wraps(raw)
        def count(*args, **kwargs):
            with FlopCounterMode(display=False) as counter:
                result = raw(*args, **kwargs)
            counted[name] = counter.get_total_flops()
            return result

        return count

    x, context, context_v = (torch.ones(batch, n, d) for n, d in ((seq, d_model), (seq_k, d_key_in), (seq_k, d_value_in)))
    options = {"context": context.double(), "context_v": context_v.double(), "keep": torch.ones(batch, 1, seq, seq_k, dtype=torch.bool)}
    with attnspec.substitute(**{name: counting(name) for name in attnspec.step._steps}):
        attnspec.multi_head_attention(x.double(), parameters, causal=True, **options)
    books = attnspec.ledger(heads, batch=batch, seq=seq, seq_k=seq_k)
    assert counted.keys() >= books.keys()
    assert {name: count for name, count in counted.items() if count} == {
        name: 2 * line.multiply_adds for name, line in books.items() if line.multiply_adds
    }


def test_the_ledger_of_sizes_is_the_ledger_of_a_real_run():
    heads = attnspec.Heads(d_model=17, h=6, h_kv=3, d_k=7, d_v=13, d_key_in=19, d_value_in=23)
    rng = np.random.default_rng(0)
    shapes = {"context": (2, 11, 19), "context_v": (2, 11, 23)}
    contexts = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    with attnspec.trace() as steps:
        attnspec.multi_head_attention(
            rng.normal(size=(2, 5, 17)), attnspec.Parameters.random(heads), keep=np.ones((2, 6, 5, 11), bool), **contexts
        )
    assert ledger_of(steps) == attnspec.ledger(heads, batch=2, seq=5, seq_k=11, dtype="float64")


@pytest.mark.parametrize("sizes", [{"h": 6}, {"h": 6, "h_kv": 2, "d_k": 5, "d_v": 7}])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_exported_formulas_give_the_ledger(sizes, bias, causal):
    heads = attnspec.Heads(d_model=66, **sizes)
    books = attnspec.ledger(heads, batch=3, seq=13, seq_k=17, bias=bias, causal=causal, dtype="float16")
    given, data = {**vars(heads), "batch": 3, "seq_q": 13, "seq_k": 17}, formulas()

    def cell(exported):
        shape = tuple(evaluate(size, given) for size in exported["shape"])
        return Cell(exported["axes"], shape, exported["dtype"] or "float16")

    chain = data["chains"][f"{heads.h != heads.h_kv:d}{bias:d}{causal:d}"]
    assert [(line["step"], line["stage"]) for line in chain] == [(line.step, line.stage) for line in books.lines]
    for exported, line in zip(chain, books.lines, strict=True):
        assert {name: cell(one) for name, one in exported["arguments"].items()} == line.arguments
        assert cell(exported["result"]) == line.result
        assert {name: evaluate(exported[name], given) for name in ("parameters", "multiply_adds")} == {
            "parameters": line.parameters,
            "multiply_adds": line.multiply_adds,
        }
        assert line.bytes == line.result.size * data["dtypes"][line.result.dtype]


def test_the_books_of_a_known_layer():
    books = attnspec.ledger(attnspec.Heads(d_model=512, h=8), batch=2, seq=6)
    assert books.parameters == 4 * (512 * 512 + 512)  # four projections with biases
    assert books["score"].multiply_adds == 2 * 8 * 6 * 6 * 64
    assert books["project_queries"].result.axes == ("batch", "h", "seq_q", "d_k")
    assert books["project_queries"].result.shape == (2, 8, 6, 64)
    assert books["mask"].arguments["keep"].bytes == 2 * 8 * 6 * 6
    assert books["softmax"].bytes == 4 * 2 * 8 * 6 * 6
    assert books.to_dict()["totals"] == {
        "parameters": books.parameters,
        "multiply_adds": books.multiply_adds,
        "bytes": sum(line.bytes for line in books.values()),
    }


def test_many_heads_spend_the_budget_of_one():
    heads = attnspec.Heads(d_model=512, h=8)
    many, one = (attnspec.ledger(sizes, batch=2, seq=6) for sizes in (heads, heads.merged()))
    assert (many.parameters, many.multiply_adds) == (one.parameters, one.multiply_adds)
    assert step_of(attnspec.score).multiply_adds == "batch*h*seq_q*seq_k*d_k"
