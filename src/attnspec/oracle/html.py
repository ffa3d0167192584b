"""A report as one HTML file that needs no other."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from string import Template

import numpy as np

from .problem import Array
from .report import Counterexample, Report
from .show import distance, error_of, opening, power_of, size_of, standing

_HERE = '<span class="here">here it deviates</span>'
_COLUMNS = 64
_ROWS = 256
_GRADES = (
    (1.0, "within the tolerance"),
    (10.0, "up to 10 times"),
    (1e3, "up to 1000 times"),
    (1e6, "up to a million times"),
)

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --soft: #f2f3f5; --line: #c9ccd1; --dim: #5a5f66;
  --conforms: #14692f; --deviates: #a3161a; --undecided: #7a4d00;
  --g0: #eef1f4; --g1: #fde0a8; --g2: #f7a85f; --g3: #e0603f; --g4: #a01d3c; --g5: #3b1054; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #16181b; --soft: #22262b; --line: #444a52; --dim: #a4abb3;
    --conforms: #6fd08c; --deviates: #ff8b85; --undecided: #f0bd62; --g0: #2a2f36; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 64rem; background: var(--paper); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; line-height: 1.35; border-left: .4rem solid var(--$verdict); padding-left: .8rem; margin: .5rem 0 1.5rem; }
h1 b { color: var(--$verdict); }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
h1, p, li, td:last-child { overflow-wrap: anywhere; }
p { margin: .4rem 0; }
.dim { color: var(--dim); }
.scroll { overflow-x: auto; }
pre { background: var(--soft); padding: .8rem; overflow-x: auto; font-size: .85rem; line-height: 1.4; }
table { border-collapse: collapse; }
.list { width: 100%; }
.list th, .list td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); }
.list .axes { font-family: ui-monospace, monospace; font-size: .85rem; }
.list td:first-child { white-space: nowrap; }
.bad td:nth-child(-n+2), .bad .here { color: var(--deviates); font-weight: 600; }
.maps { display: flex; flex-wrap: wrap; gap: 1rem 2rem; }
.maps > div { max-width: 100%; }
.map caption { text-align: left; font-size: .9rem; padding-bottom: .2rem; }
.map th { font-size: .7rem; font-weight: 400; color: var(--dim); padding: 0 .3rem; text-align: right; white-space: nowrap; }
.map thead th { text-align: center; }
.map td { min-width: 2.1rem; height: 1.6rem; padding: 0 .15rem; text-align: center; font-size: .65rem; border: 1px solid var(--paper);
  overflow-wrap: normal; }
.g0 { background: var(--g0); color: var(--dim); }
.g1 { background: var(--g1); color: #000; } .g2 { background: var(--g2); color: #000; } .g3 { background: var(--g3); color: #000; }
.g4 { background: var(--g4); color: #fff; } .g5 { background: var(--g5); color: #fff; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1rem; padding: 0; margin: .6rem 0; list-style: none; font-size: .8rem; }
.legend span { display: inline-block; width: 1rem; height: 1rem; vertical-align: -.15rem; margin-right: .3rem;
  border: 1px solid var(--line); }
</style>
</head>
<body>
<main>
<h1>$opening</h1>
$sections
</main>
</body>
</html>
""")


def page(report: Report, /) -> str:
    """Write a report as one HTML file.

    Args:
        report: the report.

    Returns:
        The file's text; it loads nothing.
    """
    head = opening(report).removesuffix(report.sentence)
    sections = [*_findings(report), *_example(report.counterexample), *_stages(report), *_checks(report), *_power(report)]
    return _PAGE.substitute(
        title=escape(f"{report.subject}: {report.verdict}"),
        verdict=report.verdict,
        opening=f"<b>{escape(head)}</b>{escape(report.sentence)}",
        sections="\n".join(sections),
    )


def _findings(report: Report) -> Iterator[str]:
    if report.findings:
        kinds = [escape(found.kind).replace("_", "_<wbr>") for found in report.findings]
        rows = [
            _row([found.level, kind, _said(found.sentence, found.evidence)], bad=found.level == "wrong")
            for found, kind in zip(report.findings, kinds, strict=True)
        ]
        yield "<h2>What was found</h2>"
        yield _table(["", "kind", "what it is"], rows)


def _said(sentence: str, evidence: str) -> str:
    return escape(sentence) + (f' <span class="dim">({escape(evidence)})</span>' if evidence else "")


def _row(cells: Sequence[str], *, bad: bool = False) -> str:
    return f"<tr{_marked(bad=bad)}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _marked(*, bad: bool) -> str:
    return ' class="bad"' if bad else ""


