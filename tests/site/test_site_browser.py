"""The site as a reader sees it, in headless Chromium, served from this machine."""
import functools
import os
import re
import shutil
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from iclr26.lab.ledger import read_ledger
from iclr26.lab.papers import list_papers
from iclr26.lab.site import build, check_site

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("site"), pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]
DESKTOP, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}
OBSERVE = r"""() => {
  const size = e => { const r = e.getBoundingClientRect(); return [r.width, r.height]; };
  const where = e => `${e.tagName.toLowerCase()} ${(e.textContent || e.alt || '').trim().slice(0, 40)}`;
  const main = document.querySelector('main');
  for (const fold of document.querySelectorAll('details')) fold.open = true;
  const prose = main.cloneNode(true);
  prose.querySelectorAll('pre, code, script, style, math').forEach(e => e.remove());
  return {
    title: document.title,
    ids: [...document.querySelectorAll('[id]')].map(e => e.id),
    links: [...document.querySelectorAll('a[href]')].map(a => a.href),
    maths: [...main.querySelectorAll('math')].map(e => [where(e), ...size(e), getComputedStyle(e).display]),
    images: [...document.querySelectorAll('img')].map(e => [e.alt, e.naturalWidth, e.naturalHeight]),
    text: prose.textContent,
    output: [...main.querySelectorAll('.cell-output pre')].map(e => e.textContent).join('\n'),
    external: [...document.querySelectorAll('script[src], link[rel=stylesheet], img, iframe')].map(e => e.src || e.href).filter(u => /^https?:/.test(u) && !u.startsWith(location.origin)),
    scripts: [...document.scripts].map(s => s.src).filter(s => /katex|mathjax/i.test(s)),
  };
}"""
WIDE = r"""() => {
  const inBox = e => { for (let p = e.parentElement; p; p = p.parentElement) if (['auto', 'scroll', 'hidden', 'clip'].includes(getComputedStyle(p).overflowX)) return true; return false; };
  const wide = [...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !inBox(e));
  const cut = [...document.querySelectorAll('main .sourceCode pre')].filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.slice(0, 40));
  return [document.scrollingElement.scrollWidth, cut, wide.slice(0, 5).map(e => e.tagName + ' ' + e.className + ' ' + e.textContent.trim().slice(0, 40))];
}"""
LIGHTNESS = r"""selector => {
  const rgb = text => { const c = document.createElement('canvas').getContext('2d', {willReadFrequently: true}); c.fillStyle = text; c.fillRect(0, 0, 1, 1); return [...c.getImageData(0, 0, 1, 1).data]; };
  const light = text => { const [r, g, b] = rgb(text).slice(0, 3).map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const element = [...document.querySelectorAll(selector)].find(e => e.getClientRects().length);
  if (!element) return null;
  let box = element;
  while (box && rgb(getComputedStyle(box).backgroundColor)[3] < 200) box = box.parentElement;
  return [light(getComputedStyle(element).color), light(getComputedStyle(box || document.body).backgroundColor)];
}"""


@pytest.fixture(scope="session")
def site(root, tmp_path_factory) -> Path:
    """The site in ICLR26_SITE if that is set, else one built now (finished runs and executed notebooks are taken as they are)."""
    if given := os.environ.get("ICLR26_SITE"): return Path(given).resolve()
    return build(tmp_path_factory.mktemp("site") / "_site", runs=root / "runs")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args): pass


@pytest.fixture(scope="session")
def base(site):
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


@pytest.fixture(scope="session")
def browser():
    with sync_api.sync_playwright() as playwright:
        quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=quiet)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport=DESKTOP, color_scheme="light")
    context.set_default_timeout(20_000)
    yield context.new_page()
    context.close()


