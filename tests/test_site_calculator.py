"""The shape calculator in a browser: every number and every sentence of the page is the library's."""

import itertools
import random
import re

import pytest

import attnspec
from attnspec.bookkeeping.export import DTYPES
from attnspec.bookkeeping.network import crossings
from attnspec.bookkeeping.show import _sizes, short_bytes

pytestmark = pytest.mark.site

SIZES = ("d_model", "h", "h_kv", "d_k", "d_v", "batch", "seq_q", "seq_k", "tp")
EMPTY = dict.fromkeys(SIZES, "")
DEFAULT = EMPTY | {"d_model": "512", "h": "8", "batch": "2", "seq_q": "6", "dtype": "float32", "bias": True, "causal": False}
NO_SIZES = ("", "0", "-3", "2.5", "1e3", "x", "+7", "007", "it's", '"', """'"\\""", "٣")

FILL = """settings => {
    const form = document.getElementById("calculator-form");
    for (const [name, value] of Object.entries(settings)) form.elements[name][typeof value === "boolean" ? "checked" : "value"] = value;
    form.dispatchEvent(new Event("input"));
}"""
READ = """() => {
    const rows = table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent.trim()));
    const shown = document.getElementById("calculator-results").checkVisibility({visibilityProperty: true});
    const error = document.getElementById("calculator-error").textContent;
    if (shown === Boolean(error)) return null;
    return error || Object.fromEntries([...document.querySelectorAll("#calculator-results table")].map(table => [table.id, rows(table)]));
}"""
TYPED = """() => Object.fromEntries([...document.querySelectorAll("#calculator-form :is(input, select)")].map(
    field => [field.name, field.type === "checkbox" ? field.checked : field.value]))"""


def the_library_says(settings):
    """The tables of the page, or its error, from `Heads`, `ledger` and `crossings`."""
    given, dtype = {name: size_of(settings[name]) for name in SIZES}, settings["dtype"]
    try:
        heads = attnspec.Heads(**{name: given[name] for name in ("d_model", "h", "h_kv", "d_k", "d_v")})
        inputs = {"batch": given["batch"], "seq": given["seq_q"], "seq_k": given["seq_k"]}
        whole, merged = (books(one, inputs, settings) for one in (heads, heads.merged()))
        share = None if given["tp"] is None else books(heads.split(given["tp"]), inputs, settings)
    except attnspec.ConfigError as error:
        return str(error)
    columns = {f"{heads.h} heads of width {heads.d_k}": whole, f"1 head of width {heads.h * heads.d_k}": merged}
    if share is None:
        return {"calculator-merged": compared(columns), "calculator-chain": chain(whole, dtype)}
    network = crossings(share, given["tp"], cross=given["seq_k"] is not None)
    return {
        "calculator-merged": compared(columns),
        "calculator-shared": compared({f"1 rank of {given['tp']}": share, "all heads on one": whole}),
        "calculator-network": [
            ["array", "axes and sizes", "bytes", "sent by a rank"],
            *([one.array, _sizes(one.cell), sized(one.bytes), sized(one.sent)] for one in network),
        ],
        "calculator-chain": chain(share, dtype),
    }


def size_of(text):
    return int(text) if re.fullmatch(r"[+-]?\d+", text, re.ASCII) else text or None


def books(heads, inputs, settings):
    return attnspec.ledger(heads, **inputs, bias=settings["bias"], causal=settings["causal"], dtype=settings["dtype"])


def sized(number):
    return f"{number:,}" + f" {short_bytes(number)}" * (number >= 1024)


def compared(columns):
    first, second = (ledger.totals() for ledger in columns.values())
    written = {"parameters": "{:,}".format, "multiply_adds": "{:,}".format, "bytes": sized}
    rows = [
        [name.replace("_", "-"), write(first[name]), write(second[name]), f"{first[name] / second[name]:.3f}"]
        for name, write in written.items()
    ]
    return [["total", *columns, "ratio"], *rows]


def chain(ledger, dtype):
    def shape(cell):
        return _sizes(cell) + f" {cell.dtype}" * (cell.dtype != dtype)

    def numbers(line):
        return [*(f"{number:,}" if number else "" for number in (line.parameters, line.multiply_adds)), sized(line.bytes)]

    rows = [["array, step", "axes and sizes", "parameters", "multiply-adds", "bytes"]]
    for stage, lines in itertools.groupby(ledger.lines, lambda line: line.stage):
        rows.append([stage])
        for line in lines:
            rows += [[name, shape(cell), "", "", ""] for name, cell in line.arguments.items()]
            rows.append([line.step, shape(line.result), *numbers(line)])
    return [*rows, ["together", "", *numbers(ledger)]]


def drawn(seed, count):
    """Settings of every kind: small and huge, right ones, and ones with a slip."""
    rng = random.Random(seed)  # noqa: S311
    for _ in range(count):
        most = rng.choice((3, 40, 3000))
        group, kv, tp = (rng.randint(1, 6) for _ in range(3))
        kv *= rng.choice((1, tp))
        sizes = {"d_model": rng.choice((1, group * kv)) * rng.randint(1, most), "h": group * kv, "h_kv": kv, "tp": tp}
        sizes |= {name: rng.randint(1, most) for name in ("d_k", "d_v", "batch", "seq_q", "seq_k")}
        kept = {name: str(size) for name, size in sizes.items() if DEFAULT[name] or rng.random() < 0.5}
        if rng.random() < 0.5:
            kept[rng.choice(SIZES)] = rng.choice((*NO_SIZES, str(rng.randint(1, 50)), "999999999"))
        choices = {"dtype": rng.choice(DTYPES), "bias": rng.random() < 0.5, "causal": rng.random() < 0.5}
        yield DEFAULT | kept | choices


