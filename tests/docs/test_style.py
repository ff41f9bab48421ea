# SPDX-License-Identifier: Apache-2.0
"""The worst habits of style stay out of the pages: words that hide a subject, and sentences that nobody reads once."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import PAGES, ROOT, tokens_of

# Write "a process that", "three of them", "except", "the remaining bytes", "for any size".
HIDING = re.compile(
    r"\b((?i:whoever|whatever|whichever|but for|such as have)|of which)\b|^What (is|was|are|has) (?!.*\?$)"
)
MOST_WORDS = 35  # aim at 30; code counts as one word
NOTES = ROOT / "docs/notes"  # diaries and details, which tell how it was


def sentences(page: Path) -> Iterator[tuple[int, str]]:
    """The sentences of a page's text and tables, each with the line where its paragraph begins."""
    line = 0
    heading = False
    for token in tokens_of(page):
        line = token.map[0] + 1 if token.map else line
        heading = token.type == "heading_open" or (heading and token.type != "heading_close")
        if token.type == "inline" and not heading:
            pieces = (
                " "
                if piece.type in ("softbreak", "hardbreak")
                else "X"
                if piece.type == "code_inline"
                else piece.content
                for piece in token.children
            )
            for sentence in re.split(r"(?<=[.!?:;])\s+", "".join(pieces)):
                yield line, sentence.strip()


def faults_of(sentence: str) -> list[str]:
    """What is wrong with it."""
    found = [f"write it without {match[0].strip()!r}" for match in HIDING.finditer(sentence)]
    if (words := len(sentence.split())) > MOST_WORDS:
        found.append(f"{words} words: make it two sentences")
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if NOTES not in page.parents], ids=lambda page: page.name)
def test_style(page):
    found = [(f"{page.name}:{line}", fault, text) for line, text in sentences(page) for fault in faults_of(text)]
    assert not found, "\n".join(f"{where}: {fault}: {text[:100]}" for where, fault, text in found)


@pytest.mark.parametrize(
    ("sentence", "fault"),
    [
        ("Whoever has the secret may join.", "Whoever"),
        ("Every rank must take as many steps, but for X.", "but for"),
        ("What is left of it is lost.", "What is"),
        ("word " * 36, "36 words"),
    ],
)
def test_a_bad_sentence_is_noticed(sentence, fault):
    assert fault in "\n".join(faults_of(sentence))


def test_a_good_sentence_passes():
    assert not faults_of("What happens when a rank dies?")
    assert not faults_of("word " * 35)
