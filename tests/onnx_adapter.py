"""ONNX `Attention`, said in the words of this specification, and as ONNX Runtime runs it."""

import functools
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from einops import rearrange

import attnspec
from attnspec import Cache, Mask, Policy, Positions
from attnspec.step import Trace

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")
MODES = (0, 1, 2, 3)  # of qk_matmul_output: the scores, after the cap, after bias and mask, the weights
PRECISIONS = {None: None, 1: "float32", 11: "float64"}  # the numbers that ONNX gives these dtypes

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One call of the operator, and what ONNX' reference implementation gave."""

    opset: int
    model: Any
    attributes: dict[str, Any]
    inputs: Arrays
    outputs: Arrays
    rtol: float
    atol: float

    def widen(self, dtype: Any) -> "Case":
        """Give the same inputs in a wider dtype."""
        return replace(self, inputs={name: x if x.dtype.kind in "bi" else x.astype(dtype) for name, x in self.inputs.items()})


@dataclass(frozen=True)
class Call:
    """The operator as a call of `attnspec.attend`: queries, keys and values of each query head, and the options."""

    arguments: tuple[Any, Any, Any]
    options: dict[str, Any]
    present: dict[str, Any]

    def trace(self) -> Trace:
        """Compute it and keep every step."""
        with attnspec.trace() as steps:
            attnspec.attend(*self.arguments, **self.options)
        return steps


