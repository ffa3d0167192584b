"""Each kind of fault that was found in the world is a substitution: of a step or two, a convention, or a layout.

The kinds are those of a collection of 123 public reports in 48 kinds. One statement of each kind is enough here; that it
changes the result shows that the specification can tell it from the right thing.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from options import NEUTRAL, SIZES, draw

import attnspec
from attnspec import ShapeError, substitute

BASE = NEUTRAL | {"source": "cross_v", "heads": "equal"}
SQUARE = NEUTRAL | {"heads": "equal"}
EQUAL = dict.fromkeys(SIZES, 3)
CAUSAL = {"keep": "array", "causal": True}


def kept(choice=BASE, sizes=SIZES, **more):
    drawn = draw(choice, seed=1, sizes=sizes)
    return dataclasses.replace(drawn, options=drawn.options | more)


def swap(array, first, second):
    return np.swapaxes(array, first, second)


def joint_softmax(scores, *_, **__):
    shares = np.exp(scores - scores.max(axis=(1, 3), keepdims=True))
    return shares / shares.sum(axis=(1, 3), keepdims=True)


def along(axis):
    def softmax(scores, *_, **__):
        shares = np.exp(scores - scores.max(axis=axis, keepdims=True))
        return shares / shares.sum(axis=axis, keepdims=True)

    return softmax


def one_more_column(scores, *_, **__):
    shares = np.exp(scores)
    return shares / (shares.sum(-1, keepdims=True) + 1)


RIGHT = {name: getattr(attnspec, name).__wrapped__ for name in attnspec.step._steps}

# kind: (choice and sizes, the substitutes of steps)
BY_STEPS = {
    "mask_not_applied": (kept(BASE | {"keep": "array"}), {"mask": lambda scores, keep, **_: scores}),
    "additive_position_bias": (
        None,
        {"linear_bias": lambda slopes, q, k: RIGHT["linear_bias"](slopes[::-1], q, k)},
    ),
    "softmax_denominator": (kept(), {"softmax": one_more_column}),
    "causal_dropped_or_forced": (
        kept(BASE | {"causal": True}),
        {"keep_causal": lambda q, k: np.ones((1, 1, q.shape[1], k.shape[1]), bool)},
    ),
    "dropout_mode": (kept(BASE | {"dropout": True}), {"drop": lambda weights, survivors, **_: weights}),
    "mask_construction": (
        kept(BASE | {"keep": "lengths"}),
        {"keep_lengths": lambda keys, lengths: RIGHT["keep_lengths"](keys, lengths + 1)},
    ),
    "rope_position": (
        kept(BASE | {"rotation": "half", "places": "offset"}),
        {"count_positions": lambda tokens, *_: RIGHT["count_positions"](tokens)},
    ),
    "softmax_wrong_axis": (kept(), {"softmax": along(2)}),
    "precision_range": (kept(), {"scale": lambda scores, **sizes: RIGHT["scale"](scores.astype("float16").astype(float), **sizes)}),
    "mask_batch_head_tiling": (
        kept(SQUARE | {"keep": "array"}, EQUAL),
        {"mask": lambda scores, keep, **_: RIGHT["mask"](scores, swap(keep, 0, 1))},
    ),
    "head_seq_axis_swap": (
        kept(SQUARE, EQUAL),
        {
            "project_queries": lambda *arrays: swap(RIGHT["project_queries"](*arrays), 1, 2),
            "project_keys": lambda *arrays: swap(RIGHT["project_keys"](*arrays), 1, 2),
            "project_values": lambda *arrays: swap(RIGHT["project_values"](*arrays), 1, 2),
        },
    ),
    "mask_type_confusion": (kept(BASE | {"keep": "array"}), {"mask": lambda scores, keep, **_: scores + keep}),
    "projection_bias": (kept(), {"project_values": lambda context, w, b, **_: RIGHT["project_values"](context, w)}),
    "head_split_merge_order": (kept(), {"concatenate": lambda blended: blended.reshape(2, 5, 9)}),
    "mask_finite_fill": (kept(BASE | {"keep": "array"}), {"mask": lambda scores, keep, **_: np.where(keep, scores, -5.0)}),
    "noncontiguous_misread": (kept(), {"blend": lambda weights, values, **_: weights @ swap(values, 2, 3).reshape(values.shape)}),
    "cache_extent": (None, {"append_to_cache": lambda cached, new: np.concatenate((cached * 0, new), axis=2)}),
    "cache_structure": (None, {"append_to_cache": lambda cached, new: np.concatenate((cached[::-1], new), axis=2)}),
    "dropout_arithmetic": (kept(BASE | {"dropout": True}), {"drop": lambda weights, survivors, **_: weights * survivors}),
    "head_mask_prune": (kept(BASE | {"gates": True}), {"gate": lambda blended, gates: RIGHT["gate"](blended, np.roll(gates, 1))}),
    "index_overflow": (kept(), {"blend": lambda weights, values, **_: weights @ values[:, :, np.arange(7) % 4]}),
    "mask_combination": (kept(BASE | CAUSAL), {"keep_both": lambda keep, other: keep | other}),
    "scale_option_ignored": (kept(BASE | {"scale": 0.3}), {"scale": lambda scores, *, d_k, factor: scores / math.sqrt(d_k)}),
    "window_wrong_region": (
        kept(BASE | {"window": (1, 3)}),
        {"keep_window": lambda q, k, *, left, right: RIGHT["keep_window"](q, k, left=right, right=left)},
    ),
    "heads_not_separated": (kept(), {"softmax": joint_softmax}),
    "causal_geometry": (kept(BASE | {"causal": True}), {"keep_causal": lambda q, k: RIGHT["keep_causal"](q, k - 1)}),
    "mask_polarity_inverted": (kept(BASE | {"keep": "array"}), {"mask": lambda scores, keep, **_: np.where(keep, -np.inf, scores)}),
    "batch_axis_mixup": (
        kept(SQUARE, EQUAL),
        {"concatenate": lambda blended: RIGHT["concatenate"](swap(blended, 0, 1))},
    ),
    "mask_wrong_axis": (
        kept(SQUARE | {"keep": "array"}, EQUAL),
        {"mask": lambda scores, keep, **_: RIGHT["mask"](scores, swap(keep, 2, 3))},
    ),
    "rope_wrong_axis": (
        kept(BASE | {"rotation": "half"}),
        {"rotate": lambda tokens, at, **o: swap(RIGHT["rotate"](swap(tokens, 1, 2), np.arange(tokens.shape[1])[None], **o), 1, 2)},
    ),
    "ragged_packing": (None, {"number_documents": lambda cumulative, *, seq: RIGHT["number_documents"](cumulative - 1, seq=seq)}),
    # two steps at once
    "scale_wrong_place": (
        kept(),
        {"scale": lambda scores, **_: scores, "softmax": lambda scores, *_, **__: RIGHT["softmax"](scores) / math.sqrt(6)},
    ),
    "mask_after_softmax": (
        kept(BASE | {"keep": "array"}),
        {"mask": lambda scores, keep, **_: scores, "softmax": lambda scores, *_, **__: RIGHT["softmax"](scores) * LATE["keep"]},
    ),
}
LATE = {"keep": BY_STEPS["mask_after_softmax"][0].options["keep"]}

# kind: (a problem, the policy that differs)
BY_POLICY = {
    "causal_alignment": (kept(BASE | {"causal": True}), {"causal_anchor": "bottom_right"}),
    "fully_masked_row": (kept(BASE | {"keep": "array"}), {"empty_row": "nan"}),
    "scale_wrong_dim": (kept(), {"scale": 13**-0.5}),
    "scale_missing_or_double": (kept(), {"scale": 1.0}),
    "rope_pairing": (kept(BASE | {"rotation": "half"}), {"rotation": attnspec.Rotation(pairing="interleaved")}),
    "gqa_head_mapping": (kept(BASE | {"heads": "contiguous"}), {"grouping": "strided"}),
    "softcap_order_or_missing": (kept(BASE | {"keep": "array", "cap": "before"}), {"cap_order": "after"}),
    "window_off_by_one": (kept(BASE | {"window": (1, 3)}), {"window": (2, 3)}),
}


def packed_order(parameters):
    """Read [q k v] of each head as all queries, all keys, all values."""
    rows = np.concatenate([np.stack([parameters.w_q, parameters.w_k, parameters.w_v], 1)]).reshape(9, 3, 3)
    return dataclasses.replace(parameters, w_q=rows[:3], w_k=rows[3:6], w_v=rows[6:])


BY_LAYOUT = {
    "qkv_pack_order": packed_order,
    "operand_routing": lambda parameters: dataclasses.replace(parameters, w_k=parameters.w_v, w_v=parameters.w_k),
}


def differ(right, wrong):
    return right.shape == wrong.shape and not np.allclose(right, wrong, rtol=0, atol=1e-3 * np.abs(right).max())


def decoded():
    drawn = kept(SQUARE | {"rotation": "half"})
    _, cache = attnspec.decode(drawn.x[:, :3], drawn.parameters, None)
    return attnspec.decode(drawn.x[:, 3:], drawn.parameters, cache)[0]


def packed():
    drawn = kept(SQUARE)
    keep, positions = attnspec.packed(np.array([0, 2, 5]), seq_q=5)
    return dataclasses.replace(drawn, options=drawn.options | {"keep": keep, "causal": True, "positions": positions}).run()


def biased():
    drawn = kept()
    bias = attnspec.linear_bias(np.array(attnspec.alibi_slopes(3)), np.arange(5)[None], np.arange(7)[None])
    return dataclasses.replace(drawn, options=drawn.options | {"bias": bias}).run()


RUNS = {"cache_extent": decoded, "cache_structure": decoded, "ragged_packing": packed, "additive_position_bias": biased}


@pytest.mark.parametrize("kind", BY_STEPS)
def test_kinds_that_are_another_step(kind):
    problem, steps = BY_STEPS[kind]
    run = RUNS[kind] if problem is None else problem.run
    with substitute(**{name: RIGHT[name] for name in steps}):
        right = run()
    with substitute(**steps):
        wrong = run()
    np.testing.assert_array_equal(right, run())
    limit = 1e-6 if kind == "precision_range" else 0
    assert differ(right, wrong) or (limit and np.abs(right - wrong).max() > limit)


@pytest.mark.parametrize("kind", BY_POLICY)
def test_kinds_that_are_another_convention(kind):
    problem, fields = BY_POLICY[kind]
    policy = dataclasses.replace(problem.options["policy"], **fields)
    assert differ(problem.run(), dataclasses.replace(problem, options=problem.options | {"policy": policy}).run())


@pytest.mark.parametrize("kind", BY_LAYOUT)
def test_kinds_that_are_another_layout(kind):
    problem = kept(SQUARE, EQUAL)
    assert differ(problem.run(), dataclasses.replace(problem, parameters=BY_LAYOUT[kind](problem.parameters)).run())


class ForgetsTheSum(torch.autograd.Function):
    """A softmax whose forward is right and whose backward is that of exp alone."""

    @staticmethod
    def forward(ctx, scores):
        weights = torch.softmax(scores, -1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx, gradient):
        (weights,) = ctx.saved_tensors
        return gradient * weights


BY_BACKWARD = {
    "gradient_wrong": {"softmax": lambda scores, *_, **__: ForgetsTheSum.apply(scores)},
    "gradient_missing": {"project_keys": lambda *args, **kwargs: RIGHT["project_keys"](*args, **kwargs).detach()},
}


@pytest.mark.parametrize("kind", BY_BACKWARD)
def test_kinds_that_are_another_backward_of_a_step(kind):
    problem = kept(SQUARE).convert(torch.from_numpy)
    x = problem.x.requires_grad_()
    (right,) = torch.autograd.grad(problem.run().square().sum(), x)
    with substitute(**BY_BACKWARD[kind]):
        y = problem.run()
        (wrong,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(y, problem.run(), rtol=0, atol=1e-13)
    assert differ(right.numpy(), wrong.numpy())


def test_returned_weights_are_the_result_of_one_step_rather_than_another():
    with attnspec.trace() as steps:
        kept(BASE | {"dropout": True}).run()
    assert differ(steps["softmax"].result, steps["drop"].result)


def test_an_output_of_another_length_is_refused_by_its_step():
    with substitute(mix=lambda concatenated, w_o, b_o, **_: RIGHT["mix"](concatenated, w_o, b_o)[:, :-1]), pytest.raises(ShapeError):
        kept().run()


def test_nonfinite_values_propagate_only_where_they_are_seen():
    problem = kept(BASE | {"keep": "padding"})
    problem.options["context_v"][~problem.options["keep"].rules[0].array] = np.nan
    assert np.isfinite(problem.run()).all()
    with substitute(blend=lambda weights, values, **_: weights @ values):
        assert np.isnan(problem.run()).any()


def test_all_48_kinds_are_stated():
    elsewhere = {"returned_weights", "output_shape", "nonfinite_propagation"}
    stated = [*BY_STEPS, *BY_POLICY, *BY_LAYOUT, *BY_BACKWARD, *elsewhere]
    assert len(stated) == len(set(stated)) == 48
