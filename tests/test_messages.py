"""What is refused, and what the refusal says: each test id is the call that a user would have written."""

import re

import numpy as np
import pytest
import torch

import attnspec
from attnspec import BackendError, ConfigError, DtypeError, ShapeError

BATCH, H, SEQ_Q, SEQ_K, D_K, D_V, D_MODEL = 2, 3, 5, 11, 7, 13, 17

rng = np.random.default_rng(0)
NAMES = {
    "np": np,
    "torch": torch,
    "attnspec": attnspec,
    "q": rng.normal(size=(BATCH, H, SEQ_Q, D_K)),
    "k": rng.normal(size=(BATCH, H, SEQ_K, D_K)),
    "v": rng.normal(size=(BATCH, H, SEQ_K, D_V)),
    "s": rng.normal(size=(BATCH, H, SEQ_Q, SEQ_K)),
    "keep": rng.random((BATCH, 1, SEQ_Q, SEQ_K)) < 0.5,
    "x": rng.normal(size=(BATCH, SEQ_Q, D_MODEL)),
    "c": rng.normal(size=(BATCH, SEQ_K, D_MODEL)),
    "square": rng.normal(size=(SEQ_Q, SEQ_Q, D_MODEL)),
    "p": attnspec.Parameters.random(attnspec.Heads(d_model=D_MODEL, h=H, d_k=D_K, d_v=D_V)),
    "heads": attnspec.Heads(d_model=D_MODEL, h=H, d_k=D_K, d_v=D_V),
    **{name: getattr(attnspec, name) for name in ("attend", "mask", "mix", "score", "multi_head_attention", "project_queries")},
}

# Every row of the table "what the user sees" that was measured on ten other projects: several of them accept it.
PEERS = {
    "query feature dim": ("multi_head_attention(x[..., :13], p)", "x (2, 5, 13) has d_model=13, but d_model=17 was set by parameters.w_q"),
    "key feature dim": (
        "multi_head_attention(x, p, context=c[..., :13])",
        "context (2, 11, 13) has d_key_in=13, but d_key_in=17 was set by parameters.w_k",
    ),
    "value feature dim": (
        "multi_head_attention(x, p, context=c, context_v=c[..., :13])",
        "context_v (2, 11, 13) has d_value_in=13, but d_value_in=17 was set by parameters.w_v",
    ),
    "longer keys than values": (
        "attend(q, k, v[:, :, :7])",
        "values (2, 3, 7, 13) has seq_k=7, but seq_k=11 was set by keys (2, 3, 11, 7)",
    ),
    "longer values than keys": (
        "attend(q, k[:, :, :7], v)",
        "values (2, 3, 11, 13) has seq_k=11, but seq_k=7 was set by keys (2, 3, 7, 7)",
    ),
    "longer context than context_v": (
        "multi_head_attention(x, p, context=c, context_v=c[:, :7])",
        "context_v (2, 7, 17) has seq_k=7, but seq_k=11 was set by context (2, 11, 17)",
    ),
    "batch 2 against 1": ("attend(q, k[:1], v[:1])", "keys (1, 3, 11, 7) has batch=1, but batch=2 was set by queries (2, 3, 5, 7)"),
    "batch 3 against 2": (
        "attend(np.ones((3, 3, 5, 7)), k, v)",
        "keys (2, 3, 11, 7) has batch=2, but batch=3 was set by queries (3, 3, 5, 7)",
    ),
    "batch of the context": (
        "multi_head_attention(x, p, context=c[:1])",
        "context (1, 11, 17) has batch=1, but batch=2 was set by x (2, 5, 17)",
    ),
    "mask one key too long": (
        "attend(q, k, v, keep=np.ones((2, 1, 5, 12), bool))",
        "keep (2, 1, 5, 12) has seq_k=12, but seq_k=11 was set by keys (2, 3, 11, 7)",
    ),
    "mask one key too long for the layer": (
        "multi_head_attention(x, p, context=c, keep=np.ones((2, 1, 5, 12), bool))",
        "keep (2, 1, 5, 12) has seq_k=12, but seq_k=11 was set by context (2, 11, 17)",
    ),
    "padding mask as attention mask, batch equal to seq": (
        "multi_head_attention(square, p, keep=np.ones((5, 5), bool))",
        "keep (5, 5) has 2 axes, but needs 4: (batch=5 or 1, h=3 or 1, seq_q=5 or 1, seq_k)",
    ),
    "mask without head axis, batch equal to h": (
        "attend(q[:1].repeat(3, 0), k[:1].repeat(3, 0), v[:1].repeat(3, 0), keep=np.ones((3, 5, 11), bool))",
        "keep (3, 5, 11) has 3 axes, but needs 4: (batch=3 or 1, h=3 or 1, seq_q=5 or 1, seq_k=11)",
    ),
    "heads 3 against 1 without grouping": (
        "attend(q, k[:, :1], v[:, :1])",
        "keys (2, 1, 11, 7) has h=1, but h=3 was set by queries (2, 3, 5, 7)",
    ),
    "sequence before heads": (
        "attend(q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2))",
        "keys (2, 11, 3, 7) has h=11, but h=5 was set by queries (2, 5, 3, 7)",
    ),
    "sequence before heads, equal lengths, sizes given": (
        "attend(q.swapaxes(1, 2), q.swapaxes(1, 2), v[:, :, :5].swapaxes(1, 2), heads=heads)",
        "queries (2, 5, 3, 7) has h=5, but h=3 was set by heads.h",
    ),
    "whole-number mask": ("attend(q, k, v, keep=keep.astype(int))", "keep is int64, but must be boolean"),
}


