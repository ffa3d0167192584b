"""The head explorer in a browser: what it shows is what the library computes, by mouse, by touch and by keyboard."""

import dataclasses
import re
from importlib.resources import files

import numpy as np
import pytest

import attnspec
from attnspec.heads.replay import replay
from attnspec.heads.shipped import shipped
from attnspec_docs.explorer import contributions

pytestmark = pytest.mark.site
RUN = shipped()
REPLAYS = {layer.index: replay(layer) for layer in RUN.layers}
SAT = RUN.tokens.index("sat")


@pytest.fixture
def opened(browser, built_site):
    contexts, heard = [], []

    def opened(address="", **settings):
        contexts.append(browser.new_context(**settings))
        tab = contexts[-1].new_page()
        tab.on("console", lambda message: heard.append(message.text) if message.type in {"error", "warning"} else None)
        tab.on("pageerror", lambda error: heard.append(str(error)))
        tab.goto((built_site / "explorer.html").as_uri() + address)
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert not heard


def without(layer, off):
    """For each word, the share of the length of y, b_o apart, that is lost without some heads: two runs with gates, in float64."""
    wide = {name: array.astype(np.float64) for name, array in vars(layer.parameters).items() if array is not None}
    parameters, x = attnspec.Parameters(**wide), layer.x.astype(np.float64)
    gates = np.ones(len(parameters.w_q))
    gates[list(off)] = 0
    whole = attnspec.multi_head_attention(x, parameters)[0]
    rest = attnspec.multi_head_attention(x, dataclasses.replace(parameters, gates=gates))[0]
    return np.linalg.norm(whole - rest, axis=-1) / np.linalg.norm(whole - parameters.b_o, axis=-1)


def shown_losses(tab):
    return np.array([float(text.removesuffix(" %")) / 100 for text in tab.locator(".losses tbody td:last-child").all_inner_texts()])


def off(tab):
    return [int(text.split()[1]) for text in tab.locator(".chips.off button").all_inner_texts()]


def plain(text):
    """A text with the minus of a keyboard in place of the sign that is printed."""
    return text.replace("\N{MINUS SIGN}", "-")


def middle(tab, selector):
    box = tab.locator(selector).bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


@pytest.mark.parametrize("replayed", REPLAYS.values(), ids=REPLAYS)
def test_what_the_heads_add_sums_up_to_the_output(replayed):
    y = replayed.steps["mix"].result[0]
    assert contributions(replayed).sum(axis=0) + replayed.layer.parameters.b_o == pytest.approx(y, abs=1e-5)


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (0, 2), (1, 8), (5, 11), (5, 3)])
def test_the_weights_are_those_of_the_library(opened, layer, head):
    tab = opened(f"#layer={layer}&head={head}")
    weights = REPLAYS[layer].weights[head]
    assert tab.locator("table.weights tbody td").all_inner_texts() == [f"{weight:.2f}" for weight in weights.ravel()]
    sentence = tab.locator(".explorer-looks").inner_text()
    favourite = weights[SAT].argmax()
    assert sentence.startswith(f'Head {head} of layer {layer}: "sat" gives {weights[SAT].max():.2f} to')
    assert RUN.tokens[favourite] in sentence


@pytest.mark.parametrize("word", range(0, len(RUN.tokens), 3))
def test_the_arrays_are_those_of_the_library(opened, word):
    layer, head = 1, 8
    tab = opened(f"#layer={layer}&head={head}&word={word}")
    steps = REPLAYS[layer].steps
    expected = {"x": REPLAYS[layer].layer.x[0, word], **{name: steps[name].result[0, word] for name in ("concatenate", "mix")}}
    expected |= {name: steps[name].result[0, head, word] for name in ("project_queries", "project_keys", "project_values", "blend")}
    for name, vector in expected.items():
        said = plain(tab.locator(f'[data-array="{name}"] .numbers').inner_text())
        size, *numbers = re.search(r": (\d+) numbers from (\S+) to (\S+), length ([\d.]+\d)", said).groups()
        assert int(size) == len(vector)
        assert [float(number) for number in numbers] == pytest.approx([vector.min(), vector.max(), np.linalg.norm(vector)], abs=0.0055)
    for name in ("score", "scale", "softmax"):
        cells = tab.locator(f'[data-array="{name}"] .cells b').all_inner_texts()
        assert [float(plain(cell)) for cell in cells] == pytest.approx(steps[name].result[0, head, word], abs=0.0075)


