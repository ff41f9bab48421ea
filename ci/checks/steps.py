# SPDX-License-Identifier: Apache-2.0
"""The steps of `ci/test`: the level of each, what it waits for, and what it is about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One script of ci/steps."""

    name: str
    level: str  # "landing": every landing runs it; "all": `ci/test --all` runs it
    needs: tuple[str, ...] = ()  # steps without which this one has nothing to test
    after: tuple[str, ...] = ()  # steps that compile in the same folder, or whose output this one reads
    computes: bool = False  # it waits for nobody, so it runs at idle priority beside steps that mostly wait
    subject: tuple[str, ...] = ()  # of the level "all": a landing runs it where these files have changed


# In the order in which they start, as far as `needs` and `after` allow it: the longest first.
STEPS = (
    Step("package", "landing"),
    Step("lint", "landing", computes=True),
    Step("cpp", "landing", after=("package",)),
    Step("python", "landing", needs=("package",)),
    Step("rdma", "landing", needs=("package",), after=("cpp",)),
    Step("torch", "landing", needs=("package",)),
    Step("chaos", "landing", needs=("package",)),
    Step("megatron", "landing", needs=("package",)),
    Step("docs", "landing", needs=("package",)),
    Step("ray", "landing", needs=("package",)),
    Step("cost", "landing", after=("cpp",), computes=True),
    Step("sim", "landing", after=("cost",), computes=True),
    Step("browser", "all", needs=("package",), after=("docs",), subject=("docs", "tests/docs", "*.md")),
    Step("address", "all", subject=("csrc", "tests/cpp", "cmake", "CMakeLists.txt")),
    Step("rdma-memory", "all", after=("cpp", "rdma")),
    Step("model", "all", computes=True, subject=("tests/model",)),
    Step("examples", "all", needs=("package",)),
    Step("torch-suite", "all", needs=("package",)),
    Step("frameworks", "all", needs=("package",)),
    Step("megatron-newest", "all", needs=("package",)),
    Step("gpu", "all", needs=("package",)),
    Step("lab", "all", needs=("package",)),
    Step("slurm", "all", needs=("package",)),
    Step("kubernetes", "all", needs=("package",)),
    Step("programs", "all", needs=("package",), after=("cpp", "sim", "mutants", "wheel")),
    Step("wheel", "all", needs=("package",), after=("cpp", "cost", "sim", "mutants"), computes=True),
    Step("mutants", "all", after=("sim",), computes=True),
    Step("fuzz", "all", computes=True),
    Step("arm64", "all", computes=True),
    Step("thread", "all"),
    Step("odr", "all", computes=True),
    Step("tidy", "all", computes=True),
    Step("fresh", "all", computes=True),
)