@pytest.mark.parametrize("row", PEERS)
def test_what_peers_accept_or_garble_is_refused(row):
    call, sentence = PEERS[row]
    with pytest.raises((ShapeError, DtypeError)) as refusal:
        eval(call, NAMES)
    assert sentence in str(refusal.value)


GUESSES = {
    "attend(q.swapaxes(1, 2), k, v)": "Perhaps queries has heads and sequence swapped; here the heads come first.",
    "attend(q, k.swapaxes(1, 2), v)": "Perhaps keys has heads and sequence swapped; here the heads come first.",
    "attend(q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2))": (
        "Perhaps every array has heads and sequence swapped; here the heads come first."
    ),
    "multi_head_attention(x, p, context=c.swapaxes(0, 1))": "Perhaps context is sequence-first; here the batch comes first.",
    "multi_head_attention(x.swapaxes(0, 1), p, context=c.swapaxes(0, 1))": (
        "Perhaps every array is sequence-first; here the batch comes first."
    ),
    "attend(q, k.swapaxes(1, 2).reshape(2, 11, 21), v)": "Perhaps the heads of keys are not split yet: its last axis, 21, is h*d_k.",
    "attend(q, k, v.swapaxes(1, 2).reshape(2, 11, 39))": "Perhaps the heads of values are not split yet: its last axis, 39, is h*d_v.",
    "project_queries(x, p.w_q.swapaxes(1, 2))": "Perhaps w_q is transposed; here d_model comes before d_k.",
    "mix(np.ones((2, 5, 39)), p.w_o.T)": "Perhaps w_o is transposed; here h*d_v comes before d_model.",
    "score(q, k.swapaxes(2, 3))": "Perhaps keys is transposed; here seq_k comes before d_k.",
    "mask(s, keep[0, 0])": "Perhaps you mean keep[None, None, :, :], the same for all of batch and h.",
    "mask(s, keep[:, 0])": "Perhaps you mean keep[:, None, :, :], the same for all of h.",
    "mask(s, keep[:, 0, 0])": "Perhaps you mean keep[:, None, None, :], the same for all of h and seq_q.",
    "mask(s, np.where(keep, 0.0, -np.inf))": "Perhaps it is additive: keep == 0 keeps what it leaves as it is.",
    "mask(s, keep.astype(int))": "Perhaps 1 means keep: keep != 0.",
    "multi_head_attention(x[0], p)": "Perhaps you mean x[None, :, :], the same for all of batch.",
    "attend(q, k, v[:, :, :7])": "Keys and values come in pairs, from the same positions.",
    "attend(q, k[:, :1], v[:, :1])": "If the heads are grouped, share_keys and share_values give every query head its own.",
}


@pytest.mark.parametrize("call", GUESSES)
def test_the_usual_slips_are_guessed(call):
    with pytest.raises((ShapeError, DtypeError)) as refusal:
        eval(call, NAMES)
    assert str(refusal.value).endswith(GUESSES[call])


def test_a_slip_that_nobody_can_know_is_not_guessed():
    with pytest.raises(ShapeError) as refusal:
        eval("score(q, k[..., :6])", NAMES)
    assert str(refusal.value) == "score: keys (2, 3, 11, 6) has d_k=6, but d_k=7 was set by queries (2, 3, 5, 7)."


