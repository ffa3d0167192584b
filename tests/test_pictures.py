"""Pictures of numbers and masks: what stands in them, that it can be read, and that the pages for learners show what they say."""

import re
from html import unescape

import numpy as np
import pytest

from attnspec.heads.figures import heatmap, mask_grid
from attnspec_docs import learn


def texts(picture):
    return [(float(x), unescape(text)) for x, text in re.findall(r'<text x="([\d.]+)"[^>]*>([^<]*)</text>', picture)]


def described(picture):
    return unescape(re.search(r"<desc[^>]*>([^<]*)</desc>", picture)[1])


def luminance(colour):
    colour = "".join(2 * digit for digit in colour) if len(colour) == 3 else colour
    parts = [part / 255 for part in bytes.fromhex(colour)]
    return np.dot([0.2126, 0.7152, 0.0722], [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts])


@pytest.mark.parametrize("share", np.linspace(0, 1, 101))
def test_numbers_stand_out_from_their_cells_in_light_and_dark(share):
    """By 4.5 to 1, as WCAG 2 asks; axe does not look into pictures."""
    picture = heatmap(np.array([[share]]), ["a"], ["b"], title="t")
    fills = re.findall(r"fill:light-dark\(#(\w+), #(\w+)\)", picture)
    cell, number = fills[-2:]
    for ground, ink in zip(cell, number, strict=True):
        dim, bright = sorted((luminance(ground), luminance(ink)))
        assert (bright + 0.05) / (dim + 0.05) >= 4.5


def test_a_heatmap_has_every_word_and_number_and_says_the_largest():
    picture = heatmap(np.array([[0.001, 0.999], [0.25, 0.75]]), ["one", "two"], ["<a>", "b"], title="t")
    assert [text for _, text in texts(picture)] == ["<a>", "b", "one", "·", "1.00", "two", "0.25", "0.75"]
    assert described(picture) == "The largest share of each row. one: b 1.00; two: b 0.75."


def test_a_mask_ticks_what_may_be_looked_at_and_says_it():
    picture = mask_grid(np.array([[True, False], [False, False]]), ["one", "two"], ["a", "b"], title="t")
    assert [text for _, text in texts(picture)] == ["a", "b", "one", "✓", "·", "two", "·", "·"]
    assert described(picture) == "The keys of each query. one: a; two: none."


def test_long_words_do_not_run_into_each_other():
    words = ["extraordinarily", "uncharacteristic"]
    (first, _), (second, _), *_ = texts(heatmap(np.ones((1, 2)), ["a"], words, title="t"))
    assert second - first >= 7 * max(map(len, words))


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (learn.head("0.2"), r"previous word \(7 of 8 words, weight 1\.00\)"),
        (learn.head("1.8"), r"next word \(5 of 8 words"),
        (learn.looks("5.11", "5.3"), r'add up to 1\.32: .* in head 5\.11 "cat" \(8 of 8 words.*; in head 5\.3 "mat" \(8 of 8 words'),
        (learn.one_softmax("5", "cat", "mat"), r"“cat” and “mat” together get 0\.013"),
        (learn.resting(), r"In 27 of the 36 heads .* at most 0\.26 times"),
    ],
    ids=["head 0.2", "head 1.8", "looks", "one_softmax", "resting"],
)
def test_the_pages_for_learners_say_what_the_numbers_show(shown, said):
    """Prose stands around these numbers: where one of them changes, several-heads.md has to be read again."""
    assert re.search(said, shown)


def test_masks_in_pictures_are_those_of_the_rules():
    """Of each kind, the keys of the fourth word; of the two words that are decoded, those of the first."""
    places = range(6)
    rules = {
        "causal": [j for j in places if j <= 3],
        "padding": [j for j in places if j < 4],
        "causal and padding": [j for j in places if j <= 3 and j < 4],
        "window": [2, 3, 4],
        "documents": [3, 4, 5],
    }
    for kind, kept in rules.items():
        assert ticks(kind)[3] == kept
    assert ticks("decoding") == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]


def ticks(kind):
    marks = [text for _, text in texts(learn.mask_picture(kind))][6:]
    return [[j for j, mark in enumerate(marks[start + 1 : start + 7]) if mark == "✓"] for start in range(0, len(marks), 7)]
