"""The built documentation, as a reader's browser shows it: from files, offline, in light and dark, on a desktop and on a phone."""

import re
import sys
from contextlib import contextmanager
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

pytestmark = pytest.mark.site
DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(str(page.relative_to(DOCS).with_suffix(".html")) for page in DOCS.rglob("*.md"))
SIZES = {"desktop": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}


class Links(HTMLParser):
    """The links and anchors of a page, and the pictures that say nothing to those who do not see them."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors, self.silent = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.links += [given[name] for name in ("href", "src") if given.get(name)]
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "img" and not given.get("alt"):
            self.silent.append(given.get("src"))
        if tag == "svg" and given.get("role") == "img" and not (given.get("aria-labelledby") or given.get("aria-label")):
            self.silent.append("a drawing")


@pytest.fixture(scope="module")
def parsed(built_site):
    return {page: Links((built_site / page).read_text()) for page in PAGES}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(built_site, parsed, page):
    for link in parsed[page].links:
        if re.match(r"(https|mailto|data):", link):
            continue
        target, anchor = urldefrag(unquote(link))
        file = (built_site / page).parent / target if target else built_site / page
        assert file.exists(), f"{link} leads nowhere"
        name = str(file.resolve().relative_to(built_site.resolve()))
        if anchor and name in parsed and not anchor.startswith("__"):
            assert anchor in parsed[name].anchors, f"{link} has no anchor there"


@pytest.mark.parametrize("page", PAGES)
def test_every_picture_is_said_in_words(parsed, page):
    assert not parsed[page].silent


@contextmanager
def opened(browser, built_site, page, **settings):
    """A page in the browser; whatever it complains of, or asks of a network, is a failure."""
    with browser.new_context(**settings) as context:
        tab, heard, asked = context.new_page(), [], []
        tab.on("console", lambda message: heard.append(message.text) if message.type in {"error", "warning"} else None)
        tab.on("pageerror", lambda error: heard.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto((built_site / page).as_uri())
        tab.wait_for_load_state("networkidle")
        yield tab
        assert not heard
        assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_accessible_and_asks_no_network(browser, built_site, page, scheme):
    with opened(browser, built_site, page, viewport=SIZES["desktop"], color_scheme=scheme) as tab:
        tab.add_script_tag(path=str(files("axe_playwright_python") / "axe.min.js"))
        found = tab.evaluate("axe.run({resultTypes: ['violations'], preload: false, iframes: false})")["violations"]
        bad = {one["help"]: [node["html"] for node in one["nodes"]] for one in found if one["impact"] in {"serious", "critical"}}
        assert not bad


@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_a_phone(browser, built_site, page):
    with opened(browser, built_site, page, viewport=SIZES["phone"]) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"


def test_search_finds_a_step_from_files(browser, built_site):
    with opened(browser, built_site, "index.html", viewport=SIZES["desktop"]) as tab:
        tab.fill("input[name=query]", "softmax")
        tab.wait_for_selector(".md-search-result__item a[href*='spec/softmax.html']", timeout=15_000)


def test_the_pictures_of_the_readme_are_those_of_the_library():
    from attnspec.bookkeeping.figures import chain_figure
    from attnspec.bookkeeping.svg import standalone

    assert (DOCS / "assets" / "chain.svg").read_text() == standalone(chain_figure()), f"run {sys.executable} scripts/make_figures.py"
