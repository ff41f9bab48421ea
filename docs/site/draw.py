# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of docs/concepts.md, into docs/.

Plain SVG, readable in light and in dark pages, whose numbers come from the formulas that the text gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from pathlib import Path

DOCS = Path(__file__).parents[1]
STYLE = """
    .page { fill: #ffffff; } text { fill: #1f2328; font-size: 15px; } .small { font-size: 13px; }
    .quiet { fill: #57606a; font-size: 13px; } .strong { font-weight: bold; }
    .rank { fill: #ddf4ff; stroke: #0969da; } .server { fill: #fff8c5; stroke: #9a6700; }
    .lost { fill: #ffebe9; stroke: #cf222e; } .new { fill: #dafbe1; stroke: #1a7f37; }
    .line { fill: none; stroke: #0969da; stroke-width: 2; } .axis { fill: none; stroke: #8c959f; stroke-width: 1.5; }
    .waits { fill: #f6f8fa; stroke: #8c959f; }
    .end { stroke: #cf222e; stroke-width: 2; stroke-dasharray: 6 4; } .tip { fill: #0969da; } .grey { fill: #8c959f; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117; } text { fill: #e6edf3; } .quiet { fill: #9da7b1; }
      .rank { fill: #0c2d6b; stroke: #388bfd; } .server { fill: #341a00; stroke: #bb8009; }
      .lost { fill: #490202; stroke: #f85149; } .new { fill: #04260f; stroke: #3fb950; }
      .line { stroke: #58a6ff; } .axis { stroke: #6e7681; } .end { stroke: #f85149; } .tip { fill: #58a6ff; }
      .grey { fill: #6e7681; } .waits { fill: #21262d; stroke: #6e7681; }
    }
"""


class Picture:
    """An SVG under construction."""

    def __init__(self, name: str, width: int, height: int, title: str, description: str) -> None:
        self.path = DOCS / name
        self.parts = [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
                'font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif" aria-labelledby="title desc">'
            ),
            f'  <title id="title">{escape(title)}</title>',
            f'  <desc id="desc">{escape(description)}</desc>',
            f"  <style>{STYLE}  </style>",
            (
                '  <defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
                'orient="auto-start-reverse"><path class="tip" d="M0 0L10 5L0 10z"/></marker></defs>'
            ),
            f'  <rect class="page" width="{width}" height="{height}"/>',
        ]

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        """Words at a point."""
        self.parts.append(
            f'  <text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'
        )  # fmt: skip

    def box(self, x: float, y: float, width: float, height: float, kind: str, words: str = "") -> None:
        """A box, and words in its middle."""
        self.parts.append(
            f'  <rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>'
        )  # fmt: skip
        if words:
            self.text(x + width / 2, y + height / 2 + 5, words)

    def line(self, points: Iterable[tuple[float, float]], kind: str = "line", arrow: bool = True) -> None:
        """A line through points."""
        path = " L ".join(f"{x:g} {y:g}" for x, y in points)
        end = ' marker-end="url(#tip)"' if arrow else ""
        self.parts.append(f'  <path class="{kind}" d="M {path}"{end}/>')

    def write(self) -> None:
        """Into its file."""
        self.path.write_text("\n".join([*self.parts, "</svg>"]) + "\n")


def links(n: int = 4) -> None:
    """What crosses each link in an all-reduce."""
    ring, push_pull = 2 * (n - 1) / n, 1.0
    picture = Picture(
        "links.svg", 860, 400, "What crosses a host's link",
        f"In a ring of {n} hosts each link carries {ring:g} times the tensor in each direction; with as many servers "
        "as workers it carries the tensor once.",
    )  # fmt: skip
    picture.text(205, 32, f"Ring of {n} hosts", "strong")
    middle, radius, half = (205, 195), 110, 36
    places = [
        (middle[0] + radius * math.cos(a), middle[1] + radius * math.sin(a))
        for a in (2 * math.pi * i / n - math.pi * 3 / 4 for i in range(n))
    ]
    for i, (x, y) in enumerate(places):
        to = places[(i + 1) % n]
        length = math.dist((x, y), to)
        ux, uy = (to[0] - x) / length, (to[1] - y) / length
        picture.line([(x + ux * half, y + uy * half), (to[0] - ux * (half + 2), to[1] - uy * (half + 2))])
    for i, (x, y) in enumerate(places):
        picture.box(x - half, y - 22, 2 * half, 44, "rank", f"host {i}")
    picture.text(205, 360, f"each link: 2(n-1)/n = {ring:g} times the tensor,", "small")
    picture.text(205, 380, f"in 2(n-1) = {2 * (n - 1)} steps", "small")
    picture.text(630, 32, f"{n} workers, {n} servers", "strong")
    for i in range(n):
        for j in range(n):
            picture.line([(480 + 100 * i, 118), (480 + 100 * j, 266)], "axis", arrow=False)
    for i in range(n):
        picture.box(445 + 100 * i, 74, 70, 44, "rank", f"host {i}")
        picture.box(440 + 100 * i, 266, 80, 44, "server", f"server {i}")
    picture.text(630, 360, f"each link: {push_pull:g} times the tensor up, {push_pull:g} times down,", "small")
    picture.text(630, 380, "in 2 steps: push and pull", "small")
    picture.write()


