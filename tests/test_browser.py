"""The committed pages in a real browser, the network cut: what a reader of the file from disk gets."""

import hashlib
import shutil

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

from kvlab import paths
from kvlab.article import prose

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = (1400, 800, 390)
SCREENSHOTS = paths.ROOT / "build" / "screenshots"  # to be looked at before pages are committed
PAGES = [
    (path.parent.name, language)
    for language in prose.LANGUAGES
    for path in sorted(paths.ROOT.glob(f"results/*/article.{language}.html"))
    if path.parent.name != "smoke"
]


@pytest.fixture(scope="module")
def browser():
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        pytest.fail("the page is tested in a browser: install Debian's chromium (apt-get install chromium)")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture(params=PAGES, ids=lambda page: "-".join(page))
def opened(browser, request):
    """(open page, what the console said and what was asked of the network, profile, language)."""
    profile, language = request.param
    context = browser.new_context(offline=True, viewport={"width": WIDTHS[0], "height": 900})
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda asked: asked.url.startswith(("file:", "data:")) or said.append(asked.url))
    page.goto((paths.ROOT / "results" / profile / f"article.{language}.html").as_uri())
    yield page, said, profile, language
    context.close()


def test_it_opens_with_every_picture_drawn_and_nothing_fetched_or_complained(opened):
    page, said, _, language = opened
    drawn = page.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert len(drawn) > 5 and all(drawn)
    assert page.evaluate("document.documentElement.lang")[:2] == language
    assert said == []


def test_it_fits_three_widths(opened):
    page, _, profile, language = opened
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=SCREENSHOTS / f"{profile}-{language}-{width}.png", full_page=True)


def test_every_anchor_leads_somewhere_and_the_contents_follow_the_scroll(opened):
    page, _, _, _ = opened
    lost = """[...document.querySelectorAll('a[href^="#"]')].map(a => decodeURIComponent(a.hash.slice(1)))
        .filter(id => !document.getElementById(id))"""
    assert page.evaluate(lost) == []
    current = "document.querySelector('#toc a[aria-current]').textContent"
    first = page.evaluate(current)
    page.evaluate("window.scrollTo({top: document.body.scrollHeight, behavior: 'instant'})")
    page.wait_for_function(f"{current} !== {first!r}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(opened, scheme):
    page, _, _, _ = opened
    page.emulate_media(color_scheme=scheme)
    found = Axe().run(page).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")] == []


def test_print_cuts_no_chart(opened):
    """On A4 at 96 px an inch a chart must fit between the margins, and it may not be parted."""
    page, _, _, _ = opened
    page.set_viewport_size({"width": 718, "height": 1047})
    page.emulate_media(media="print")
    figures = page.evaluate("""[...document.querySelectorAll("figure")].map(figure => [figure.offsetHeight,
        figure.scrollWidth - figure.clientWidth, getComputedStyle(figure).breakInside])""")
    assert figures and all(height < 1047 and over <= 0 and rule == "avoid" for height, over, rule in figures)
    assert page.pdf(format="A4")[:4] == b"%PDF"


def test_the_link_to_the_other_language_works(opened):
    page, _, _, language = opened
    page.click("a.language")
    page.wait_for_load_state()
    assert page.evaluate("document.documentElement.lang")[:2] != language


def test_a_committed_page_shows_the_committed_records(opened):
    """A record file that changed after its page was written would leave a page that lies."""
    page, _, profile, _ = opened
    foot = page.text_content("footer")
    for path in (paths.ROOT / "results" / profile).glob("*.jsonl"):
        if path.name != "environments.jsonl":
            assert hashlib.sha256(path.read_bytes()).hexdigest()[:12] in foot, path.name


def test_a_page_is_under_three_megabytes(opened):
    _, _, profile, language = opened
    assert (paths.ROOT / "results" / profile / f"article.{language}.html").stat().st_size < 3_000_000