def test_every_step_shows_its_axes_and_sizes(opened):
    tab = opened()
    items = tab.locator(".path > li").all_inner_texts()
    for call, item in zip(REPLAYS[0].steps.calls, items[1:], strict=True):
        assert call.step.name in item
        assert " ".join(call.axes["return"]) in " ".join(item.split())
        assert " × ".join(map(str, call.result.shape)) in item


@pytest.mark.parametrize(("layer", "heads"), [(0, [2]), (1, [0, 8]), (5, [11]), (5, [1, 3, 5, 7, 9, 11]), (1, list(range(12)))])
def test_what_is_lost_is_what_gates_lose(opened, layer, heads):
    tab = opened(f"#layer={layer}&head=0&off={','.join(map(str, heads))}")
    expected = without(RUN.layers[list(REPLAYS).index(layer)], heads)
    assert off(tab) == heads
    assert shown_losses(tab) == pytest.approx(expected, abs=0.0006)
    sentence = tab.locator(".explorer-lost").inner_text()
    assert all(f"{100 * share:.1f} %" in sentence for share in (shown_losses(tab).min(), shown_losses(tab).max()))


def test_without_heads_their_slots_are_empty_and_y_is_what_is_left(opened):
    tab = opened(f"#layer=0&head=2&word={SAT}&off=2,4")
    gates = np.ones(12, np.float32)
    gates[[2, 4]] = 0
    layer = RUN.layers[0]
    with attnspec.trace() as steps:
        attnspec.multi_head_attention(layer.x, dataclasses.replace(layer.parameters, gates=gates))
    joined, y = (np.linalg.norm(steps[name].result[0, SAT]) for name in ("concatenate", "mix"))
    said = tab.locator('[data-array="concatenate"] .numbers').inner_text()
    assert f"length {joined:.2f}. Framed: the slot of head 2; empty: the slots of the heads 2 and 4." in said
    assert f"length {y:.2f}; without the heads 2 and 4." in tab.locator('[data-array="mix"] .numbers').inner_text()


def test_the_pointer_previews_a_word_and_a_click_keeps_it(opened):
    tab = opened()
    tab.hover("table.weights tbody tr:nth-child(3) td:last-child")
    assert 'layer 0: "cat" gives' in tab.locator(".explorer-looks").inner_text()
    tab.hover("h1")
    assert 'layer 0: "sat" gives' in tab.locator(".explorer-looks").inner_text()
    tab.click("table.weights tbody tr:nth-child(3) td:last-child")
    tab.hover("h1")
    assert 'layer 0: "cat" gives' in tab.locator(".explorer-looks").inner_text()


def test_everything_works_by_keyboard(opened):
    tab = opened()
    tab.focus("#explorer-head")
    tab.keyboard.press("ArrowDown")
    assert tab.locator("#shown-head").inner_text() == "Layer 0, head 3"
    tab.focus("table.weights tbody tr:nth-child(4) button")
    tab.keyboard.press("Tab")
    assert 'Head 3 of layer 0: "on" gives' in tab.locator(".explorer-looks").inner_text()
    tab.focus(".chips.on button:nth-child(6)")
    for key, expected, pressed in (("Enter", [5], "false"), ("Space", [], "true"), ("Space", [5], "false")):
        tab.keyboard.press(key)
        assert off(tab) == expected
        assert tab.evaluate("[document.activeElement.textContent, document.activeElement.ariaPressed]") == ["head 5", pressed]