REFUSED = {
    "score(q, k[0])": (ShapeError, "score: keys (3, 11, 7) has 3 axes, but needs 4: (batch=2, h=3, seq_k, d_k=7)."),
    "score(q[0, 0, 0], k)": (ShapeError, "score: queries (7,) has 1 axis, but needs 4: (batch, h, seq_q, d_k)."),
    "score(q.astype(int), k)": (DtypeError, "score: queries is int64, but must be floating-point."),
    "score(q.astype(complex), k)": (DtypeError, "score: queries is complex128, but must be floating-point."),
    "score(q, k.astype('float32'))": (
        DtypeError,
        "score: keys is of dtype float32, but queries is of dtype float64; one call takes one.",
    ),
    "multi_head_attention(x.astype('float32'), p)": (
        DtypeError,
        "multi_head_attention: x is of dtype float32, but parameters.w_q is of dtype float64; one call takes one.",
    ),
    "score(q, torch.from_numpy(k))": (BackendError, "score: keys is from torch, but queries is from numpy; one call takes one."),
    "multi_head_attention(torch.from_numpy(x), p)": (BackendError, "x is from torch, but parameters.w_q is from numpy"),
    "multi_head_attention(x, p.to_torch())": (BackendError, "x is from numpy, but parameters.w_q is from torch"),
    "attend(torch.from_numpy(q), torch.from_numpy(k).to('meta'), torch.from_numpy(v))": (
        BackendError,
        "attend: keys is on meta, but queries is on cpu; one call takes one.",
    ),
    "score(q, [1.0])": (BackendError, "score: keys is a list, but must be an array (of NumPy, PyTorch or another array-API library)."),
    "score(q, None)": (BackendError, "score: keys is None, but must be an array"),
    "score(q)": (TypeError, "score: missing a required argument: 'keys'."),
    "attend(q, k, v, scal=1.0)": (TypeError, "attend: got an unexpected keyword argument 'scal'."),
    "multi_head_attention(x, None)": (ConfigError, "multi_head_attention: parameters=None must be Parameters."),
    "multi_head_attention(x, {'w_q': 1})": (ConfigError, "multi_head_attention: parameters={'w_q': 1} must be Parameters."),
    "attend(q, k, v, scale='half')": (ConfigError, "attend: scale='half' must be float or None."),
    "attend(q, k, v, scale=float('nan'))": (ConfigError, "scale: factor=nan must be finite."),
    "attend(q, k, v, causal=2)": (ConfigError, "attend: causal=2 must be bool."),
    "attend(q, k, v, causal=True, offset=0.5)": (ConfigError, "attend: offset=0.5 must be int or None."),
    "attend(q, k, v, offset=1)": (
        ConfigError,
        "attend: offset=1 says where the queries stand, but nothing asks; give causal=True, a window or a rotation.",
    ),
    "attnspec.softmax(s, precision='float16')": (
        ConfigError,
        "softmax: precision='float16' must be 'float32' or 'float64' or 'input' or None.",
    ),
    "attnspec.share_keys(k, h=7)": (ConfigError, "share_keys: h=7 must be a multiple of h_kv=3"),
    "attnspec.share_keys(k[:, :0], h=7)": (ConfigError, "share_keys: h=7 must be a multiple of h_kv=0"),
    "attnspec.alibi_slopes(0)": (ConfigError, "alibi_slopes: h=0 must be positive."),
    "attnspec.share_values(v, h='6')": (ConfigError, "share_values: h='6' must be int."),
    "attnspec.Heads(d_model=512, h=7)": (ConfigError, "h=7 does not divide d_model=512; h=4 and h=8 would, or give d_k."),
    "attnspec.Heads(d_model=512, h=513)": (ConfigError, "h=513 does not divide d_model=512; h=512 would, or give d_k."),
    "attnspec.Heads(d_model=512, h=8, h_kv=3)": (ConfigError, "h_kv=3 does not divide h=8; h_kv=2 and h_kv=4 would."),
    "attnspec.Heads(d_model=10**14, h=3)": (ConfigError, "h=3 does not divide d_model=100000000000000; h=2 and h=4 would, or give d_k."),
    "attnspec.Heads(d_model=0, h=1)": (ConfigError, "d_model=0 must be a positive whole number."),
    "attnspec.Heads(d_model=8, h=2.0)": (ConfigError, "h=2.0 must be a positive whole number."),
    "attnspec.Heads(d_model=8, h=True)": (ConfigError, "h=True must be a positive whole number."),
    "attnspec.Parameters(w_q=p.w_q.swapaxes(1, 2), w_k=p.w_k, w_v=p.w_v, w_o=p.w_o)": (
        ShapeError,
        "w_k (3, 17, 7) has d_k=7, but d_k=17 was set by w_q (3, 7, 17). Perhaps w_q is transposed; here d_model comes before d_k.",
    ),
    "attnspec.Parameters(w_q=p.w_q, w_k=p.w_k, w_v=p.w_v, w_o=p.w_o[:-1])": (
        ShapeError,
        "w_o (38, 17) has h*d_v=38, but h*d_v=39 was set by w_v (3, 17, 13) and w_q (3, 17, 7).",
    ),
    "attnspec.Parameters(w_q=p.w_q, w_k=p.w_k, w_v=p.w_v, w_o=p.w_o, b_k=p.b_v)": (
        ShapeError,
        "b_k (3, 13) has d_k=13, but d_k=7 was set by w_q (3, 17, 7).",
    ),
    "attnspec.Mask.drop(keep.astype(float))": (DtypeError, "Mask: drop is float64, but must be boolean."),
    "attnspec.Mask.keep(keep.astype(int))": (DtypeError, "Mask: keep is int64, but must be boolean."),
    "attnspec.Mask.additive(keep)": (DtypeError, "Mask: additive is bool, but must be floating-point."),
    "attnspec.Mask.keep([True])": (BackendError, "Mask: keep is a list, but must be an array"),
    "attend(q, k, v, keep=attnspec.Mask.lengths(np.array([1.0, 2.0])))": (DtypeError, "lengths is float64, but must be whole numbers."),
    "attend(q, k, v, keep=[[True]])": (ConfigError, "attend: keep=[[True]] must be an array (#batch #h #seq_q seq_k) or Mask or None."),
    "attnspec.drop(s, s, rate=0.5)": (DtypeError, "drop: survivors is float64, but must be boolean."),
    "attnspec.Dropout('half', None)": (ConfigError, "Dropout: rate='half' must be float."),
    "attnspec.ledger(heads, batch=0, seq=5)": (ConfigError, "ledger: batch=0 must be a positive whole number."),
    "attnspec.substitute(scal=score).__enter__()": (
        ConfigError,
        "substitute: there is no step 'scal'; the steps are append_to_cache, bias, blend, ",
    ),
    "attnspec.substitute(scale=3).__enter__()": (ConfigError, "substitute: scale=3 must be a function."),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_is_wrong_is_refused_early_and_by_name(call):
    error, sentence = REFUSED[call]
    with pytest.raises(error, match=re.escape(sentence)):
        eval(call, NAMES)


def test_a_substitute_that_returns_another_shape_is_named():
    with attnspec.substitute(softmax=lambda scores, **_: scores[..., :3]), pytest.raises(ShapeError) as refusal:
        eval("attend(q, k, v)", NAMES)
    assert str(refusal.value) == "softmax: its result (2, 3, 5, 3) has seq_k=3, but seq_k=11 was set by scores (2, 3, 5, 11)."


def test_a_substitute_that_returns_another_dtype_is_named():
    with attnspec.substitute(softmax=lambda scores, **_: scores.astype("float32")), pytest.raises(DtypeError) as refusal:
        eval("attend(q, k, v)", NAMES)
    assert str(refusal.value) == "softmax: its result is of dtype float32, but scores is of dtype float64; one call takes one."


@pytest.mark.parametrize(
    ("error", "builtin"), [(ShapeError, TypeError), (DtypeError, TypeError), (BackendError, TypeError), (ConfigError, ValueError)]
)
def test_errors_are_also_the_natural_builtin(error, builtin):
    assert issubclass(error, builtin)
    assert issubclass(error, attnspec.AttnspecError)


def test_whole_numbers_are_numbers():
    np.testing.assert_array_equal(eval("attend(q, k, v, scale=1)", NAMES), eval("attend(q, k, v, scale=1.0)", NAMES))


def test_autocast_may_choose_dtypes():
    tensors = {name: torch.from_numpy(NAMES[name]).float() for name in "qkv"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = eval("attend(q, k, v)", NAMES | tensors)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), eval("attend(q, k, v)", NAMES | tensors), rtol=0, atol=0.05)
    with pytest.raises(DtypeError):
        eval("score(q, k.bfloat16())", NAMES | tensors)


def test_the_right_call_is_accepted():
    assert eval("multi_head_attention(x, p, context=c, keep=keep)", NAMES).shape == (BATCH, SEQ_Q, D_MODEL)
