# SPDX-License-Identifier: Apache-2.0
"""What `ci/test` makes of steps: their order, what goes on after a failure, and what a landing leaves out."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from checks import subjects
from checks.run import may_start, run_all
from checks.steps import STEPS, Step

ROOT = Path(__file__).parents[2]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder with a git repository, and with the two scripts that running a step needs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ci" / "steps").mkdir(parents=True)
    (tmp_path / "ci" / "ccache.sh").touch()
    subprocess.run(["git", "init", "--quiet"], check=True)
    return tmp_path


def write_step(repository: Path, name: str, script: str) -> None:
    path = repository / "ci" / "steps" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def names(steps: list[Step]) -> list[str]:
    return [step.name for step in steps]


def test_every_step_has_a_script_and_every_script_is_a_step():
    assert sorted(names(STEPS)) == sorted(path.name for path in (ROOT / "ci" / "steps").iterdir())
    known = {step.name for step in STEPS}
    assert all(known >= {*step.needs, *step.after} for step in STEPS)
    assert not [step.name for step in STEPS if step.subject and step.level != "all"]


def test_two_steps_wait_beside_one_that_computes():
    steps = [Step("a", "all"), Step("b", "all"), Step("c", "all"), Step("x", "all", computes=True)]
    second = Step("y", "all", computes=True)
    assert names(may_start([*steps, second], [])) == ["a", "b", "x"]
    assert names(may_start([steps[2], second], [steps[0]])) == ["c", "y"]
    assert names(may_start([steps[3], second], [])) == ["x", "y"], "nobody else wants the processors"


def test_a_step_starts_after_those_that_it_waits_for():
    first = Step("first", "all")
    later = Step("later", "all", needs=("first",), after=("another",))
    assert names(may_start([first, later], [])) == ["first"]
    assert may_start([later], [first]) == []
    assert names(may_start([later], [])) == ["later"], "nobody asked for the others"


def test_steps_go_on_after_a_failure_but_for_those_that_need_it(repository, capfd):
    write_step(repository, "bad", "echo 'the reason'; exit 3")
    write_step(repository, "good", "echo 'good: 2 passed' > $1")
    write_step(repository, "silent", "true")
    steps = [
        Step("bad", "all"), Step("good", "all", after=("bad",)), Step("silent", "all"),
        Step("needy", "all", needs=("bad",)), Step("idle", "all", needs=("needy",), computes=True),
    ]  # fmt: skip
    bad, good, silent, needy, idle = run_all(steps, shown=False)
    assert (bad.note, bad.failed) == ("status 3", True)
    assert "the reason" in capfd.readouterr().out
    assert (good.failed, good.closing) == (False, ["good: 2 passed"])
    assert silent.note == "it ran nothing"
    assert needy.note == "not run: bad failed"
    assert idle.note == "not run: needy failed"


def test_the_seconds_of_processes_that_a_step_has_waited_for_are_its_own(repository):
    spins = "import time\nwhile time.process_time() < 0.3: pass"
    write_step(repository, "busy", f"echo done > $1\npython3 -c '{spins}'")
    (outcome,) = run_all([Step("busy", "all")], shown=False)
    assert outcome.processor >= 0.3


def test_an_expensive_step_runs_where_its_subject_has_changed(repository, capsys):
    step = Step("dear", "all", subject=("docs", "*.md"))
    (repository / "docs").mkdir()
    (repository / "docs" / "page.rst").write_text("one")
    assert subjects.must_run(step), "it has never passed"
    subjects.record(subjects.hashes([step, Step("other", "all")]))
    assert not subjects.must_run(step)
    assert "does not run" in capsys.readouterr().out
    (repository / "unrelated.txt").touch()
    assert not subjects.must_run(step)
    (repository / "new.md").touch()
    assert subjects.must_run(step)
    subjects.record(subjects.hashes([step]))
    (repository / "docs" / "page.rst").write_text("two")
    assert subjects.must_run(step)
    assert not subjects.must_run(Step("always", "all")), "it has no subject, so only --all runs it"
