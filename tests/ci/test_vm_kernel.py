# SPDX-License-Identifier: Apache-2.0
"""ci/vm/kernel, while another process builds the same kernel."""

import fcntl
import os
import subprocess
from pathlib import Path

import pytest

KERNEL = Path(__file__).parents[2] / "ci" / "vm" / "kernel"
pytestmark = pytest.mark.skipif(not KERNEL.exists(), reason="not in a checkout")


def test_it_says_for_whom_it_waits(tmp_path: Path) -> None:
    if not list(Path("/usr/src").glob("**/linux-source-*.tar.*")):
        pytest.skip("no kernel source in /usr/src; ci/setup --dev installs it")
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("77 12:34:56\n")
        lock.flush()
        with subprocess.Popen(
            [KERNEL], env={**os.environ, "BPS_VM_CACHE": str(tmp_path)}, stderr=subprocess.PIPE, text=True,
            stdout=subprocess.DEVNULL, start_new_session=True,
        ) as waiting:  # fmt: skip
            assert waiting.stderr is not None
            said = waiting.stderr.readline()
            os.killpg(waiting.pid, 9)
    log = tmp_path / "build.log"
    assert said == f"waiting for process 77, which has been building a kernel for the VM since 12:34:56; log: {log}\n"
