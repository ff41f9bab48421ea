# SPDX-License-Identifier: Apache-2.0
"""A program of which one rank is lost and started again."""

from pathlib import Path

import harness

# Steps until the rank that died has made three with the others. What {make} makes is `model` and `optimizer`; {loss} is
# the loss of the step with that generator; {end} is what is told of the end.
PROGRAM = """
import os, pathlib, signal, sys, time
import torch
import bps_rdma.torch as bps
bps.init()
torch.manual_seed(1 + bps.rank())
{make}
state = bps.TrainingState(model, optimizer, step=0, seen=[])
died = pathlib.Path(sys.argv[1])
begun_at = None
while state.step < {steps} or state.seen[-1] < 3:
    try:
        state.sync()
        begun_at = state.step if begun_at is None else begun_at
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * state.step + bps.rank())
        loss = {loss}
        if bps.rank() == 1 and state.step == 5 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        state.seen = [*state.seen, bps.size()]
        state.step += 1
        time.sleep(0.05)  # steps without an end would keep the processors from the rank that starts
    except bps.RoundAbortedError as error:
        sys.stdout.write(f"told: {{error}}\\n")
{end}
bps.shutdown()
"""


def ends_of(tmp_path: Path, *, make: str, loss: str, end: str, steps: int = 20, **settings: str) -> list[list[str]]:
    """What three ranks print at the end, of which one kills itself once, and is started again."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(make=make.strip(), loss=loss, end=end.strip(), steps=steps))
    command = [harness.binary("bps"), "run", "-np", "3", "--min-np", "2", "--restarts", "1", str(script)]
    env = harness.clean_env(**settings)
    words = [*command, str(tmp_path / "died")]
    ended = harness.run_command(words, env=env, within=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "the job goes on with 2 ranks, and it is started again" in ended.stderr, ended.stderr
    assert "enters the job" in ended.stdout, ended.stdout
    ends = [line.split() for line in ended.stdout.splitlines() if line.startswith("end:")]
    assert len(ends) == 3, ended.stdout
    return ends
