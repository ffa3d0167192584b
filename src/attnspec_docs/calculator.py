"""The shape calculator: a form, and what its script needs to work the ledger out at any sizes."""

import json
from html import escape

from attnspec.bookkeeping.export import DTYPES, formulas
from attnspec.bookkeeping.figures import colour_of
from attnspec.bookkeeping.glossary import GLOSSARY
from attnspec.spec.sizes import OF_HEADS, OF_INPUTS, Size

from .blocks import block
from .steps import SIZES, ledger

DEFAULTS = {name: SIZES[name] for name in ("d_model", "h", "batch", "seq_q")}
"""What the form shows at first: the sizes of the running example."""

PRESETS = {
    "Transformer base": {"d_model": 512, "h": 8, "bias": 0, "causal": 0},
    "GPT-2 small": {"d_model": 768, "h": 12, "bias": 1, "causal": 1},
    "Llama 3 8B": {"d_model": 4096, "h": 32, "h_kv": 8, "bias": 0, "causal": 1},
    "MiniLM-L6": {"d_model": 384, "h": 12, "bias": 1, "causal": 0},
}
"""Layers of known models: the first as its paper has it, in the encoder; the others as their weights have it."""

_OPTIONAL = {rule.name: rule.default for rule in (*OF_HEADS, *OF_INPUTS) if isinstance(rule, Size) and rule.default}


@block
def calculator() -> str:
    """The whole calculator, and what stands in its place without its script."""
    data = formulas()
    steps = dict.fromkeys(line["step"] for chain in data["chains"].values() for line in chain)
    cells = [cell for chain in data["chains"].values() for line in chain for cell in (*line["arguments"].values(), line["result"])]
    data["colours"] = {axis: colour_of(axis) for cell in cells for axis in cell["axes"]}
    data["presets"] = PRESETS
    return "\n".join([
        _form(),
        '<p id="calculator-error" aria-live="polite"></p>',
        '<div id="calculator-results"></div>',
        '<div id="calculator-default" markdown>',
        "",
        "The form needs JavaScript. Without it, this is the ledger of the running example:",
        "",
        ledger(**{name.replace("seq_q", "seq"): str(size) for name, size in DEFAULTS.items()}),
        "",
        "</div>",
        '<div id="calculator-steps" hidden markdown>',
        "",
        " ".join(f"[`{name}`][attnspec.{name}]" for name in steps),
        "",
        "</div>",
        f'<script type="application/json" id="calculator-data">{json.dumps(data, separators=(",", ":"))}</script>',
        '<script src="assets/calculator.js"></script>',
    ])  # fmt: skip


def _form() -> str:
    presets = "".join(f'<button type="button" class="md-button" data-preset="{name}">{name}</button>' for name in PRESETS)
    layer = "".join(map(_field, ("d_model", "h", "h_kv", "d_k", "d_v"))) + _box("bias", "the projections have biases", checked=True)
    tp = _labelled("tp", "ranks that share the heads; empty for no sharing", _input("tp", ""))
    dtypes = "".join(f"<option{' selected' * (name == 'float32')}>{name}</option>" for name in DTYPES)
    dtype = _labelled("dtype", "of all numbers with a fraction", f'<select name="dtype">{dtypes}</select>')
    run = "".join(map(_field, ("batch", "seq_q", "seq_k"))) + dtype + tp + _box("causal", "no query sees a later key")
    return (
        '<form id="calculator-form" hidden aria-label="Sizes">'
        f'<div class="presets" role="group" aria-label="Layers of known models">{presets}</div>'
        f"<fieldset><legend>The layer</legend>{layer}</fieldset><fieldset><legend>What it runs on</legend>{run}</fieldset></form>"
    )


def _field(name: str) -> str:
    """The input of one size, with the meaning of its axis."""
    default = f"; empty for {_OPTIONAL[name].replace('//', ' / ')}" if name in _OPTIONAL else ""
    meaning = GLOSSARY[name].meaning.partition(";")[0]
    return _labelled(name, meaning + default, _input(name, DEFAULTS.get(name, "")), colour_of(name))


def _input(name: str, value: object) -> str:
    return f'<input name="{name}" value="{value}" inputmode="numeric" autocomplete="off" maxlength="9" aria-describedby="calculator-error">'


def _box(name: str, meaning: str, *, checked: bool = False) -> str:
    return _labelled(name, meaning, f'<input type="checkbox" name="{name}"{" checked" * checked}>')


def _labelled(name: str, meaning: str, control: str, colour: str = "inherit") -> str:
    return f'<label><code style="color:{colour}">{name}</code>{control}<small>{escape(meaning)}</small></label>'