def one_round() -> None:
    """A round in time."""
    picture = Picture(
        "round.svg", 860, 300, "One partition in one round",
        "Ranks push when they are ready; the server sums when the last contribution is there, and answers all.",
    )  # fmt: skip
    rows = {"rank 0": 60, "rank 1": 120, "rank 2": 180}
    server, sum_at = 250, 520
    for name, y in rows.items():
        picture.text(60, y + 5, name, "strong")
        picture.line([(110, y), (830, y)], "axis", arrow=False)
    picture.text(60, server + 5, "server", "strong")
    picture.line([(110, server), (830, server)], "axis", arrow=False)
    for (_, y), (start, kind) in zip(
        rows.items(), [(150, "..."), (230, "computes"), (430, "computes longer")], strict=True
    ):
        picture.box(115, y - 14, start - 115, 28, "rank")
        picture.text((115 + start) / 2, y + 5, kind, "small")
        picture.line([(start, y), (start + 60, server - 16)])
        picture.line([(sum_at + 60, server - 16), (sum_at + 130, y + 3)])
        picture.box(sum_at + 134, y - 14, 150, 28, "new", "has the sum")
    picture.box(sum_at - 30, server - 14, 86, 28, "server", "sum")
    picture.text(330, server + 28, "waits for rank 2: bps why tells", "quiet")
    picture.text(150, 32, "push", "small")
    picture.text(sum_at + 100, 32, "answer", "small")
    picture.write()


def priorities() -> None:
    """What goes over a link, in order."""
    picture = Picture(
        "priorities.svg", 860, 215, "An urgent tensor overtakes",
        "Tensors are sent in partitions. A more urgent tensor that becomes ready later goes out after the partition "
        "that is under way, and not after the whole tensor before it.",
    )  # fmt: skip
    for row, (y, name, order) in enumerate(
        [(60, "whole tensors", "LLLLLLLLU"), (140, "partitions and priorities", "LLLULLLLL")]
    ):
        picture.text(20, y - 16, name, "strong", "start")
        for i, which in enumerate(order):
            words = {"L": "last layer" if not row and i == 3 else "", "U": "first"}[which]
            picture.box(20 + 82 * i, y, 78, 34, "server" if which == "L" else "new", words)
    picture.line([(20 + 82 * 2.5, 205), (20 + 82 * 2.5, 178)])
    picture.text(20 + 82 * 2.5 + 10, 204, "here the first layer's gradient becomes ready", "quiet", "start")
    picture.write()