def test_the_address_keeps_the_state(opened):
    tab = opened()
    tab.select_option("#explorer-layer", "5")
    tab.select_option("#explorer-word", label='"mat"')
    tab.click(".chips >> text='head 10'")
    tab.click(".chips >> text='head 3'")
    assert tab.url.endswith("#layer=5&head=2&word=6&off=3,10")
    tab.reload()
    assert tab.locator(".explorer-looks").inner_text().startswith('Head 2 of layer 5: "mat"')
    assert off(tab) == [3, 10]
    tab.evaluate("location.hash = '#layer=1&head=8&word=3'")
    tab.wait_for_function("document.querySelector('#shown-head').textContent == 'Layer 1, head 8'")
    assert off(tab) == []
    tab.click(".chips >> text='head 3'")
    tab.select_option("#explorer-layer", "0")
    assert off(tab) == [], "the heads of another layer are others"


@pytest.mark.parametrize("address", ["#layer=2&head=12&word=8", "#layer=&head=x&off=77,y,-1", "#without-some-heads"])
def test_an_address_that_names_nothing_changes_nothing(opened, address):
    tab = opened(address)
    assert tab.locator(".explorer-looks").inner_text().startswith('Head 2 of layer 0: "sat"')
    assert off(tab) == []


def test_the_mouse_drags_heads_off_and_back(opened):
    tab = opened()
    tab.locator(".boxes").scroll_into_view_if_needed()
    for start, end, expected in ((".on >> text='head 2'", ".chips.off", [2]), (".off >> text='head 2'", ".chips.on", [])):
        tab.mouse.move(*middle(tab, start))
        tab.mouse.down()
        tab.mouse.move(*middle(tab, end), steps=4)
        tab.mouse.up()
        assert off(tab) == expected
    tab.mouse.move(*middle(tab, ".on >> text='head 2'"))
    tab.mouse.down()
    tab.mouse.move(*middle(tab, ".explorer-lost"), steps=4)
    tab.mouse.up()
    assert off(tab) == [], "it was dropped elsewhere"
    tab.click(".on >> text='head 2'", button="right")
    assert off(tab) == []
    tab.click(".on >> text='head 2'")
    assert off(tab) == [2]


def test_a_finger_drags_heads_off(opened):
    tab = opened(has_touch=True, is_mobile=True, viewport={"width": 390, "height": 844})
    tab.locator(".boxes").scroll_into_view_if_needed()
    finger = tab.context.new_cdp_session(tab)
    (x, y), (to_x, to_y) = middle(tab, ".on >> text='head 7'"), middle(tab, ".chips.off")
    finger.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    for part in (0.25, 0.5, 0.75, 1):
        point = {"x": x + part * (to_x - x), "y": y + part * (to_y - y)}
        finger.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [point]})
    finger.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert off(tab) == [7]
    tab.tap(".on >> text='head 0'")
    tab.wait_for_timeout(400)  # a click may follow, on what has moved to that place
    assert off(tab) == [0, 7]


def test_one_press_leaves_only_one_head_or_all(opened):
    tab = opened("#layer=1&head=8")
    tab.click("text='only the chosen head on'")
    assert off(tab) == [head for head in range(12) if head != 8]
    tab.click("text='all on'")
    assert off(tab) == []
    assert shown_losses(tab).tolist() == [0] * len(RUN.tokens)


def test_without_scripts_there_is_one_head_and_every_shape(opened):
    tab = opened(java_script_enabled=False)
    assert tab.locator("table.weights tbody td").all_inner_texts() == [f"{weight:.2f}" for weight in REPLAYS[0].weights[2].ravel()]
    assert tab.locator("noscript").is_visible()
    assert tab.locator(".path > li").count() == len(REPLAYS[0].steps) + 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_is_accessible_when_heads_are_off(opened, scheme, width):
    tab = opened("#layer=1&head=7&word=4&off=1,2,8", color_scheme=scheme, viewport={"width": width, "height": 844})
    tab.add_script_tag(path=str(files("axe_playwright_python") / "axe.min.js"))
    found = tab.evaluate("axe.run({resultTypes: ['violations'], preload: false})")["violations"]
    assert not {one["help"]: [node["html"] for node in one["nodes"]] for one in found if one["impact"] in {"serious", "critical"}}
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
