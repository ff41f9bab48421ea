# SPDX-License-Identifier: Apache-2.0
"""What `ci/test` makes of steps: their order, what goes on after a failure, and what a landing leaves out."""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import harness
import pytest
from checks import subjects
from checks.complaints import MOST, complaints
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


def test_the_end_says_what_failed_and_why():
    log = """
[ RUN      ] Codec.RoundTrip
/somewhere/codec_test.cc:12: Failure
Expected equality of these values:
  a
    Which is: 1
  2
[  FAILED  ] Codec.RoundTrip (0 ms)
[       OK ] Codec.Other (3 ms)
==12==ERROR: AddressSanitizer: heap-use-after-free on address 0x1
==13==LeakSanitizer has encountered a fatal error.
>       assert outcome == 3
E       AssertionError: rank 1 hangs
FAILED tests/python/test_it.py::test_that - AssertionError: rank 1 hangs
[  FAILED  ] 1 test, listed below:
[  FAILED  ] Codec.RoundTrip
1/2 Test #1: bps_tests_0 ......................***Exception: SegFault  5.52 sec
[ RUN      ] Rounds.End
2/2 Test #2: bps_tests_1 ......................   Passed    1.00 sec
""".splitlines()
    assert complaints(log) == [
        "/somewhere/codec_test.cc:12: Failure",
        "Expected equality of these values:",
        "  a",
        "    Which is: 1",
        "  2",
        "[  FAILED  ] Codec.RoundTrip (0 ms)",
        "==12==ERROR: AddressSanitizer: heap-use-after-free on address 0x1",
        "==13==LeakSanitizer has encountered a fatal error.",
        "E       AssertionError: rank 1 hangs",
        "FAILED tests/python/test_it.py::test_that - AssertionError: rank 1 hangs",
        "1/2 Test #1: bps_tests_0 ......................***Exception: SegFault  5.52 sec",
        "[ RUN      ] Rounds.End, and no end of it",
    ]
    assert complaints(["all is well", "", "0 errors"]) == ["all is well", "0 errors"], "what it said last"
    assert complaints(f"line {n}" for n in range(1000))[-1] == "line 999"
    assert len(complaints(f"E   {n}" for n in range(1000))) == MOST + 1


def test_the_seconds_of_processes_that_a_step_has_waited_for_are_its_own(repository):
    spins = "import time\nwhile time.process_time() < 0.3: pass"
    write_step(repository, "busy", f"echo done > $1\npython3 -c '{spins}'")
    (outcome,) = run_all([Step("busy", "all")], shown=False)
    assert outcome.processor >= 0.3


LEAVES = """
setsid sh -c 'trap "" HUP INT TERM; sleep 1000; sleep 1000' &
sh -c 'setsid sleep 1000 &'
: > begun
wait
"""


def marked(mark: str) -> list[str]:
    """What runs with this text among its variables."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended
            if mark.encode() in environ.read_bytes():
                found.append((environ.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@pytest.mark.parametrize(
    ("signum", "options"),
    [(signal.SIGKILL, []), (signal.SIGKILL, ["--repeat", "1"]), (signal.SIGTERM, []), (signal.SIGHUP, [])],
)
def test_a_step_ends_with_whoever_runs_it(signum, options, repository):
    """So do its processes in sessions of their own, those whose parent has ended, and those that ignore signals."""
    shutil.copy(ROOT / "ci" / "test", repository / "ci")
    shutil.copytree(ROOT / "ci" / "checks", repository / "ci" / "checks")
    (repository / ".venv" / "bin").mkdir(parents=True)
    (repository / ".venv" / "bin" / "python").touch()
    write_step(repository, "ray", LEAVES)
    mark = f"BPS_TEST_MARK={repository}"
    with subprocess.Popen(["ci/test", *options, "ray"], env=dict(os.environ, BPS_TEST_MARK=str(repository))) as test:
        harness.eventually((repository / "begun").exists, what="the step")
        harness.eventually(lambda: marked(mark).count("sleep 1000 ") == 2, what="two processes that sleep")
        test.send_signal(signum)
    harness.eventually(lambda: marked(mark), what="the end of all", until=lambda left: not left)


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