@pytest.fixture(scope="session")
def visits(browser, base, site) -> dict:
    """What one visit to every page shows, at desktop and phone width."""
    context, seen = browser.new_context(viewport=DESKTOP, color_scheme="light"), {}
    page, log = context.new_page(), {}
    page.on("console", lambda m: log["noise"].append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: log["noise"].append(str(e)))
    page.on("request", lambda r: None if r.url.startswith((base, "data:", "blob:")) else log["foreign"].append(r.url))
    page.on("response", lambda r: log["failed"].append(r.url) if r.status >= 400 else None)
    page.on("requestfailed", lambda r: log["failed"].append(r.url))
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        log.update(noise=[], foreign=[], failed=[])
        page.set_viewport_size(DESKTOP)
        page.goto(base + name)
        page.wait_for_timeout(60)
        seen[name] = page.evaluate(OBSERVE)
        page.set_viewport_size(PHONE)
        page.wait_for_timeout(60)
        width, cut, wide = page.evaluate(WIDE)
        seen[name] |= {**log, "width": width, "cut": cut, "wide": wide}
    context.close()
    return seen


def soon(page, condition, seconds: float = 20) -> bool:
    """Whether the condition comes true in time: pages answer a click when their scripts and transitions have run, not after a fixed while."""
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end: page.wait_for_timeout(50)
    return met


def faults(visits: dict, look) -> dict:
    return {name: found for name, seen in visits.items() if (found := look(seen))}


def test_files_pass_the_checks(site):
    assert check_site(site) == []


