"""The layouts of other projects, one line for each stored tensor.

A line says which parameters the tensor holds (`w_q`; `w_qkv` for three of them, in this order), what it is called, and
how it is laid out, as an einops pattern in the names of axes. Where a tensor holds several parameters, `three` (or
`two`) counts them, each with all its heads; `part` runs over heads instead: first those of one parameter, then those of
the next, inside each of whatever stands before it (`h_kv part`: the query heads of a group, then its key, its value).
"""

Layout = dict[str, tuple[str, str]]
"""What is held: what it is called, and how it is laid out."""


def _separate(
    q: str, k: str, v: str, o: str, *, heads: str, inward: str, outward: str, weight: str = ".weight", bias: str = ".bias"
) -> Layout:
    """Four projections of their own; `heads` is how heads and widths stand, `inward` and `outward` what surrounds them."""
    lines: Layout = {}
    for role, name, h, width, source in (
        ("q", q, "h", "d_k", "d_model"),
        ("k", k, "h_kv", "d_k", "d_key_in"),
        ("v", v, "h_kv", "d_v", "d_value_in"),
    ):
        fanned = heads.format(h=h, width=width)
        lines |= {f"w_{role}": (name + weight, inward.format(heads=fanned, source=source)), f"b_{role}": (name + bias, fanned)}
    return {**lines, "w_o": (o + weight, outward.format(heads=heads.format(h="h", width="d_v"))), "b_o": (o + bias, "d_model")}


def _linear(q: str, k: str, v: str, o: str) -> Layout:
    """Linear layers of PyTorch, which keep their matrix transposed."""
    return _separate(q, k, v, o, heads="({h} {width})", inward="{heads} {source}", outward="d_model {heads}")


def _fused(qkv: str, o: str, rows: str, *, held: str = "qkv") -> Layout:
    """One Linear layer for queries, keys and values."""
    return {
        f"w_{held}": (f"{qkv}.weight", f"({rows}) d_model"),
        f"b_{held}": (f"{qkv}.bias", f"({rows})"),
        "w_o": (f"{o}.weight", "d_model (h d_v)"),
        "b_o": (f"{o}.bias", "d_model"),
    }


_TORCH_OUT: Layout = {"w_o": ("out_proj.weight", "d_model (h d_v)"), "b_o": ("out_proj.bias", "d_model")}
_TORCH_EXTRA: Layout = {"extra_k": ("bias_k", "1 extra (h_kv d_k)"), "extra_v": ("bias_v", "1 extra (h_kv d_v)")}

LAYOUTS: dict[str, Layout] = {
    "torch": {
        "w_qkv": ("in_proj_weight", "(three h d_k) d_model"),
        "b_qkv": ("in_proj_bias", "(three h d_k)"),
        **_TORCH_OUT,
        **_TORCH_EXTRA,
    },
    "torch_separate": {
        "w_q": ("q_proj_weight", "(h d_k) d_model"),
        "w_k": ("k_proj_weight", "(h_kv d_k) d_key_in"),
        "w_v": ("v_proj_weight", "(h_kv d_v) d_value_in"),
        "b_qkv": ("in_proj_bias", "(three h d_k)"),
        **_TORCH_OUT,
        **_TORCH_EXTRA,
    },
    "timm": _fused("qkv", "proj", "three h d_k"),
    "bert": _linear("self.query", "self.key", "self.value", "output.dense"),
    "gpt2": {
        "w_qkv": ("c_attn.weight", "d_model (three h d_k)"),
        "b_qkv": ("c_attn.bias", "(three h d_k)"),
        "w_o": ("c_proj.weight", "(h d_v) d_model"),
        "b_o": ("c_proj.bias", "d_model"),
    },
    "llama": _linear("q_proj", "k_proj", "v_proj", "o_proj"),
    "qwen3": {
        **_linear("q_proj", "k_proj", "v_proj", "o_proj"),
        "gain_q": ("q_norm.weight", "d_k"),
        "gain_k": ("k_norm.weight", "d_k"),
    },
    "gpt_oss": {**_linear("q_proj", "k_proj", "v_proj", "o_proj"), "sinks": ("sinks", "h")},
    "phi3": _fused("qkv_proj", "o_proj", "part d_k"),
    "gpt_neox": _fused("query_key_value", "dense", "h three d_k"),
    "bloom": _fused("query_key_value", "dense", "h three d_k"),
    "falcon": _fused("query_key_value", "dense", "h_kv part d_k"),
    "megatron": _fused("linear_qkv", "linear_proj", "h_kv part d_k"),
    "codegen": _fused("qkv_proj", "out_proj", "four part d_k", held="qvk"),
    "equinox": _linear("query_proj", "key_proj", "value_proj", "output_proj"),
    "flax": _separate(
        "query", "key", "value", "out", heads="{h} {width}", inward="{source} {heads}", outward="{heads} d_model", weight=".kernel"
    ),
    "keras": _separate(
        "query", "key", "value", "attention_output",
        heads="{h} {width}", inward="{source} {heads}", outward="{heads} d_model", weight="/kernel", bias="/bias",
    ),
    "haiku": _separate(
        "query", "key", "value", "linear",
        heads="({h} {width})", inward="{source} {heads}", outward="{heads} d_model", weight="/w", bias="/b",
    ),
    "x_transformers": _linear("to_q", "to_k", "to_v", "to_out"),
    "transformer_lens": {
        "w_q": ("W_Q", "h d_model d_k"), "b_q": ("b_Q", "h d_k"),
        "w_k": ("W_K", "h_kv d_key_in d_k"), "b_k": ("b_K", "h_kv d_k"),
        "w_v": ("W_V", "h_kv d_value_in d_v"), "b_v": ("b_V", "h_kv d_v"),
        "w_o": ("W_O", "h d_v d_model"), "b_o": ("b_O", "d_model"),
    },
    "onnxruntime": {"w_qkv": ("weights", "d_model (three h d_k)"), "b_qkv": ("bias", "(three h d_k)")},
}  # fmt: skip
"""The layouts by the name of the project; `onnxruntime` is its contributed `Attention`, which has no output projection."""
