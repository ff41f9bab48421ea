# SPDX-License-Identifier: Apache-2.0
"""Every page of the built site in a real browser, as a desktop in light colours and a phone in dark ones show it.

The screenshots are in build/docs/screenshots.
"""

import base64
import functools
import http.server
import shutil
import threading
from pathlib import Path

import pytest
from pages import ROOT

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install '.[docs]'")

SITE = ROOT / "build/docs/html"
SHOTS = ROOT / "build/docs/screenshots"
HTML = sorted(str(page.relative_to(SITE)) for page in SITE.rglob("*.html") if "_static" not in page.parts)
BROWSER = next((path for name in ("chromium-headless-shell", "chromium") if (path := shutil.which(name))), None)
VIEWS = {
    "desktop": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "is_mobile": True, "has_touch": True},
}
# What lies beyond the right edge, unless it scrolls by itself.
OVERFLOWING = """() => {
  const width = document.documentElement.clientWidth;
  const scrolls = element => element && element !== document.body
    && (['auto', 'scroll'].includes(getComputedStyle(element).overflowX) || scrolls(element.parentElement));
  const found = [...document.querySelectorAll('article *')].filter(element => {
    const box = element.getBoundingClientRect();
    return box.right > width + 1 && box.width > 0 && !scrolls(element);
  });
  const whole = document.documentElement.scrollWidth;
  const wide = whole > width ? [`the page is ${whole} wide`] : [];
  return wide.concat(found.slice(0, 5).map(element => element.outerHTML.slice(0, 200)));
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and writes nothing."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address():
    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser():
    if BROWSER is None:
        pytest.skip("no chromium: apt-get install chromium-headless-shell")
    with playwright.sync_playwright() as driver:
        # The sandbox needs namespaces, which containers do not give; what is opened is this site alone.
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module", params=VIEWS)
def tab(request, browser):
    context = browser.new_context(**VIEWS[request.param])
    # A long page is painted without a graphics card, here perhaps on a machine with other work; a browser that hangs
    # is still found before pytest's own limit.
    context.set_default_timeout(200_000)
    page = context.new_page()
    page.kind = request.param
    yield page
    context.close()


def problems_of(tab, url: str, then=lambda tab: None) -> list[str]:
    """What the console says, what is not found, and what is too wide, when the page is shown."""
    problems: list[str] = []
    listeners = {
        "console": lambda message: message.type in ("error", "warning") and problems.append(message.text),
        "pageerror": lambda error: problems.append(str(error)),
        "requestfailed": lambda request: problems.append(f"{request.url}: {request.failure}"),
        "response": lambda answer: answer.status >= 400 and problems.append(f"{answer.url}: {answer.status}"),
    }
    for event, listener in listeners.items():
        tab.on(event, listener)
    try:
        tab.goto(url, wait_until="load")
        then(tab)
        problems += tab.evaluate(OVERFLOWING)
    finally:
        for event, listener in listeners.items():
            tab.remove_listener(event, listener)
    return problems


def take_screenshot(tab, path: Path) -> None:
    """Of the whole page. Playwright's own makes a phone as high as the page first: 30 s for the longest of ours."""
    width, height = tab.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
    whole = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    session = tab.context.new_cdp_session(tab)
    taken = session.send("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": whole})
    session.detach()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(base64.b64decode(taken["data"]))


def test_there_are_pages():
    assert len(HTML) > 15, "run ci/docs"


@pytest.mark.parametrize("page", HTML)
def test_page(tab, address, page):
    problems = problems_of(tab, f"{address}/{page}")
    name = page.replace("/", "-").removesuffix(".html")
    take_screenshot(tab, SHOTS / tab.kind / f"{name}.png")
    assert not problems, "\n".join(problems)


def test_the_search_finds(tab, address):
    def results(tab) -> None:
        tab.wait_for_selector("#search-results li a")

    problems = problems_of(tab, f"{address}/search.html?q=RoundAbortedError", results)
    # Sphinx looks for the entry of bps_rdma.RoundAbortedError by "#" and its id as a CSS selector, in which a dot means
    # something else. It then shows the beginning of the page instead, and says so.
    assert not [problem for problem in problems if "Anchored content block not found" not in problem]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<script>no_such_function()</script>", "no_such_function"),
        ("<article><p style='width: 3000px'>wide</p></article>", "wide"),
        ("<img src='no-such-picture.png'>", "404"),
    ],
)
def test_a_bad_page_is_noticed(tab, address, body, problem):
    def serve(route) -> None:
        route.fulfill(
            body=f"<!doctype html><meta name='viewport' content='width=device-width'>{body}", content_type="text/html"
        )

    tab.route("**/bad.html", serve)
    assert problem in "\n".join(problems_of(tab, f"{address}/bad.html"))
