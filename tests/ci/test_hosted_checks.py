# SPDX-License-Identifier: Apache-2.0
"""What the workflows name exists in the repository, and no step of ci/test and no supported Python is left out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="not in a checkout")
ALL_STEPS = {path.name for path in (ROOT / "ci" / "steps").glob("*")}
LONG_ONLY = {"tidy", "odr"}  # of ci/test --all alone


def jobs_of(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())["jobs"]


def commands_of(job: dict[str, Any]) -> list[str]:
    """What the job runs, once for each value of its matrix."""
    lines = [line for step in job.get("steps", []) for line in step.get("run", "").splitlines()]
    for name, values in job.get("strategy", {}).get("matrix", {}).items():
        mark = f"${{{{ matrix.{name} }}}}"
        lines = [line.replace(mark, value) for line in lines for value in (values if mark in line else [""])]
    return [line.replace("${{ inputs.options }}", "") for line in lines]


def steps_of(name: str) -> set[str]:
    """The steps of ci/test that a workflow runs, with those of the workflows that it calls."""
    found: set[str] = set()
    for job in jobs_of(name).values():
        if "uses" in job:
            found |= steps_of(Path(job["uses"]).name)
        for command in commands_of(job):
            if (test := re.match(r"ci/test\s+(.*?)(<|$)", command)) is not None:
                found |= {word for word in test[1].split() if word != "--all"}
    return found


@pytest.mark.parametrize("name", ["checks.yml", "nightly.yml"])
def test_every_step_is_run_and_exists(name):
    expected = ALL_STEPS if name == "nightly.yml" else ALL_STEPS - LONG_ONLY
    assert steps_of(name) == expected


@pytest.mark.parametrize("workflow", sorted(path.name for path in FOLDER.glob("*.yml")))
def test_files_of_the_repository_exist(workflow):
    named = 0
    for job in jobs_of(workflow).values():
        uses = [job.get("uses", ""), *(step.get("uses", "") for step in job.get("steps", []))]
        for local in (text for text in uses if text.startswith("./")):
            assert (ROOT / local).exists()
            named += 1
        for command in commands_of(job):
            for script in re.findall(r"(?:^|\s)((?:ci|images)/[\w/-]+)", command):
                assert (ROOT / script).is_file()
                named += 1
    assert named > 0


def test_actions_are_pinned_to_a_version():
    texts = [path.read_text() for path in (ROOT / ".github").rglob("*.yml") if path.parent.name != "ISSUE_TEMPLATE"]
    uses = [name for text in texts for name in re.findall(r"uses: (\S+)", text) if not name.startswith("./")]
    assert len(uses) > 5
    assert [name for name in uses if not re.search(r"@(v\d+(\.\d+)*|release/v\d+)$", name)] == []


def test_every_supported_python_is_tested():
    text = (ROOT / "pyproject.toml").read_text()
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    tested = jobs_of("checks.yml")["python"]["strategy"]["matrix"]["python"]
    oldest = re.search(r'requires-python = ">=(3\.\d+)"', text)
    assert tested == classified
    assert oldest
    assert tested[0] == oldest[1]


def test_every_job_ends_and_may_only_read_by_default():
    for path in FOLDER.glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}, path.name
        for name, job in workflow["jobs"].items():
            assert "uses" in job or job["timeout-minutes"], f"{path.name}: {name}"