def _table(titles: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{title}</th>' if title else "<td></td>" for title in titles)
    return f'<div class="scroll"><table class="list"><thead><tr>{head}</tr></thead><tbody>\n' + "\n".join(rows) + "\n</tbody></table></div>"


def _example(example: Counterexample | None) -> Iterator[str]:
    if example is None:
        return
    yield "<h2>The smallest input that shows it</h2>"
    yield f"<p>{escape(size_of(example))}; seed {example.problem.seed}. {escape(distance(example))}</p>"
    if example.snippet:
        yield f'<pre tabindex="0" aria-label="Code that shows it"><code>{escape(example.snippet)}</code></pre>'
    error = error_of(example)
    if error is not None and error.size:
        yield from _maps(error, is_layer=example.problem.is_layer)


def _maps(error: Array, *, is_layer: bool) -> Iterator[str]:
    """Draw the error: of a layer a map for each sample, of attention alone one for all heads."""
    yield "<h2>Where it is wrong</h2>"
    names = [*(name for _, name in _GRADES), "more", "not finite"]
    items = (f'<li><span class="g{grade}" aria-hidden="true"></span>{name}</li>' for grade, name in enumerate(names))
    yield "<p>The error in units of its tolerance; where several numbers share a cell, the largest.</p>"
    yield f'<ul class="legend" aria-label="Colours">{"".join(items)}</ul>'
    if is_layer:
        maps = [_map(f"Sample {index}: each query's channels", "query", "channel", sample) for index, sample in enumerate(error)]
    else:
        maps = [_map(f"Sample {index}: each head's queries", "head", "query", sample.max(-1)) for index, sample in enumerate(error)]
    yield f'<div class="maps">{"".join(maps)}</div>'


def _map(title: str, row: str, column: str, error: Array) -> str:
    """Draw a map as a table, so that its numbers can be read too."""
    rows, columns = _bundles(error.shape[0], _ROWS), _bundles(error.shape[1], _COLUMNS)
    head = "".join(f'<th scope="col">{_name(where)}</th>' for where in columns)
    lines = []
    for i in rows:
        cells = "".join(_cell(float(error[i[:, None], j].max())) for j in columns)
        lines.append(f'<tr><th scope="row">{row} {_name(i)}</th>{cells}</tr>')
    top = f'<tr><th scope="col"><span aria-hidden="true">{column}</span></th>{head}</tr>'
    where = f'role="region" tabindex="0" aria-label="{title}, {len(rows)} rows by {len(columns)} columns"'
    table = f'<table class="map"><caption>{title}</caption><thead>{top}</thead><tbody>{"".join(lines)}</tbody></table>'
    return f'<div class="scroll" {where}>{table}</div>'


def _bundles(size: int, most: int) -> list[Array]:
    """Bundle what is too much for one map."""
    return np.array_split(np.arange(size), min(size, most))


def _name(where: Array) -> str:
    return str(where[0]) if len(where) == 1 else f"{where[0]}-{where[-1]}"


def _cell(error: float) -> str:
    if math.isinf(error):
        return f'<td class="g{len(_GRADES) + 1}">inf</td>'
    grade = next((grade for grade, (limit, _) in enumerate(_GRADES) if error <= limit), len(_GRADES))
    return f'<td class="g{grade}">{_brief(error)}</td>'


def _brief(error: float) -> str:
    """Write a number in as few letters as possible."""
    if error >= 1000:
        return f"{error:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{error:.1f}".removesuffix(".0") if error < 10 else f"{error:.0f}"


def _stages(report: Report) -> Iterator[str]:
    if report.stages:
        rows = [
            _row([escape(step), f'<span class="axes">{escape(shape)}</span>', _HERE if deviates else ""], bad=deviates)
            for step, shape, deviates in report.stages
        ]
        yield "<h2>The steps, and the shape of what each gives</h2>"
        yield _table(["step", "axes", ""], rows)


def _checks(report: Report) -> Iterator[str]:
    if report.checks:
        ends = [standing(check) for check in report.checks]
        rows = [_row([end, _said(check.name, check.detail)], bad=end == "fails") for end, check in zip(ends, report.checks, strict=True)]
        yield "<h2>What was looked at</h2>"
        yield _table(["", "what must hold"], rows)


def _power(report: Report) -> Iterator[str]:
    yield "<h2>How much this run could have seen</h2>"
    yield from (f"<p>{escape(sentence)}</p>" for sentence in power_of(report.power))
    yield f'<p class="dim">{report.problems} problems in {report.seconds:.1f} s, drawn from seed {report.seed}.</p>'