def test_there_is_a_page_for_every_notebook_and_package(visits, root):
    notebooks = {p.relative_to(root / "nbs").with_suffix(".html").as_posix() for p in (root / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts}
    assert notebooks | {"api/index.html", "api/lab/claims.html"} | {f"api/{p.name}/index.html" for p in list_papers()} <= visits.keys()


def test_no_console_errors(visits):
    assert faults(visits, lambda seen: seen["noise"]) == {}


def test_no_request_leaves_the_machine(visits):
    assert faults(visits, lambda seen: seen["foreign"] + seen["external"] + seen["scripts"]) == {}


def test_everything_loads(visits):
    assert faults(visits, lambda seen: seen["failed"]) == {}


def test_internal_links_and_anchors_resolve(visits, base, site):
    def broken(seen):
        out = []
        for link in set(seen["links"]):
            if not link.startswith(base): continue
            url = urlsplit(link)
            name = unquote(url.path).lstrip("/")
            name = name + "index.html" if name.endswith("/") or not name else name
            if not (site / name).is_file() or (name in visits and url.fragment and unquote(url.fragment) not in visits[name]["ids"]): out.append(link.removeprefix(base))
        return out
    assert faults(visits, broken) == {}
    assert sum(len(seen["links"]) for seen in visits.values()) > 50 * 5


def test_maths_is_typeset(visits):
    assert faults(visits, lambda seen: [m for m in seen["maths"] if not (m[1] > 1 and m[2] > 4)]) == {}
    assert faults(visits, lambda seen: re.findall(r"\$\$?[^\s$][^$\n]*[^\s$]\$|\\\(|\\\[|\\(?:frac|alpha|sum|mathbf|begin|text)\b", seen["text"])) == {}
    for paper in list_papers(): assert len(visits[f"{paper.name}/theory.html"]["maths"]) > 10


def test_numbered_formula_has_its_number_at_the_right(page, base, visits):
    name = next(n for n, seen in visits.items() if n.endswith("theory.html") and seen["maths"])
    page.goto(base + name)
    boxes = page.evaluate("""() => [...document.querySelectorAll('.math.display')].filter(e => /\\(\\d+\\)$/.test(e.textContent.trim())).map(e => {
        const tags = [...e.querySelectorAll('mtext')], tag = tags[tags.length - 1].getBoundingClientRect(), box = e.getBoundingClientRect(); return [tag.right, box.left, box.right]; })""")
    assert boxes and all(right > left + 0.9 * (end - left) and right <= end + 2 for right, left, end in boxes if end - left > 300)


def test_figures_have_alt_text_and_are_drawn(visits):
    assert faults(visits, lambda seen: [i for i in seen["images"] if len(i[0].strip()) < 10 or i[1] < 50 or i[2] < 50]) == {}
    for paper in list_papers(): assert visits[f"{paper.name}/reproduction.html"]["images"], paper.name


def test_no_horizontal_scroll_on_a_phone(visits):
    assert faults(visits, lambda seen: [seen["width"], seen["wide"]] if seen["width"] > PHONE["width"] or seen["wide"] else None) == {}


def test_long_lines_of_code_wrap(visits):
    assert faults(visits, lambda seen: seen["cut"]) == {}


def test_what_wraps_stands_deeper_than_its_line(page, base):
    page.set_viewport_size(PHONE)
    page.goto(base + "lab/site.html")
    edges = page.locator("main .sourceCode span.line").evaluate_all("""all => all.filter(e => e.textContent.search(/\\S/) <= 16).map(e => {
        const part = (node, from, to) => { const r = document.createRange(); r.setStart(node, from); r.setEnd(node, to); return [...r.getClientRects()].filter(r => r.width); };
        const texts = document.createTreeWalker(e, NodeFilter.SHOW_TEXT), boxes = [];
        for (let node = texts.nextNode(); node; node = texts.nextNode())
            for (const word of node.data.matchAll(/\\S+/g)) boxes.push(...part(node, word.index, word.index + word[0].length));
        return boxes.map(r => [Math.round(r.top), r.left]); }).map(b => [b[0], b.find(r => r[0] > b[0][0] + 8)]).filter(([first, wrapped]) => wrapped).map(([first, wrapped]) => [first[1], wrapped[1]])""")
    assert sum(wrapped > first for first, wrapped in edges) > 20 and all(wrapped >= first for first, wrapped in edges)  # equal: the first word had to wrap


def test_no_page_shows_a_traceback_or_a_warning(visits):
    assert faults(visits, lambda seen: "Traceback (most recent call last)" in seen["text"]) == {}
    assert faults(visits, lambda seen: re.findall(r"\S*site-packages\S*|/ipykernel_\S*|\b\w*Warning: .*", seen["output"])) == {}


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_search_finds_a_word(page, base, site, scheme):
    page.goto(base + "guide/reading.html" if scheme == "http" else (site / "guide" / "reading.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("bootstrap")
    result = page.locator(".smalldocs-search-results.show a.search-result, .aa-Item a").first
    sync_api.expect(result).to_contain_text(re.compile("bootstrap", re.I), timeout=20_000)  # before that the list answers the word's beginning
    result.click()
    page.wait_for_load_state()
    assert "bootstrap" in page.locator("main").inner_text().lower() and "guide/reading" not in page.url


def test_search_says_when_there_is_nothing(page, base):
    page.goto(base)
    page.keyboard.press("/")
    page.keyboard.type("qqxxzzyy")
    page.locator(".search-none").wait_for()


SELECTORS = ["main p", "main pre code", "main .cell-output pre", "main math", ".sidebar-link", "#TOC a", "main figcaption", "main table td", ".verdict-refuted", "main a"]


@pytest.fixture(scope="session")
def contrasts(browser, base) -> dict:
    """(selector, scheme, page) -> contrast of text and background."""
    context, measured = browser.new_context(viewport=DESKTOP), {}
    page = context.new_page()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for name in ["guide/verdicts.html", "guide/reading.html", *(f"{p.name}/theory.html" for p in list_papers())]:
            page.goto(base + name)
            page.wait_for_timeout(150)
            for selector in SELECTORS:
                if pair := page.evaluate(LIGHTNESS, selector): measured[selector, scheme, name] = (max(pair) + 0.05) / (min(pair) + 0.05)
    context.close()
    return measured


@pytest.mark.parametrize("selector", SELECTORS)
def test_both_themes_can_be_read(contrasts, selector):
    """Contrast of text and background is at least 4.5, in the light and in the dark."""
    measured = {(scheme, name): ratio for (s, scheme, name), ratio in contrasts.items() if s == selector}
    assert {scheme for scheme, _ in measured} == {"light", "dark"}
    assert {place: round(ratio, 2) for place, ratio in measured.items() if ratio < 4.5} == {}


def test_light_and_dark_toggle(page, base):
    page.goto(base + "guide/verdicts.html")
    background = lambda: page.evaluate(LIGHTNESS, "main p")[1]
    assert background() > 0.8
    page.locator(".quarto-color-scheme-toggle").first.click()
    assert soon(page, lambda: background() < 0.1)
    page.reload()
    assert soon(page, lambda: background() < 0.1), "the choice is kept"
    figure = page.locator("main figure img").first
    assert figure.evaluate("e => getComputedStyle(e).backgroundColor") == "rgb(255, 255, 255)"
    page.locator(".quarto-color-scheme-toggle").first.click()
    assert soon(page, lambda: background() > 0.8)


def test_verdicts_are_words_in_colours_of_their_own(page, base):
    page.goto(base + "guide/reading.html")
    badges = page.locator("main .verdict")
    shown = badges.evaluate_all("all => all.map(e => [e.textContent, getComputedStyle(e).color, getComputedStyle(e).borderTopStyle, e.getBoundingClientRect().width])")
    assert [s[0] for s in shown] == ["supported", "refuted", "inconclusive", "not tested"]
    assert len({s[1] for s in shown}) == 4 and all(s[2] != "none" and s[3] > 20 for s in shown)


@pytest.mark.parametrize("paper", list_papers(), ids=lambda p: p.name)
def test_claims_of_the_ledger_are_shown_with_their_verdicts(page, base, paper):
    ledger = read_ledger(paper.name)
    page.goto(f"{base}{paper.name}/index.html")
    if ledger is None:
        assert "No full run" in page.locator("main").inner_text()
        return
    for claim in ledger["claims"]:
        badge = page.locator(f"#claim-{claim['id']} .verdict")
        assert badge.is_visible() and badge.inner_text() == claim["verdict"] and f"verdict-{claim['verdict'].replace(' ', '-')}" in badge.get_attribute("class")
        if claim["verdict"] == "refuted":
            assert claim["reason"].strip()[:40] in page.locator("main").inner_text(), f"{claim['id']} is refuted without a reason"
    page.goto(base)
    assert page.locator("table.scoreboard a", has_text=paper.title).is_visible()


@pytest.mark.parametrize("paper", list_papers(), ids=lambda p: p.name)
def test_paper_is_in_the_sidebar_under_its_theme(page, base, paper):
    page.goto(f"{base}{paper.name}/index.html")
    trail = page.locator("nav.quarto-page-breadcrumbs, .breadcrumb").first.inner_text().lower()
    assert paper.theme in trail
    active = page.locator("#quarto-sidebar .sidebar-link.active")
    assert active.first.is_visible()
    shown = page.locator("main").inner_text()
    assert paper.paper in shown and paper.authors in shown


def test_exported_source_is_marked_and_plumbing_folded(page, base):
    page.goto(base + "lab/site.html")
    edge = page.locator("[id^='src-'].cell div.sourceCode").first
    assert edge.evaluate("e => parseFloat(getComputedStyle(e).borderLeftWidth)") >= 2
    fold = page.locator("details.code-fold").first
    assert fold.get_attribute("open") is None and fold.locator("summary").inner_text().startswith("Source of ")
    fold.locator("summary").click()
    assert fold.locator("pre").is_visible()


def test_sidebar_opens_on_a_phone(page, base):
    page.set_viewport_size(PHONE)
    page.goto(base + "guide/reading.html")
    entry = page.locator("#quarto-sidebar .sidebar-link.active").first
    in_view = lambda: entry.evaluate("e => { const r = e.getBoundingClientRect(); return r.width > 0 && r.left >= 0 && r.right <= innerWidth; }")
    assert not in_view()
    page.locator(".quarto-btn-toggle").first.click()
    assert soon(page, in_view)


def test_wide_tables_scroll_in_their_own_box(page, base):
    page.set_viewport_size(PHONE)
    page.goto(base)
    box = page.locator("table.scoreboard").locator("xpath=..")
    inner, outer = box.evaluate("e => [e.scrollWidth, e.clientWidth]")
    assert inner > outer and box.evaluate("e => { e.scrollLeft = 50; return e.scrollLeft; }") > 0
