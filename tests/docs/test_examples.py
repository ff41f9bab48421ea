# SPDX-License-Identifier: Apache-2.0
"""Every example of the documentation does what it says, or its page says why it is not run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import harness
import pytest
from harness import network
from pages import PAGES, ROOT, Block, blocks_of

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
SHELL = [block for block in BLOCKS if block.language == "sh"]
CPP = [block for block in BLOCKS if block.language == "cpp"]
SHOWN = {"", "text", "ini", "yaml", "toml", "json"}  # of which nothing can be run
KNOWN = {"ranks", "file", "before", "run", "output", "not run", "ends with", "hosts"}
BEFORE = Path(__file__).parent / "before"
# To import torch takes 4 s of a processor, and with an optimizer 6 s: in CI most examples of torch are run by processes
# that are forked from one that has imported it, as ranks of tests are. `ci/test --all` runs all of them as a reader
# does, and would tell of an import that an example lacks.
AS_A_READER = ("README.md", "docs/index.md", "docs/ray.md")
LONG = bool(os.environ.get("BPS_TEST_ALL"))
harness.PRELOAD.extend(["torch", "torch.distributed", "torch._dynamo", "bps_rdma.torch", "bps_rdma.megatron"])


def by_name(blocks: list[Block]) -> list:
    return [pytest.param(block, id=block.name) for block in blocks]


def is_run(block: Block) -> bool:
    return "not run" not in block.notes and ("file" not in block.notes or "ranks" in block.notes)


def source_of(block: Block) -> str:
    """The block as a program whose tracebacks name the lines of the page."""
    before = BEFORE / f"{block.notes.get('before')}.py"
    first = f"__file__ = {str(before)!r}; exec(open(__file__).read())" if "before" in block.notes else ""
    return first + "\n" * (block.line - 1) + block.text


def may_be_forked(block: Block) -> bool:
    before = (BEFORE / f"{block.notes['before']}.py").read_text() if "before" in block.notes else ""
    return "torch" in block.text + before and not LONG and block.name.partition(":")[0] not in AS_A_READER


def place(block: Block, folder: Path) -> None:
    """Puts into the folder what earlier blocks have left."""
    (folder / "examples").symlink_to(ROOT / "examples")
    for one in block.earlier:
        if "file" in one.notes:
            (folder / one.notes["file"]).write_text(one.text)


def environment(folder: Path) -> dict[str, str]:
    """That of a user who has nothing set, and whose HOME is this folder."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("BPS_", "BYTEPS_", "DMLC_"))}
    return env | {
        "PATH": f"{Path(sys.executable).parent}:{env['PATH']}",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "HOME": str(folder),
        "USER": "me",
    }


def run(block: Block, command: list[str], folder: Path) -> None:
    """Runs it in a folder that has what earlier blocks have left, and compares what it prints."""
    place(block, folder)
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=240, check=False
    )
    compare(block, done)


def run_forked(block: Block, program: Path, ranks: int) -> None:
    """The same of a program in Python, in processes that have imported torch."""
    place(block, program.parent)
    env = {name: value for name, value in environment(program.parent).items() if name in ("HOME", "NO_COLOR", "USER")}
    ended = harness.scripts(str(program), folder=program.parent, ranks=ranks, env=env)
    status = max(done.returncode for done in ended)
    stdout, stderr = ("".join(getattr(done, name) for done in ended) for name in ("stdout", "stderr"))
    compare(block, subprocess.CompletedProcess(str(program), status, stdout, stderr))


