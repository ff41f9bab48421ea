# SPDX-License-Identifier: Apache-2.0
"""The built site (ci/docs): every link within it leads somewhere, and the reference has every public name."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import typer
from pages import ROOT

import bps_rdma
from bps_rdma import cli

SITE = ROOT / "build/docs/html"
HTML = sorted(page for page in SITE.rglob("*.html"))


class Page(HTMLParser):
    """The links of a page, and what can be linked to in it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif name in ("href", "src") and value is not None:
                self.links.append(value)


def test_it_is_built():
    assert len(HTML) > 15, "run ci/docs"


def test_every_link_within_leads_somewhere():
    pages = {file: Page(file) for file in HTML}
    broken = []
    checked = 0
    for file, page in pages.items():
        for link in page.links:
            target = urlsplit(link)
            if target.scheme or target.netloc:
                continue
            to = (file.parent / unquote(target.path)).resolve() if target.path else file
            checked += 1
            if not to.is_file() or (to in pages and unquote(target.fragment) not in pages[to].anchors):
                broken.append(f"{file.relative_to(SITE)}: {link}")
    assert not broken, "\n".join(broken)
    assert checked > 1000


def test_nothing_is_loaded_from_elsewhere():
    for file in HTML:
        for link in Page(file).links:
            target = urlsplit(link)
            assert not (target.netloc and target.path.endswith((".js", ".css", ".woff2"))), f"{file.name}: {link}"


@pytest.mark.parametrize(
    "module", ["bps_rdma", "bps_rdma.torch", "bps_rdma.megatron", "bps_rdma.ray", "bps_rdma.prometheus"]
)
def test_the_reference_has_every_public_name(module):
    """Or another name of the same: bps_rdma.torch.rank is bps_rdma.rank."""
    found = pytest.importorskip(module)
    anchors = set().union(*(Page(file).anchors for file in HTML))
    missing = [
        name
        for name in found.__all__
        if name != "__version__" and f"{module}.{name}" not in anchors and not is_of_core(found, name)
    ]
    assert not missing


def is_of_core(module: object, name: str) -> bool:
    return getattr(bps_rdma, name, None) is getattr(module, name) and module is not bps_rdma


def test_every_command_shows_its_help():
    anchors = Page(SITE / "commands.html").anchors
    for command in typer.main.get_command(cli.app).commands:
        assert any(anchor.startswith(f"bps-{command}") for anchor in anchors), command
