"""What must hold for any weights: right implementations pass, and a small wrong one fails each law with its kind."""

import inspect
from functools import partial

import numpy as np
import pytest
import torch

from attnspec import Heads, Policy
from attnspec.oracle.design import TOKENS, Profile, draw
from attnspec.oracle.libraries import LIBRARIES
from attnspec.oracle.options import OPTIONS
from attnspec.oracle.properties import PROPERTIES, check_properties
from attnspec.oracle.stores import Loader
from attnspec.oracle.subject import Subject, read_signature
from attnspec.oracle.tensors import cast, set_training

EQUAL = Heads(d_model=97, h=3, d_k=4, d_v=6)
GROUPED = Heads(d_model=97, h=6, h_kv=2, d_k=4, d_v=5)


def subject_of(function, *, library="numpy", call=None, target=None, **said):
    """A subject with attention alone."""
    asked = function if call is None else call
    signature = read_signature(asked, subject_first=call is not None, heads_first=True, explicit=call is not None, owner="test")
    run = call or (lambda f, **arguments: f(**arguments))
    return Subject("test", target or function, run, signature, LIBRARIES[library], **said)


def profile_of(subject, *, heads=(EQUAL,), policy=None, **said):
    options = tuple(name for name in OPTIONS if name in subject.signature.roles)
    tokens = tuple(word for word in TOKENS if word != "self")
    return Profile(policy=policy or Policy(empty_row="any"), options=options, heads=heads, tokens=tokens, **said)


def outcomes(function, *, names=None, heads=(EQUAL,), policy=None, causal=False, seed=0, **said):
    subject = subject_of(function, **said)
    return check_properties(subject, profile_of(subject, heads=heads, policy=policy, causal=causal), seed=seed, names=names)


def failed(found, level="wrong"):
    return {(outcome.name, outcome.kind) for outcome in found if outcome.passed is False and outcome.level == level}