def compare(block: Block, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == int(block.notes.get("ends with", 0)), f"{block.name}\n{done.stdout}{done.stderr}"
    if block.output is not None:
        # Ranks print in any order.
        shown = sorted(line for line in block.output.splitlines() if line.strip())
        printed = sorted(line for line in done.stdout.splitlines() if line.strip())
        patterns = [".*".join(re.escape(part) for part in line.split("...")) for line in shown]
        assert len(shown) == len(printed), f"{block.name} prints\n{done.stdout}"
        for pattern, line in zip(patterns, printed, strict=True):
            assert re.fullmatch(pattern, line), f"{block.name} prints\n{done.stdout}"


def test_there_are_examples():
    assert len(PYTHON) > 10
    assert len([block for block in PYTHON if is_run(block)]) >= 10
    assert len([block for block in SHELL if "run" in block.notes]) > 3
    directives = {block.language for block in BLOCKS if block.language.startswith("{")}
    assert {block.language for block in BLOCKS} - directives - SHOWN == {"python", "sh", "cpp"}, (
        "others would not be run"
    )


@pytest.mark.parametrize("block", by_name(PYTHON + SHELL))
def test_each_says_how_it_is_tested(block):
    assert set(block.notes) <= KNOWN, block.name
    if block.language == "sh":
        assert {"run", "not run", "hosts"} & set(block.notes), f"{block.name} is neither run nor says why not"
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    else:
        compile(block.text, block.name, "exec")


# Why a block is run nowhere; any other one says what runs it, or the like of it.
NOWHERE = (
    "it is what runs this test",
    "it takes an hour",
    "it takes minutes and gigabytes",
    "it needs the pools of the example before",
    "it loads a module into the kernel",
    "it needs a device",
    "it needs a release",
    "it needs a release, and a key to sign with",
    "there is no violation",
    "what a job prints",
)
PLACE = re.compile(r"\b(?:tests|examples|bench)(?:/[\w.-]*\w)+|\bthe step [\w-]+|\bci/test [\w-]+")


def is_there(place: str) -> bool:
    first, _, step = place.rpartition(" ")
    return (ROOT / "ci/steps" / step if first else ROOT / place).exists()


@pytest.mark.parametrize("block", by_name([one for one in BLOCKS if "not run" in one.notes]))
def test_what_is_not_run_says_what_runs_the_like_or_why_nothing_does(block):
    reason = block.notes["not run"]
    places = PLACE.findall(reason)
    assert places or reason in NOWHERE, f"{block.name} names no file of the repository, and no step: {reason}"
    assert all(map(is_there, places)), (block.name, places)


def test_the_reasons_to_run_a_block_nowhere_are_those_of_the_pages():
    assert {block.notes.get("not run") for block in BLOCKS} >= set(NOWHERE)


@pytest.mark.parametrize("block", by_name([one for one in PYTHON if is_run(one)]))
def test_python(block, tmp_path):
    program = tmp_path / "example.py"
    program.write_text(source_of(block))
    ranks = block.notes.get("ranks")
    if may_be_forked(block):
        run_forked(block, program, int(ranks or 0))
        return
    start = ["bps", "run", "-np", *ranks.split()] if ranks else []
    run(block, [*start, sys.executable, str(program)], tmp_path)


def on_a_machine_of_its_own(command: list[str]) -> list[str]:
    """What looks for jobs of this user would find those of other tests, whose sockets are in the same namespace."""
    unshare = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no namespace can be made here, so this example would see the jobs of other tests")
    return [*unshare, "sh", "-ec", 'ip link set lo up; exec "$@"', "sh", *command]


@pytest.mark.parametrize("block", by_name([one for one in SHELL if "run" in one.notes]))
def test_shell(block, tmp_path):
    before = (BEFORE / f"{block.notes['before']}.sh").read_text() if "before" in block.notes else ""
    command = ["bash", "-euo", "pipefail", "-c", before + block.text]
    looks_for_jobs = re.search(r"bps (why|top|dump)\b", block.text)
    run(block, on_a_machine_of_its_own(command) if looks_for_jobs else command, tmp_path)


@pytest.mark.parametrize("block", by_name([one for one in CPP if "not run" not in one.notes]))
def test_cpp(block):
    """It compiles with the headers that it is about."""
    source = (BEFORE / f"{block.notes['before']}.cc").read_text() + block.text + "}\n"
    command = ["c++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{ROOT / 'csrc'}", "-xc++", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, f"{block.name}\n{done.stderr}"


@pytest.mark.parametrize("block", by_name([one for one in SHELL if "hosts" in one.notes]))
def test_hosts(block, tmp_path):
    """Several hosts, as namespaces with a network and a name each: a line runs where its comment says, or on all."""
    if reason := network.why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    names = [f"host{number}" for number in range(int(block.notes["hosts"]))]
    with network.Network(names) as hosts:
        addresses = tmp_path / "hosts"
        addresses.write_text("".join(f"{hosts.address(name, 'data')} {name}\n" for name in names))
        place(block, tmp_path)
        common = "".join(line + "\n" for line in block.text.splitlines() if not re.search(r"# on host\d$", line))
        subprocess.run(["bash", "-euc", common], cwd=tmp_path, env=environment(tmp_path), check=True, timeout=30)
        common = "".join(line + "\n" for line in common.splitlines() if line.startswith("export "))
        started = []
        for name in names:
            lines = [line for line in block.text.splitlines() if line.endswith(f"# on {name}")]
            assert lines, f"{block.name}: nothing runs on {name}"
            script = f"mount --bind {addresses} /etc/hosts\nhostname {name}\n{common}" + "\n".join(lines)
            started.append(subprocess.Popen(
                [*hosts.inside(name), "unshare", "--mount", "--uts", "bash", "-euc", script], cwd=tmp_path,
                env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            ))  # fmt: skip
        for one in started:
            shown, _ = one.communicate(timeout=240)
            assert one.returncode == 0, f"{block.name}\n{shown}"
