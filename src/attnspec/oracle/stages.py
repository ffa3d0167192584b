"""The steps of a counterexample, and which of them is not done as it should be."""

from collections.abc import Iterable

from .faults.fault import Fault
from .problem import Problem

_OF_KINDS = {
    "scale_wrong_dim": "scale", "scale_missing_or_double": "scale", "scale_option_ignored": "scale", "scale_wrong_place": "scale",
    "softmax_denominator": "softmax", "softmax_wrong_axis": "softmax", "softcap_order_or_missing": "cap",
    "heads_not_separated": "score", "head_split_merge_order": "concatenate", "head_seq_axis_swap": "score", "batch_axis_mixup": "blend",
    "additive_position_bias": "bias", "dropout_mode": "drop", "dropout_arithmetic": "drop", "gqa_head_mapping": "share_keys",
    "rope_pairing": "rotate", "rope_position": "rotate", "rope_wrong_axis": "rotate", "head_mask_prune": "gate",
    "projection_bias": "project_values", "qkv_pack_order": "project_queries", "operand_routing": "project_keys",
    "activation": "project_queries", "cache_extent": "append_to_cache", "cache_structure": "append_to_cache",
}  # fmt: skip
_MASKED = ("mask_", "causal_", "window_", "fully_masked_row", "ragged_packing")


def _of_kind(kind: str) -> str:
    return "mask" if kind.startswith(_MASKED) else _OF_KINDS.get(kind, "")


def stages(problem: Problem, faults: Iterable[Fault], kinds: Iterable[str], /) -> tuple[tuple[str, str, bool], ...]:
    """List the steps of a problem, with the axes of what each gives, and mark those that the faults stand in for.

    Args:
        problem: the problem.
        faults: the faults that were found.
        kinds: the kinds of what was found, where no fault is known.

    Returns:
        For each step its name, its result's axes with their sizes, and whether the fault is there.
    """
    marked: set[str] = set()
    for fault in faults:
        marked |= set(fault.steps(problem)) if fault.steps is not None else {_of_kind(fault.kind)}
    if not marked:
        marked = set(map(_of_kind, kinds))
    _, steps = problem.traced()
    found = []
    for call in steps.calls:
        axes = zip(call.axes["return"], call.result.shape, strict=False)
        found.append((call.step.name, ", ".join(f"{axis}={size}" for axis, size in axes), call.step.name in marked))
    return tuple(found)
