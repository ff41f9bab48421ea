# SPDX-License-Identifier: Apache-2.0
"""What the workflows name exists; each step of ci/test is run at its level, and a change on every supported Python."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="not in a checkout")
SETUP = "./.github/actions/setup"
# The snapshots of repositories that were at hand when the actions were pinned did not have this one's newer releases.
WITHOUT_A_COMMIT = ["pypa/gh-action-pypi-publish@release/v1"]


def jobs_of(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())["jobs"]


def commands_of(job: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """What the job runs, once for each value of its matrix; `given` is what the workflow is called with."""
    lines = [line for step in job.get("steps", []) for line in step.get("run", "").splitlines()]
    for name, values in job.get("strategy", {}).get("matrix", {}).items():
        mark = f"${{{{ matrix.{name} }}}}"
        every = json.loads(given.get("jobs", "[]")) if values == "${{ fromJSON(inputs.jobs) }}" else values
        lines = [line.replace(mark, value) for line in lines for value in (every if mark in line else [""])]
    return [line.replace("${{ inputs.options }}", given.get("options", "")) for line in lines]


def steps_of(name: str, given: dict[str, Any]) -> list[list[str]]:
    """The words after each `ci/test` in a workflow and in the workflows that it calls."""
    found: list[list[str]] = []
    for job in jobs_of(name).values():
        if "uses" in job:
            found += steps_of(Path(job["uses"]).name, job.get("with", {}))
        for command in commands_of(job, given):
            if (test := re.match(r"ci/test\s+(.*?)(<|$)", command)) is not None:
                found.append(test[1].split())
    return found


def levels() -> dict[str, str]:
    """The level of each step, as `ci/test --list` prints it."""
    done = subprocess.run(["ci/test", "--list"], cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(line.split() for line in done.stdout.splitlines())


def test_every_change_is_checked_by_the_steps_of_the_landing_level():
    named = [word for words in steps_of("checks.yml", {}) for word in words]
    assert set(named) == {step for step, level in levels().items() if level == "landing"}


def test_every_step_is_run_at_night_in_its_long_form():
    for words in (found := steps_of("nightly.yml", {})):
        # What build.yml compiles for the others it needs no long form of.
        assert "--all" in words or words == ["package", "cpp"]
    assert {word for words in found if "--all" in words for word in words} - {"--all"} == set(levels())


def test_what_is_compiled_is_handed_on():
    """One job of each run compiles first, and no job starts without what it has made."""
    for name in ("checks.yml", "nightly.yml"):
        for title, job in jobs_of(name).items():
            uses_it = "steps.yml" in job.get("uses", "") or SETUP in [step.get("uses") for step in job.get("steps", [])]
            assert (job.get("needs") == "build") == uses_it, f"{name}: {title}"
        assert jobs_of(name)["build"]["uses"] == "./.github/workflows/build.yml"
    (build,) = jobs_of("build.yml").values()
    assert {"compile": "true"} in [step.get("with") for step in build["steps"] if step.get("uses") == SETUP]
    sent = [step["with"]["name"] for step in build["steps"] if "upload-artifact" in step.get("uses", "")]
    action = yaml.safe_load((ROOT / SETUP / "action.yml").read_text())["runs"]["steps"]
    assert sent == [step["with"]["name"] for step in action if "download-artifact" in step.get("uses", "")]


@pytest.mark.parametrize("workflow", sorted(path.name for path in FOLDER.glob("*.yml")))
def test_files_of_the_repository_exist(workflow):
    named = 0
    for job in jobs_of(workflow).values():
        uses = [job.get("uses", ""), *(step.get("uses", "") for step in job.get("steps", []))]
        for local in (text for text in uses if text.startswith("./")):
            assert (ROOT / local).exists()
            named += 1
        for command in commands_of(job, {}):
            for script in re.findall(r"(?:^|\s)((?:ci|images)/[\w/-]+)", command):
                assert (ROOT / script).is_file()
                named += 1
    assert named > 0


def test_actions_are_pinned_to_a_commit_with_its_version():
    texts = [path.read_text() for path in (ROOT / ".github").rglob("*.yml") if path.parent.name != "ISSUE_TEMPLATE"]
    uses = [use for text in texts for use in re.findall(r"uses: ([^.\s].*)", text)]
    assert len(uses) > 5
    loose = [use for use in uses if not re.match(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+\b", use)]
    assert loose == WITHOUT_A_COMMIT
    pinned = {use.split()[0] for use in uses} - set(WITHOUT_A_COMMIT)
    assert len({use.partition("@")[0] for use in pinned}) == len(pinned), "an action has two versions"


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