@functools.cache
def collect_cases() -> dict[str, Case]:
    """Let ONNX generate its node cases of `Attention`, without those that say the same in other operators."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():  # it generates the cases of every operator, and those of Cast overflow on purpose
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"onnx\.backend\.test\.case\.node\.")
        cases = collect_testcases("Attention")
    return {case.name.removeprefix("test_attention_"): _read(case) for case in cases if not case.name.endswith("_expanded")}


def _read(case: Any) -> Case:
    from onnx.helper import get_attribute_value

    (node,), ((inputs, outputs),), (opset,) = case.model.graph.node, case.data_sets, case.model.opset_import
    attributes = {attribute.name: get_attribute_value(attribute) for attribute in node.attribute}
    mode = attributes.pop("qk_matmul_output_mode", 0)
    names = [name for name, given in zip((*OUTPUTS[:3], show(mode)), node.output, strict=False) if given]
    return Case(
        opset=opset.version,
        model=case.model,
        attributes=attributes,
        inputs=dict(zip([name for name, given in zip(INPUTS, node.input, strict=False) if given], inputs, strict=True)),
        outputs=dict(zip(names, outputs, strict=True)),
        rtol=case.rtol,
        atol=case.atol,
    )


def show(mode: int) -> str:
    """Name the fourth output by what it shows."""
    return f"{OUTPUTS[3]}:{mode}"


def to_torch(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(x.astype(np.float32)).bfloat16() if x.dtype == ml_dtypes.bfloat16 else torch.tensor(x)


def to_numpy(x: Any) -> np.ndarray:
    if isinstance(x, np.ndarray):
        return x
    return x.float().numpy().astype(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def attention(
    inputs: Arrays, attributes: Mapping[str, Any], *, convert: Callable[[np.ndarray], Any] = np.asarray, modes: Collection[int] = ()
) -> dict[str, np.ndarray]:
    """Compute the operator's outputs by the specification.

    Args:
        inputs: its inputs by name, as NumPy arrays.
        attributes: its attributes by name.
        convert: brings an array to the library to compute in.
        modes: what to show of the scores and weights.

    Returns:
        Its outputs by name.
    """
    call = translate(inputs, attributes, convert=convert)
    blended = attnspec.attend(*call.arguments, **call.options)
    shown = peek(call.trace()) if modes else {}
    outputs = {"Y": attnspec.concatenate(blended) if inputs["Q"].ndim == 3 else blended, **call.present}
    return {name: to_numpy(x) for name, x in {**outputs, **{show(mode): shown[mode] for mode in modes}}.items()}


def translate(inputs: Arrays, attributes: Mapping[str, Any], *, convert: Callable[[np.ndarray], Any] = np.asarray) -> Call:
    """Say a call of the operator as a call of `attnspec.attend`."""
    heads = {"Q": attributes.get("q_num_heads"), "K": attributes.get("kv_num_heads"), "V": attributes.get("kv_num_heads")}
    queries, keys, values = (_split(convert(inputs[name]), h) for name, h in heads.items())
    offset = 0
    if "past_key" in inputs:
        past = Cache(convert(inputs["past_key"]), convert(inputs["past_value"]))
        offset, cache = past.seen, past.append(keys, values)
        keys, values = cache.keys, cache.values
    keep, bias = _split_mask(inputs, keys.shape[2], convert)
    if "nonpad_kv_seqlen" in inputs:
        lengths = convert(inputs["nonpad_kv_seqlen"])
        offset, keep = lengths - queries.shape[2], keep & Mask.lengths(lengths)
    sides = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    policy = Policy(
        cap=attributes.get("softcap", 0.0) or None,
        window=tuple(None if size < 0 else size for size in sides),
        softmax_precision=PRECISIONS[attributes.get("softmax_precision")],
    )
    positions = Positions(attnspec.count_positions(queries, offset), attnspec.count_positions(keys))
    options = {"keep": keep, "bias": bias, "scale": attributes.get("scale"), "positions": positions, "policy": policy}
    return Call(
        (queries, attnspec.share_keys(keys, h=queries.shape[1]), attnspec.share_values(values, h=queries.shape[1])),
        {**options, "causal": bool(attributes.get("is_causal", 0))},
        {"present_key": keys, "present_value": values},
    )


def _split(tokens: Any, h: int | None) -> Any:
    return tokens if tokens.ndim == 4 else rearrange(tokens, "batch seq (h width) -> batch h seq width", h=h)


def _split_mask(inputs: Arrays, seq_k: int, convert: Callable[[np.ndarray], Any]) -> tuple[Mask, Any]:
    """Say `attn_mask` as what is kept and what is added: minus infinity drops a key, and so does a mask that ends early."""
    if "attn_mask" not in inputs:
        return Mask(), None
    mask = inputs["attn_mask"]
    kept = mask if mask.dtype == bool else mask > -np.inf
    short = [(0, 0)] * (mask.ndim - 1) + [(0, seq_k - mask.shape[-1])]
    keep = Mask.keep(convert(np.pad(kept, short)), " ".join(("batch", "h", "seq_q", "seq_k")[-mask.ndim :]))
    if mask.dtype == bool:
        return keep, None
    addend = np.pad(np.where(kept, mask, np.zeros_like(mask)), short)
    return keep, convert(addend.reshape((1,) * (4 - mask.ndim) + addend.shape))


def peek(steps: Trace) -> dict[int, Any]:
    """Find in a trace what `qk_matmul_output` shows in each mode."""
    scaled, softmax = steps["scale"].result, steps["softmax"]
    return {0: scaled, 1: steps["cap"].result if "cap" in steps else scaled, 2: softmax.arguments["scores"], 3: softmax.result}


def onnx_model(inputs: Arrays, attributes: Mapping[str, Any], *, opset: int, modes: Collection[int] = MODES) -> Any:
    """Build a model that runs the operator once for each mode, on the same inputs."""
    from onnx import helper

    present = OUTPUTS[1:3] if "past_key" in inputs else ("", "")
    names = [name if name in inputs else "" for name in INPUTS[: 1 + max(map(INPUTS.index, inputs))]]
    outputs = {mode: [f"{name}:{mode}" if name else "" for name in ("Y", *present, OUTPUTS[3])] for mode in modes}
    nodes = [helper.make_node("Attention", names, outputs[mode], **attributes, qk_matmul_output_mode=mode) for mode in modes]
    kinds = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in inputs.items()}
    given = [helper.make_tensor_value_info(name, kinds[name], x.shape) for name, x in inputs.items()]
    wanted = [helper.make_tensor_value_info(name, kinds["Q"], None) for node in nodes for name in node.output if name]
    graph = helper.make_graph(nodes, "attention", given, wanted)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)


def run_onnxruntime(model: Any, inputs: Arrays) -> dict[str, np.ndarray]:
    """Run a model by ONNX Runtime on the CPU, as it stands."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([output.name for output in model.graph.output], session.run(None, dict(inputs)), strict=True))
