# SPDX-License-Identifier: Apache-2.0
"""`python -m bps_rdma.torch.run`: a script behaves as without it, but for the backend of its process group."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import pytest

SAYS = """
import sys
import torch
import torch.distributed as dist
from torch.distributed import init_process_group
dist.init_process_group("gloo")  # has no effect
init_process_group(backend="gloo", rank=0, world_size=1)
total = torch.ones(3)
dist.all_reduce(total)
assert total.tolist() == [1, 1, 1]
class Kept:
    pass
import pickle
assert isinstance(pickle.loads(pickle.dumps(Kept())), Kept)
print(__name__, sys.argv, sys.path[0], dist.get_backend())
dist.destroy_process_group()
init_process_group("gloo")
print("again", dist.get_backend())
"""


def run(*words: str, cwd: Path | str = "/", **env: Any) -> subprocess.CompletedProcess[str]:
    port = str(harness.free_port())
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "bps_rdma.torch.run", *words]
    return harness.run_command(command, env=harness.clean_env(**place, **env), cwd=cwd)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "says.py"
    path.write_text(SAYS)
    return path


def test_a_script_gets_the_group_that_is_there(script):
    done = run(str(script), "--epochs", "1")
    assert done.returncode == 0, done.stderr
    first, again = done.stdout.splitlines()
    assert first == f"__main__ {[str(script), '--epochs', '1']} {script.parent} bps"
    assert again == "again bps"


def test_a_module(script):
    done = run("-m", "says", "-m", "--backend", "gloo", cwd=script.parent, PYTHONPATH=str(script.parent))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"__main__ {[str(script), '-m', '--backend', 'gloo']} {script.parent} bps")


def test_a_package_finds_the_group_when_it_is_imported(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    package.joinpath("__init__.py").write_text(
        "import torch.distributed as dist\nfrom torch.distributed import init_process_group\n"
        "print(dist.get_backend())\n"
    )
    package.joinpath("train.py").write_text("from package import init_process_group\ninit_process_group('gloo')\n")
    done = run("-m", "package.train", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "bps\n"), done.stderr


def test_a_mesh_makes_no_group_of_another_backend(script):
    script.write_text(
        "import torch.distributed as dist\ndist.destroy_process_group()\n"
        "dist.init_device_mesh('cpu', (1,))\nprint(dist.get_backend())\n"
    )
    done = run(str(script))
    assert (done.returncode, done.stdout) == (0, "bps\n"), done.stderr


@pytest.mark.parametrize(
    ("last", "status"),
    [("sys.exit(7)", 7), ("sys.exit()", 0), ("sys.exit('no')", 1), ("raise OSError(2, 'x', 'y')", 1)],
)
def test_it_ends_as_the_script_does(script, last, status):
    script.write_text(f"import sys\ndef fail():\n    {last}\nfail()\n")
    done = run(str(script))
    assert done.returncode == status
    if "raise" in last:
        assert re.findall(r'File "(.*)", line', done.stderr) == [str(script)] * 2, done.stderr
        assert done.stderr.rstrip().endswith("FileNotFoundError: [Errno 2] x: 'y'")


@pytest.mark.parametrize(
    ("words", "launched", "says"),
    [
        ([], True, "the script to run is missing"),
        (["nowhere.py"], True, "there is no file 'nowhere.py'"),
        (["-m", "nowhere"], True, "there is no module 'nowhere'"),
        (["-m", "nowhere.train"], True, "there is no module 'nowhere.train'"),
        (["-m", "json.nowhere"], True, "there is no module 'json.nowhere'"),
        (["-m", "this.nowhere"], True, "there is no module 'this.nowhere'"),
        (["/dev/null"], False, "there is no file '/dev/null'"),
        ([__file__], False, "start this with torchrun, or with bps run"),
    ],
)
def test_what_cannot_be_run(words, launched, says):
    (done,) = harness.scripts("-m", "bps_rdma.torch.run", *words, ranks=int(launched))
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
