"""ONNX `Attention` said in the words of this specification, and as ONNX Runtime runs it."""

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from einops import rearrange

import attnspec
from attnspec import Cache, Mask, Policy, Positions

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")
AXES = ("batch", "h", "seq_q", "seq_k")
PRECISIONS = {None: "input", 1: "float32", 11: "float64"}
"""Numbers of ONNX' dtypes: the softmax works in the dtype of the scores unless `softmax_precision` says otherwise."""

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One call of the operator, with the outputs that ONNX' reference implementation gave."""

    name: str
    opset: int
    model: Any
    attributes: dict[str, Any]
    inputs: Arrays
    outputs: Arrays
    rtol: float
    atol: float


@functools.cache
def collect_cases() -> dict[str, Case]:
    """Let ONNX generate the node cases of `Attention`, without those that are the same in other operators."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():  # it generates the cases of all operators, and those of Cast and ReduceMax overflow
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"onnx\.backend\.test\.case\.node\.")
        cases = [case for case in collect_testcases("Attention") if not case.name.endswith("_expanded")]
    return {case.name.removeprefix("test_attention_"): _read(case) for case in cases}


def _read(case: Any) -> Case:
    from onnx.helper import get_attribute_value

    (node,) = case.model.graph.node
    ((inputs, outputs),) = case.data_sets
    (opset,) = case.model.opset_import
    return Case(
        name=case.name,
        opset=opset.version,
        model=case.model,
        attributes={attribute.name: get_attribute_value(attribute) for attribute in node.attribute},
        inputs=dict(zip([name for name, given in zip(INPUTS, node.input, strict=False) if given], inputs, strict=True)),
        outputs=dict(zip([name for name, given in zip(OUTPUTS, node.output, strict=False) if given], outputs, strict=True)),
        rtol=case.rtol,
        atol=case.atol,
    )


def to_torch(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(x.astype(np.float32)).bfloat16() if x.dtype == ml_dtypes.bfloat16 else torch.tensor(x)


def to_numpy(x: Any) -> np.ndarray:
    if isinstance(x, np.ndarray):
        return x
    return x.float().numpy().astype(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def onnx_attention(
    inputs: Arrays, attributes: Mapping[str, Any], *, convert: Callable[[np.ndarray], Any] = np.asarray, **conventions: Any
) -> dict[str, np.ndarray]:
    """Compute the operator's four outputs by the specification.

    Args:
        inputs: its inputs by name, as NumPy arrays.
        attributes: its attributes by name; those of another value than 0 or the default count.
        convert: brings an array to the library to compute in.
        **conventions: members of the policy that the operator leaves open.

    Returns:
        Its outputs by name.
    """
    queries, keys, values = (_split(convert(inputs[name]), attributes.get(heads)) for name, heads in _HEADS.items())
    seen = 0
    if "past_key" in inputs:
        past = Cache(convert(inputs["past_key"]), convert(inputs["past_value"]))
        seen, cache = past.seen, past.append(keys, values)
        keys, values = cache.keys, cache.values
    outputs = {"present_key": keys, "present_value": values}
    keep, bias = _masks(inputs, keys.shape[2], convert)
    if "nonpad_kv_seqlen" in inputs:
        lengths = convert(inputs["nonpad_kv_seqlen"])
        seen, keep = lengths - queries.shape[2], keep & Mask.lengths(lengths)
    h = queries.shape[1]
    options = {
        "keep": keep,
        "bias": bias,
        "causal": bool(attributes.get("is_causal", 0)),
        "scale": attributes.get("scale"),
        "positions": Positions(attnspec.count_positions(queries, seen), attnspec.count_positions(keys)),
        "policy": _policy(attributes, conventions),
    }
    arguments = (queries, attnspec.share_keys(keys, h=h), attnspec.share_values(values, h=h))
    y = attnspec.attend(*arguments, **options)
    with attnspec.trace() as steps:
        attnspec.attend(*arguments, **options)
    outputs["Y"] = attnspec.concatenate(y) if inputs["Q"].ndim == 3 else y
    outputs["qk_matmul_output"] = _seen_inside(steps, attributes.get("qk_matmul_output_mode", 0))
    return {name: to_numpy(outputs[name]) for name in OUTPUTS}


_HEADS = {"Q": "q_num_heads", "K": "kv_num_heads", "V": "kv_num_heads"}


def _split(tokens: Any, h: int | None) -> Any:
    return tokens if tokens.ndim == 4 else rearrange(tokens, "batch seq (h width) -> batch h seq width", h=h)


def _masks(inputs: Arrays, seq_k: int, convert: Callable[[np.ndarray], Any]) -> tuple[Mask, Any]:
    """Turn `attn_mask` into what is kept and what is added; minus infinity drops, and so does a mask that ends early."""
    if "attn_mask" not in inputs:
        return Mask(), None
    mask = inputs["attn_mask"]
    kept = mask if mask.dtype == bool else mask > -np.inf
    short = [(0, 0)] * (mask.ndim - 1) + [(0, seq_k - mask.shape[-1])]
    keep = Mask.keep(convert(np.pad(kept, short)), " ".join(AXES[-mask.ndim :]))
    if mask.dtype == bool:
        return keep, None
    addend = np.pad(np.where(kept, mask, np.zeros_like(mask)), short).astype(inputs["Q"].dtype)
    return keep, convert(addend.reshape((1,) * (4 - mask.ndim) + addend.shape))


def _policy(attributes: Mapping[str, Any], conventions: Mapping[str, Any]) -> Policy:
    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    return Policy(
        cap=attributes.get("softcap", 0.0) or None,
        window=(None if left < 0 else left, None if right < 0 else right),
        **{"softmax_precision": PRECISIONS[attributes.get("softmax_precision")], **conventions},
    )


def _seen_inside(steps: attnspec.step.Trace, mode: int) -> Any:
    """Find what `qk_matmul_output` shows: 0 the scores, 1 after the cap, 2 after bias and mask, 3 the weights."""
    return {
        0: steps["scale"].result,
        1: steps["cap" if "cap" in steps else "scale"].result,
        2: steps["softmax"].arguments["scores"],
        3: steps["softmax"].result,
    }[mode]