def views() -> None:
    """Members come and go."""
    picture = Picture(
        "views.svg", 860, 300, "Views of a job",
        "Four ranks train. When one is lost the view ends, the step under way is aborted on all, and the next view "
        "begins with three ranks. A new process enters at the end of a step: a third view.",
    )  # fmt: skip
    ends = (330, 600)
    for x, name in ((220, "view 1: four ranks"), (465, "view 2: three ranks"), (715, "view 3: four ranks")):
        picture.text(x, 30, name, "strong")
    spans = [
        [(110, 330, "rank", "rank 0"), (350, 600, "rank", "rank 0"), (620, 830, "rank", "rank 0")],
        [(110, 290, "lost", "rank 1: killed")],
        [(110, 330, "rank", "rank 2"), (350, 600, "rank", "rank 1"), (620, 830, "rank", "rank 1")],
        [(110, 330, "rank", "rank 3"), (350, 600, "rank", "rank 2"), (620, 830, "rank", "rank 2")],
        [(620, 830, "new", "rank 3: new")],
    ]
    for row, boxes in enumerate(spans):
        for start, end, kind, words in boxes:
            picture.box(start, 50 + 40 * row, end - start, 30, kind, words)
        if row < len(spans) - 1:
            picture.text(20, 70 + 40 * row, f"process {row}", "quiet", "start")
        else:
            picture.text(20, 70 + 40 * row, "process 4", "quiet", "start")
    for x in ends:
        picture.line([(x + 10, 44), (x + 10, 252)], "end", arrow=False)
    picture.text(ends[0] + 10, 272, "the step under way is aborted on all ranks,", "quiet")
    picture.text(ends[0] + 10, 290, "which repeat it with three", "quiet")
    picture.text(ends[1] + 10, 272, "a process enters at the end", "quiet")
    picture.text(ends[1] + 10, 290, "of a step, and gets the state", "quiet")
    picture.write()


def planes() -> None:
    """Which bytes travel over which connections."""
    picture = Picture(
        "planes.svg", 860, 390, "Two planes",
        "A rank and a server have a control connection for small messages and a data connection for partitions and "
        "sums alone. The scheduler has control connections to both, and no gradient passes through it.",
    )  # fmt: skip
    picture.box(340, 20, 180, 44, "waits", "scheduler")
    for x, name, kind in ((30, "rank", "rank"), (590, "server", "server")):
        picture.box(x, 130, 240, 230, kind)
        picture.text(x + 120, 156, name, "strong")
    picture.line([(335, 42), (150, 42), (150, 124)], "axis")
    picture.line([(525, 42), (710, 42), (710, 124)], "axis")
    picture.text(160, 86, "who takes part,", "quiet", "start")
    picture.text(160, 104, "who was lost", "quiet", "start")
    picture.line([(276, 190), (584, 190)], "axis")
    picture.line([(584, 196), (276, 196)], "axis")
    picture.text(430, 172, "control: names, credits, failures", "small")
    picture.box(55, 240, 190, 40, "new", "tensor: a partition")
    picture.box(55, 300, 190, 40, "new", "the same memory")
    picture.box(615, 240, 190, 40, "new", "landing slot")
    picture.box(615, 300, 190, 40, "new", "sum of all ranks")
    picture.line([(249, 260), (609, 260)])
    picture.line([(611, 320), (251, 320)])
    picture.line([(710, 282), (710, 296)], "axis")
    picture.text(430, 250, "data: one write there", "small")
    picture.text(430, 310, "data: one write back", "small")
    picture.write()


def credit(slots: int = 4, partitions: int = 7) -> None:
    """Why a server's memory does not grow with the model."""
    picture = Picture(
        "credits.svg", 860, 300, "Credits",
        f"A server has granted a rank {slots} landing slots. The rank has sent {slots} of its {partitions} partitions; "
        "the others wait until a sum comes back, which gives its slot back as a credit.",
    )  # fmt: skip
    picture.text(120, 32, f"rank: {partitions} partitions", "strong")
    picture.text(690, 32, f"server: {slots} landing slots for this rank", "strong")
    for i in range(partitions):
        y = 50 + 34 * i
        sent = i < slots
        picture.box(40, y, 160, 28, "rank" if sent else "waits", f"partition {i}")
        if sent:
            picture.box(590, y, 200, 28, "server", f"slot {i}: partition {i}")
            picture.line([(204, y + 14), (584, y + 14)])
            picture.text(394, y + 9, "a credit is spent", "quiet")
    waiting = 50 + 34 * slots
    picture.line([(690, waiting - 4), (690, waiting + 14), (206, waiting + 14)])
    picture.text(450, waiting + 34, "the sum of partition 0 comes back, and slot 0 with it:", "small")
    picture.text(450, waiting + 52, f"now partition {slots} goes", "small")
    picture.text(215, waiting + 84, "without a credit they wait here: no message is lost or refused", "quiet", "start")
    picture.write()


if __name__ == "__main__":
    planes()
    credit()
    links()
    one_round()
    priorities()
    views()