def softmax(scores, axis=-1):
    powers = np.exp(scores - scores.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def right(queries, keys, values, *, keep=None, padding=None, causal=False, scale=None, bias=None, window=None, sinks=None):
    """Attention, with dropped keys absent: neither their numbers nor NaN in them count."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat(group, 1), values.repeat(group, 1)
    scores = queries @ keys.swapaxes(2, 3) * (queries.shape[3] ** -0.5 if scale is None else scale)
    kept = np.ones(scores.shape, bool)
    i, j = np.arange(scores.shape[2])[:, None], np.arange(scores.shape[3])
    kept = kept if keep is None else kept & keep
    kept = kept if padding is None else kept & padding[:, None, None]
    kept = kept & (j <= i) if causal else kept
    kept = kept if window is None else kept & (j <= i) & (j > i - window)
    scores = scores if bias is None else scores + bias
    scores = np.where(kept, scores, -np.inf)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))], -1)
    weights = softmax(scores)[..., : kept.shape[3]]
    clean = np.where(kept[..., None], values[:, :, None], 0)
    return (weights[..., None] * clean).sum(3)


def plain(queries, keys, values, *, keep=None, causal=False, weigh=softmax, fill=-np.inf):
    """Attention in the usual words, for small changes."""
    scores = queries @ keys.swapaxes(2, 3) * queries.shape[3] ** -0.5
    scores = scores if keep is None else np.where(keep, scores, fill)
    scores = np.where(np.tri(*scores.shape[2:], dtype=bool), scores, fill) if causal else scores
    return weigh(scores) @ values


@pytest.mark.parametrize("heads", [EQUAL, GROUPED])
def test_a_right_function_passes_everything(heads):
    found = outcomes(right, heads=(heads,))
    assert failed(found) == set()
    assert failed(found, "warning") == {("bad_shapes", "bad_shape_accepted")}
    assert {outcome.name for outcome in found if outcome.passed} == set(PROPERTIES) - {"bad_shapes"}


@pytest.mark.parametrize("policy", [Policy(empty_row="nan"), Policy(empty_row="zero"), Policy(causal_anchor="bottom_right")])
def test_conventions_are_no_faults(policy):
    def function(queries, keys, values, *, keep=None, causal=False):
        scores = queries @ keys.swapaxes(2, 3) * queries.shape[3] ** -0.5
        shift = scores.shape[3] - scores.shape[2] if policy.causal_anchor == "bottom_right" else 0
        scores = scores if keep is None else np.where(keep, scores, -np.inf)
        scores = np.where(np.tri(*scores.shape[2:], shift, dtype=bool), scores, -np.inf) if causal else scores
        weights = softmax(scores)
        return (weights if policy.empty_row == "nan" else np.nan_to_num(weights)) @ values

    assert failed(outcomes(function, policy=policy)) == set()


def test_a_mask_after_the_softmax_is_right_if_the_rows_are_normalised_again():
    def function(queries, keys, values, *, keep=None):
        weights = softmax(queries @ keys.swapaxes(2, 3) * queries.shape[3] ** -0.5)
        weights = weights if keep is None else weights * keep
        return weights / weights.sum(-1, keepdims=True) @ values

    assert failed(outcomes(function)) == set()


@pytest.mark.parametrize("fill", [-1e6, -1e9, -1e30, np.finfo(float).min])
def test_a_large_fill_is_right(fill):
    assert (
        failed(
            outcomes(
                lambda queries, keys, values, keep=None, causal=False: plain(queries, keys, values, keep=keep, causal=causal, fill=fill)
            )
        )
        == set()
    )


def torch_attention(f, q, k, v, *, keep, causal, scale, dropout):
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    keep = (future if keep is None else keep & future) if causal else keep
    return f(q, k, v, attn_mask=keep, scale=scale, dropout_p=dropout, enable_gqa=True)


def test_the_attention_of_torch_passes():
    found = outcomes(torch.nn.functional.scaled_dot_product_attention, library="torch", call=torch_attention, heads=(GROUPED,))
    assert failed(found) == set()
    assert any(outcome.name == "training" and outcome.passed for outcome in found)


def torch_layer(layer, *, queries, keys, values, keep, causal, padding):
    future = torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool).triu(1)
    drop = (future if keep is None else future | keep) if causal else keep
    drop = (
        drop
        if drop is None or drop.ndim == 2
        else drop.expand(-1, -1, queries.shape[1], -1).repeat_interleave(layer.num_heads, 1).flatten(0, 1)
    )
    return layer(queries, keys, values, attn_mask=drop, key_padding_mask=padding)[0]


def layer_subject(layer, heads, call=torch_layer, **said):
    library = LIBRARIES["torch"]
    loader = Loader(layer, heads, "torch", library)
    signature = read_signature(call, subject_first=True, heads_first=False, explicit=True, owner="test")
    subject = Subject(
        "layer", layer, call, signature, library, mask="drop", load=loader,
        in_precision=lambda target, precision: cast(target, precision, library),
        training=set_training, mask_axes=("batch 1 seq_q seq_k",), **said,
    )  # fmt: skip
    options = tuple(name for name in OPTIONS if name in signature.roles)
    draws = {"keep": ("shared by the heads",)}
    return subject, Profile(policy=Policy(empty_row="any"), options=options, template=loader.template, draws=draws)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_layer_of_torch_passes(dropout):
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(24, 4, dropout=dropout, batch_first=True)
    found = check_properties(*layer_subject(layer, Heads(d_model=24, h=4)), seed=0)
    assert failed(found) == set()
    assert all(outcome.passed is not None for outcome in found)


def test_a_layer_that_drops_after_evaluation_is_seen():
    layer = torch.nn.MultiheadAttention(24, 4, dropout=0.3, batch_first=True)
    subject, profile = layer_subject(layer, Heads(d_model=24, h=4))
    subject.training = lambda target, _: target.train()
    assert failed(check_properties(subject, profile, seed=0, names=["same_twice"])) == {("same_twice", "dropout_mode")}


# --- the laws on what is seen


def ignores_keep(queries, keys, values, *, keep=None):
    return plain(queries, keys, values)


def inverts_keep(queries, keys, values, *, keep=None):
    return plain(queries, keys, values, keep=None if keep is None else ~keep)


def tiles_keep(queries, keys, values, *, keep=None):
    if keep is not None:
        (batch, h), (seq_q, seq_k) = queries.shape[:2], (queries.shape[2], keys.shape[2])
        keep = np.broadcast_to(keep, (batch, keep.shape[1], seq_q, seq_k))
        keep = np.tile(keep[:, 0], (h, 1, 1)).reshape(batch, h, seq_q, seq_k) if keep.shape[1] == 1 else keep
    return plain(queries, keys, values, keep=keep)


def pads_queries(queries, keys, values, *, padding=None):
    square = padding is not None and queries.shape[2] == keys.shape[2]
    keep = None if padding is None else padding[:, None, :, None] if square else padding[:, None, None]
    return plain(queries, keys, values, keep=keep, fill=-1e9)


def masks_weights(queries, keys, values, *, keep=None):
    return plain(queries, keys, values, weigh=lambda scores: softmax(scores) * (1 if keep is None else keep))


def fills(fill):
    return lambda queries, keys, values, *, keep=None: plain(queries, keys, values, keep=keep, fill=fill)


def overwrites(queries, keys, values, *, keep=None, causal=False):
    return plain(queries, keys, values, keep=keep, causal=causal and keep is None)


def transposes_causal(queries, keys, values, *, causal=False):
    keep = np.tri(queries.shape[2], keys.shape[2], dtype=bool)[::-1, ::-1] if causal else None
    return plain(queries, keys, values, keep=keep)


def anchors_bottom_right(queries, keys, values, *, causal=False):
    keep = np.tri(queries.shape[2], keys.shape[2], keys.shape[2] - queries.shape[2], dtype=bool) if causal else None
    return plain(queries, keys, values, keep=keep)


def ignores_causal(queries, keys, values, *, causal=False):
    return plain(queries, keys, values)


def forces_causal(queries, keys, values):
    return plain(queries, keys, values, causal=True)


def widens_window(queries, keys, values, *, window=None):
    return right(queries, keys, values, window=None if window is None else window + 1)


def ignores_window(queries, keys, values, *, window=None):
    return plain(queries, keys, values)


def joins_documents(queries, keys, values, *, documents=None):
    return plain(queries, keys, values)


def attends_over_heads(queries, keys, values):
    swapped = (array.swapaxes(1, 2) for array in (queries, keys, values))
    return plain(*swapped).swapaxes(1, 2) if queries.shape[2] == keys.shape[2] else plain(queries, keys, values)


def repeats_first_key(queries, keys, values):
    return plain(queries, keys[:, :, :1].repeat(keys.shape[2], 2), values[:, :, :1].repeat(keys.shape[2], 2))


SEEN = [
    (ignores_keep, "masks", "mask_not_applied"),
    (inverts_keep, "masks", "mask_polarity_inverted"),
    (tiles_keep, "masks", "mask_batch_head_tiling"),
    (pads_queries, "masks", "mask_wrong_axis"),
    (masks_weights, "masks", "mask_after_softmax"),
    (fills(-20.0), "masks", "mask_finite_fill"),
    (fills(-50.0), "dropped_size", "mask_finite_fill"),
    (fills(-1e4), "dropped_size", "mask_finite_fill"),
    (ignores_keep, "dropped_size", "mask_not_applied"),
    (overwrites, "masks", "causal_dropped_or_forced"),
    (transposes_causal, "masks", "causal_geometry"),
    (anchors_bottom_right, "masks", "causal_alignment"),
    (ignores_causal, "masks", "causal_dropped_or_forced"),
    (forces_causal, "token_mixing", "causal_dropped_or_forced"),
    (widens_window, "masks", "window_off_by_one"),
    (ignores_window, "masks", "window_wrong_region"),
    (joins_documents, "masks", "ragged_packing"),
    (attends_over_heads, "heads", "head_seq_axis_swap"),
    (repeats_first_key, "token_mixing", "head_split_merge_order"),
]


@pytest.mark.parametrize(("function", "name", "kind"), SEEN)
def test_what_is_seen_in_spite_of_a_mask_is_named(function, name, kind):
    found = outcomes(function, names=[name])
    assert (name, kind) in failed(found), found


def test_keys_beyond_the_fill_are_a_warning():
    def adds(queries, keys, values, *, keep=None):
        scores = queries @ keys.swapaxes(2, 3) * queries.shape[3] ** -0.5
        return softmax(scores if keep is None else scores + np.where(keep, 0, -1e9)) @ values

    found = outcomes(adds, names=["dropped_size"])
    assert failed(found) == set()
    assert failed(found, "warning") == {("dropped_size", "mask_finite_fill")}


def test_nan_that_leaks_or_is_swallowed_is_a_warning():
    leaks = outcomes(plain, names=["dropped_nan", "visible_nan"])
    swallows = outcomes(lambda queries, keys, values: np.nan_to_num(plain(queries, keys, values)), names=["dropped_nan", "visible_nan"])
    assert failed(leaks) == failed(swallows) == set()
    assert failed(leaks, "warning") == {("dropped_nan", "nonfinite_propagation")}
    assert failed(swallows, "warning") == {("visible_nan", "nonfinite_propagation")}


# --- the laws on what is independent of what


def mixes_samples(queries, keys, values):
    (batch, h), folded = queries.shape[:2], plain(queries, keys, values)
    return folded.reshape(h, batch, *folded.shape[2:]).swapaxes(0, 1)


def borrows_mask(queries, keys, values, *, keep=None):
    return plain(queries, keys, values, keep=keep if keep is None else keep[:1])


def borrows_bias(queries, keys, values, *, bias=None):
    return right(queries, keys, values, bias=bias if bias is None else bias[:1])


def joins_heads(queries, keys, values):
    scores = (queries @ keys.swapaxes(2, 3)).mean(1, keepdims=True) * queries.shape[3] ** -0.5
    return softmax(scores) @ values


def normalises_over_heads(queries, keys, values):
    return plain(queries, keys, values, weigh=partial(softmax, axis=1))


def ignores_values_of_head(queries, keys, values):
    return plain(queries, keys, values[:, ::-1])


def groups_strided(queries, keys, values):
    group = queries.shape[1] // keys.shape[1]
    return plain(queries, np.tile(keys, (1, group, 1, 1)), np.tile(values, (1, group, 1, 1)))


def first_mask_for_all_heads(queries, keys, values, *, sinks=None):
    return right(queries, keys, values, sinks=None if sinks is None else sinks[[0] * len(sinks)])


def normalises_over_queries(queries, keys, values):
    return plain(queries, keys, values, weigh=partial(softmax, axis=2))


def shuffles_rows(queries, keys, values):
    y = plain(queries, keys, values)
    return y.swapaxes(1, 2).reshape(y.shape)


def counts_positions(queries, keys, values):
    return right(queries, keys, values, bias=-np.arange(keys.shape[2], dtype=float))


def squeezes_one_sample(queries, keys, values):
    y = plain(queries, keys, values)
    return y if len(y) > 1 else y[:, ::-1]


def one_query_alone(queries, keys, values):
    y = plain(queries, keys, values)
    return y if y.shape[2] > 2 else y * 1.001


def scores_by_values(queries, keys, values):
    return plain(queries, keys + values.mean(-1, keepdims=True), values)


def scales_weights(queries, keys, values):
    return plain(queries, keys, values) * queries.shape[3] ** -0.5


def adds_to_denominator(queries, keys, values):
    scores = queries @ keys.swapaxes(2, 3) * queries.shape[3] ** -0.5
    return np.exp(scores) / (1e-6 + np.exp(scores).sum(-1, keepdims=True)) @ values


def adds_query_before(queries, keys, values):
    return plain(queries + np.concatenate([0 * queries[:, :, :1], queries[:, :, :-1]], 2), keys, values)


APART = [
    (mixes_samples, "samples", "batch_axis_mixup"),
    (borrows_mask, "samples", "mask_batch_head_tiling"),
    (borrows_bias, "samples", "additive_position_bias"),
    (squeezes_one_sample, "batch_padding", "batch_axis_mixup"),
    (joins_heads, "heads", "heads_not_separated"),
    (normalises_over_heads, "heads", "heads_not_separated"),
    (ignores_values_of_head, "heads", "heads_not_separated"),
    (first_mask_for_all_heads, "heads", "softmax_denominator"),
    (normalises_over_queries, "queries", "softmax_wrong_axis"),
    (shuffles_rows, "queries", "head_split_merge_order"),
    (one_query_alone, "chunks", "softmax_wrong_axis"),
    (anchors_bottom_right, "chunks", "causal_alignment"),
    (adds_query_before, "chunks", "softmax_wrong_axis"),  # no query stands before the first part, as in one call
    (counts_positions, "order_of_keys", "order_of_keys"),
    (scores_by_values, "linear_in_values", "operand_routing"),
    (scales_weights, "constant_values", "scale_wrong_place"),
    (normalises_over_queries, "constant_values", "softmax_wrong_axis"),
    (adds_to_denominator, "constant_values", "softmax_denominator"),
    (masks_weights, "constant_values", "mask_after_softmax"),
]


@pytest.mark.parametrize(("function", "name", "kind"), APART)
def test_what_depends_on_what_it_must_not_is_named(function, name, kind):
    found = outcomes(function, names=[name])
    assert (name, kind) in failed(found), found


def test_strided_groups_are_named_where_they_are_not_declared():
    assert failed(outcomes(groups_strided, heads=(GROUPED,), names=["heads"])) == {("heads", "gqa_head_mapping")}
    declared = Policy(grouping="strided", empty_row="any")
    assert failed(outcomes(groups_strided, heads=(GROUPED,), policy=declared, names=["heads"])) == set()


# --- the laws on calls


def drops_always(queries, keys, values):
    weights = plain(queries, keys, np.broadcast_to(np.eye(keys.shape[2]), (*keys.shape[:2], keys.shape[2], keys.shape[2])))
    return weights * (np.random.default_rng().random(weights.shape) < 0.9) @ values


def changes_inputs(queries, keys, values):
    queries *= queries.shape[3] ** -0.5
    return softmax(queries @ keys.swapaxes(2, 3)) @ values


def changes_mask(queries, keys, values, *, keep=None):
    y = plain(queries, keys, values, keep=keep)
    if keep is not None:
        keep |= True
    return y


def reads_memory(queries, keys, values):
    """Read values as if they were contiguous."""
    return plain(queries, keys, values.ravel(order="K").reshape(values.shape))


def cuts_output(queries, keys, values, *, lengths=None):
    y = plain(queries, keys, values, keep=None if lengths is None else np.arange(keys.shape[2]) < lengths[:, None, None, None])
    return y if lengths is None else y[:, :, : lengths.max()]


def raises_with_scale(queries, keys, values, *, scale=None):
    if scale is not None:
        raise RuntimeError("no")
    return plain(queries, keys, values)


class Remembers:
    def __init__(self):
        self.keys = None

    def __call__(self, queries, keys, values):
        self.keys = keys if self.keys is None or self.keys.shape != keys.shape else self.keys
        return plain(queries, self.keys, values)


def remembers(memory, queries, keys, values):
    return memory(queries, keys, values)


CALLS = [
    (drops_always, "same_twice", "dropout_mode"),
    (changes_inputs, "inputs_stay", "inputs_modified"),
    (changes_mask, "inputs_stay", "inputs_modified"),
    (reads_memory, "strides", "noncontiguous_misread"),
    (cuts_output, "shape", "output_shape"),
    (raises_with_scale, "shape", "crash"),
]


@pytest.mark.parametrize(("function", "name", "kind"), CALLS)
def test_what_a_call_does_besides_is_named(function, name, kind):
    assert (name, kind) in failed(outcomes(function, names=[name]))


def test_what_is_remembered_is_named():
    found = outcomes(plain, call=remembers, target=Remembers(), names=["same_twice"])
    assert failed(found) == {("same_twice", "state")}


def test_another_dtype_is_a_warning():
    found = outcomes(lambda queries, keys, values: plain(queries, keys, values).astype("float32"), names=["dtype"])
    assert failed(found, "warning") == {("dtype", "result_dtype")}


def drop_rightly(queries, keys, values, *, dropout=0.0, training=False, arithmetic=lambda rate: 1 - rate, zero=1.0):
    weights = softmax(queries @ keys.swapaxes(2, 3) * queries.shape[3] ** -0.5)
    if training:
        weights = weights * (RNG.random(weights.shape) >= dropout) / arithmetic(dropout) * zero
    return weights @ values


def drop_never(queries, keys, values, *, dropout=0.0, training=False):
    return plain(queries, keys, values)


def drop_always(queries, keys, values, *, dropout=0.0, training=False):
    return drop_rightly(queries, keys, values, dropout=dropout, training=True)


RNG = np.random.default_rng(0)
TRAINING = [
    (drop_rightly, None),
    (drop_never, "dropout_mode"),
    (drop_always, "dropout_mode"),
    (partial(drop_rightly, zero=2.0), "dropout_mode"),
    (partial(drop_rightly, arithmetic=lambda _: 1.0), "dropout_arithmetic"),
    (partial(drop_rightly, arithmetic=lambda rate: (1 - rate) ** 0.5), "dropout_arithmetic"),
]


@pytest.mark.parametrize(("function", "kind"), TRAINING)
def test_dropout_is_seen_by_its_mean(function, kind):
    def called(f, queries, keys, values, *, dropout, training):
        return f(queries, keys, values, dropout=dropout, training=training)

    found = outcomes(function, call=called, names=["training"])
    assert failed(found) == (set() if kind is None else {("training", kind)})
    assert [outcome.passed for outcome in found] == [kind is None]


def test_what_does_not_fit_together_is_refused():
    def cautious(queries, keys, values, *, keep=None):
        seq_k = keys.shape[2]
        if values.shape[:3] != keys.shape[:3] or len(keys) != len(queries) or (keep is not None and keep.shape[3] != seq_k):
            raise ValueError("they do not fit together")
        return right(queries, keys, values, keep=keep)

    def careless(queries, keys, values, *, keep=None):
        return right(
            queries,
            keys,
            np.resize(values, (*values.shape[:2], *keys.shape[2:3], values.shape[3])),
            keep=None if keep is None else keep[..., : keys.shape[2]],
        )

    assert [outcome.passed for outcome in outcomes(cautious, names=["bad_shapes"])] == [True]
    found = outcomes(careless, names=["bad_shapes"])
    assert failed(found, "warning") == {("bad_shapes", "bad_shape_accepted")}
    text = " ".join(outcome.sentence for outcome in found)
    for what in ("different length", "fewer heads", "another batch", "one key too long"):
        assert what in text


def test_every_law_is_tried():
    tried = {name for _, name, _ in [*SEEN, *APART, *CALLS]}
    tried |= {"dropped_nan", "visible_nan", "dtype", "training", "bad_shapes"}
    assert tried == set(PROPERTIES)
    assert all(inspect.isgeneratorfunction(prop.test) for prop in PROPERTIES.values())


@pytest.mark.parametrize(("mask", "kept", "dropped"), [("keep", True, False), ("drop", False, True), ("additive", 0.0, -np.inf)])
def test_a_mask_is_given_as_it_is_declared(mask, kept, dropped):
    subject = subject_of(lambda queries, keys, values, keep: None, mask=mask)
    problem = draw(profile_of(subject), {"tokens": "wide", "keep": "drawn"}, seed=0)
    given = subject.arguments(problem, "float64")["keep"]
    assert not problem.options["keep"].all()
    assert np.array_equal(given, np.where(problem.options["keep"], kept, dropped))
