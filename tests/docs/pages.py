# SPDX-License-Identifier: Apache-2.0
"""The pages of the documentation, and the fenced blocks in them.

A comment in front of a block says how it is tested; the block is a part of the page, and the comment is not shown:

    <!-- example: ranks=2 -->            Python: run by that many ranks (default: 1)
    <!-- example: file=mean.py -->       not run, but kept under that name for later blocks of the page
    <!-- example: before=model -->       what tests/docs/before/model.py does comes first; C++: model.cc
    <!-- example: run -->                shell: run; without a comment a block of shell is an error
    <!-- example: hosts=2 -->            shell: run on that many hosts, each line where its comment says: # on host0
    <!-- example: output -->             text: what the block before has printed, where "..." stands for anything
    <!-- example: not run: the reason -->

Several of them are separated by semicolons.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent.parent
_GENERATED = {"readme.md", "contributing.md", "security-policy.md", "changelog.md"}  # they point to the root
PAGES = sorted(
    [page for page in (ROOT / "docs").rglob("*.md") if page.name not in _GENERATED]
    + [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")]
)
_NOTE = re.compile(r"<!-- example: (.*?) -->\s*$", re.DOTALL)


@dataclass
class Block:
    """One fenced block."""

    page: Path
    line: int  # of its first line of content, from 1
    language: str
    text: str
    notes: dict[str, str]
    output: str | None = None
    earlier: list[Block] = field(default_factory=list)  # of the same page

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def tokens_of(page: Path) -> list:
    """The page as markdown-it's tokens."""
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def notes_of(html: str) -> dict[str, str]:
    """What a comment says of the block that follows."""
    found = _NOTE.search(html.strip())
    if not found:
        return {}
    text = " ".join(found[1].split())
    if text.startswith("not run"):
        return {"not run": text.partition(":")[2].strip()}
    return {key.strip(): value.strip() for key, _, value in (part.partition("=") for part in text.split(";"))}


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, with what is said of each."""
    found: list[Block] = []
    notes: dict[str, str] = {}
    for token in tokens_of(page):
        if token.type == "html_block":
            notes = notes_of(token.content)
        elif token.type == "fence":
            if "output" in notes:
                found[-1].output = token.content
            else:
                language = token.info.split()[0] if token.info else ""
                found.append(Block(page, token.map[0] + 2, language, token.content, notes, earlier=list(found)))
            notes = {}
        else:
            notes = {}
    return found