@pytest.fixture
def open_page(browser, built_site):
    """Opens the calculator from its file, at an address; nothing may go wrong in it, or ask the network."""
    address, wrong, contexts = (built_site / "calculator.html").as_uri(), [], []

    def open_at(state="", **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text))
        page.on("request", lambda request: request.url.startswith("file:") or wrong.append(request.url))
        page.goto(address + state)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert not wrong


def test_every_number_and_every_sentence_is_the_librarys(open_page):
    page, chains, errors = open_page(), set(), set()
    for settings in (DEFAULT, *drawn(0, 300)):
        page.evaluate(FILL, settings)
        expected = the_library_says(settings)
        assert page.evaluate(READ) == expected, settings
        if isinstance(expected, str):
            name = re.search(r"(\w+)=", expected)[1]
            assert page.locator("[aria-invalid=true]").evaluate_all("fields => fields.map(field => field.name)") == [name]
            errors.add(re.sub("=.*? (does|must) .*", r" \1", expected))
        else:
            chains.add((len(expected), *(row[0] for row in expected["calculator-chain"])))
    assert len(chains) == 16  # shared or not, grouped or not, with biases or not, causal or not
    assert errors == {
        *(f"Heads: {name} must" for name in ("d_model", "h", "h_kv", "d_k", "d_v", "tp")),
        *(f"Heads: {name} does" for name in ("h", "h_kv", "tp")),
        *(f"ledger: {name} must" for name in ("batch", "seq_q", "seq_k")),
    }


def test_numbers_too_large_for_a_float_are_exact(open_page):
    settings = {**DEFAULT, "d_model": "999999937", "h": "1", "batch": "987654321", "seq_q": "123456789", "seq_k": "999999999"}
    page = open_page()
    page.evaluate(FILL, settings)
    expected = the_library_says(settings)
    assert page.evaluate(READ) == expected
    assert len(expected["calculator-merged"][2][1]) > 40


def test_the_address_keeps_what_was_typed(open_page):
    page = open_page()
    for settings in drawn(1, 8):
        page.evaluate(FILL, settings)
        copy = open_page(page.evaluate("location.hash"))
        assert copy.evaluate(TYPED) == settings
        assert copy.evaluate(READ) == page.evaluate(READ) == the_library_says(settings)
    page.evaluate(FILL, DEFAULT)
    assert "#" not in page.url


def test_an_address_may_be_written_by_hand(open_page):
    page = open_page("#h=16&bias=0&dtype=float99&d_k=12345678901")
    assert page.evaluate(TYPED) == {**DEFAULT, "h": "16", "bias": False, "d_k": "123456789"}
    page.evaluate("location.hash = 'what-is-counted'")  # an anchor is no settings
    page.wait_for_timeout(50)
    assert page.evaluate(TYPED)["h"] == "16"
    page.evaluate("location.hash = 'h=4'")
    page.wait_for_function("document.querySelector('[name=h]').value === '4'")
    assert page.evaluate(READ) == the_library_says({**DEFAULT, "h": "4"})


def test_everything_can_be_done_by_keyboard(open_page):
    page, order = open_page(viewport={"width": 390, "height": 844}), []
    presses = {"GPT-2 small": "Enter", "d_k": "7", "bias": "Space", "dtype": "ArrowDown", "causal": "Space"}
    page.locator("[data-preset]").first.focus()
    while not page.locator("#calculator-chain").evaluate("table => table.parentElement === document.activeElement"):
        order.append(page.evaluate("document.activeElement.name || document.activeElement.dataset.preset"))
        if order[-1] in presses:
            page.keyboard.press(presses[order[-1]])
        page.keyboard.press("Tab")
        assert len(order) < 30
    assert order[4:16] == ["d_model", "h", "h_kv", "d_k", "d_v", "bias", "batch", "seq_q", "seq_k", "dtype", "tp", "causal"]
    changed = {"d_model": "768", "h": "12", "d_k": "7", "bias": False, "dtype": "bfloat16"}
    assert page.evaluate(TYPED) == {**DEFAULT, **changed}
    assert page.evaluate(READ) == the_library_says({**DEFAULT, **changed})
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.activeElement.scrollLeft > 0")


def test_known_layers_are_set_by_one_button(open_page):
    page = open_page("#d_k=9&d_v=5&tp=2&seq_q=10")
    for button in page.locator("[data-preset]").all():
        button.click()
        settings = page.evaluate(TYPED)
        assert page.evaluate(READ) == the_library_says(settings)
        assert {name: settings[name] for name in ("d_k", "d_v", "tp", "seq_q")} == {"d_k": "", "d_v": "", "tp": "2", "seq_q": "10"}


def test_without_javascript_the_page_shows_the_ledger(open_page):
    page = open_page(java_script_enabled=False)
    assert not page.locator("#calculator-form").is_visible()
    *rows, totals = [row.split("\t") for row in page.locator("#calculator-default table").inner_text().split("\n")]
    expected = attnspec.ledger(attnspec.Heads(d_model=512, h=8), batch=2, seq=6)
    assert [row[0] for row in rows[1:]] == [line.step for line in expected.lines]
    assert totals[-3:] == [f"{number:,}" for number in expected.totals().values()]


def test_a_phone_scrolls_the_tables_and_not_the_page(open_page):
    page = open_page("#tp=2", viewport={"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("[...document.querySelectorAll('.books-box')].every(box => box.scrollWidth > box.clientWidth)")
