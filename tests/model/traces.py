# SPDX-License-Identifier: Apache-2.0
"""Checks that simulated jobs do only what the models do: spin follows what the simulator has recorded.

    python tests/model/traces.py [--seeds 1500] [--simulator build/ci/release/tests/sim/bps_sim]

A recording is the list of a job's actions, such as "worker 1 pushes partition 0". The model, compiled with TRACE
(trace.pml), takes a step that has an action only where the recording has it next. A recording is accepted if the model
can follow it to its end. Recordings that were changed, in ways in which no job can behave, must not be.
"""

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SECONDS = 200  # of one search
CHANGED = 40  # recordings, of which each action is dropped and doubled

Actions = list[int]


@dataclass(frozen=True)
class Model:
    """A model that jobs are recorded for.

    Attributes:
        name: of the model.
        sizes: with which it has the jobs that are recorded.
        last: what a recording ends with, but for what is of no consequence any more.
        forgets: what came before one of these may have had no effect.
        optional: what may happen, or happen twice, without any effect.
        swapped: two actions of which the second one is an effect of the first, and differs in nothing else.
    """

    name: str
    sizes: tuple[str, ...]
    last: frozenset[int]
    forgets: frozenset[int]
    optional: frozenset[int]
    swapped: tuple[int, int]


MODELS = (
    Model("rounds", ("DEADLINES=2",), frozenset({10, 11}), frozenset(), frozenset({13}), (1, 2)),
    Model("failover", ("PARTS=2", "ROUNDS=2"), frozenset({10}), frozenset({8}), frozenset({7}), (2, 3)),
    Model("scheduler", ("DEATHS=2",), frozenset({2}), frozenset({3, 6}), frozenset({6}), (1, 2)),
)


def kind(action: int) -> int:
    """What happens, without to whom."""
    return action // 16


def record(simulator: Path, model: str, seeds: int) -> list[Actions]:
    """What the simulator does with these seeds."""
    words = [str(simulator), "--actions", model, "1", str(seeds)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(words)}: status {done.returncode}\n{done.stderr}")
    return [actions for line in done.stdout.splitlines() if (actions := [int(word) for word in line.split()])]


def changed(model: Model, actions: Actions) -> Iterator[tuple[str, Actions]]:
    """What no job can do: one action dropped, done twice, or seen before its cause."""
    last = max(at for at, action in enumerate(actions) if kind(action) in model.last)
    forgotten = max((at for at, action in enumerate(actions) if kind(action) in model.forgets), default=0)
    for at, action in enumerate(actions[: last + 1]):
        if kind(action) in model.optional:
            continue
        # Nothing need follow the last one: a worker that has done all steps may hear that its view has ended.
        is_last_word = kind(action) in model.forgets and all(later % 16 != action % 16 for later in actions[at + 1 :])
        if at >= forgotten and not is_last_word:
            yield "dropped", actions[:at] + actions[at + 1 :]
        yield "doubled", actions[: at + 1] + actions[at:]
        cause, effect = model.swapped
        if kind(action) == cause and at >= forgotten and (other := action + 16 * (effect - cause)) in actions[at:]:
            there = actions.index(other, at)
            yield "swapped", [*actions[:at], other, *actions[at + 1 : there], action, *actions[there + 1 :]]


def follow(model: Model, recordings: list[Actions], folder: Path) -> set[int]:
    """Which of the recordings the model accepts."""
    for name in (f"{model.name}.pml", "trace.pml", "traces.h"):
        shutil.copy(HERE / name, folder)
    lines = [f"{len(recordings)}", *(f"{len(one)} {' '.join(map(str, one))}" for one in recordings)]
    (folder / "traces").write_text("\n".join(lines) + "\n")
    defines = [f"-D{one}" for one in (*model.sizes, "TRACE", f"TRACES={len(recordings)}")]
    output = ""
    for words in (
        ["spin", "-a", *defines, f"{model.name}.pml"],
        ["gcc", "-w", "-O2", "-DSAFETY", "-DCOLLAPSE", "-DNOREDUCE", "-DMEMLIM=4096", "-o", "pan", "pan.c"],
        ["./pan", "-m1000000", "-n", "-E", "-w24"],
    ):
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
        output = done.stdout + done.stderr
        if done.returncode != 0:
            sys.exit(f"error: {' '.join(words)}: status {done.returncode}\n{output}")
    if "errors: 0" not in output or re.search(r"out of memory|search depth too small|not completed", output):
        sys.exit(f"error: {model.name}: the search was not complete\n{output}")
    return {int(number) for number in re.findall(r"^accepted (\d+)$", output, re.MULTILINE)}


def check(model: Model, simulator: Path, seeds: int) -> tuple[int, int]:
    """How many recordings were accepted, and how many changed ones refused. Ends the program otherwise."""
    recordings = record(simulator, model.name, seeds)
    draw = random.Random(1)
    changes = [
        (f"{how}: {one}", one) for actions in draw.sample(recordings, CHANGED) for how, one in changed(model, actions)
    ]
    with tempfile.TemporaryDirectory() as folder:
        accepted = follow(model, recordings + [one for _, one in changes], Path(folder))
    refused = [one for number, one in enumerate(recordings) if number not in accepted]
    if refused or len(recordings) < seeds / 4:
        shortest = min(refused, key=len, default=[])
        of_all = f"{len(refused)} of {len(recordings)} recordings"
        sys.exit(f"error: {model.name} cannot follow {of_all}, such as {shortest}")
    wrong = [how for number, (how, _) in enumerate(changes, len(recordings)) if number in accepted]
    if wrong:
        sys.exit(f"error: {model.name} accepts {len(wrong)} of {len(changes)} changed recordings, such as {wrong[0]}")
    return len(recordings), len(changes)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1500)
    parser.add_argument("--only", help="the models with this in their names")
    parser.add_argument("--simulator", type=Path, default=Path("build/ci/release/tests/sim/bps_sim"))
    options = parser.parse_args()
    for model in MODELS:
        if (options.only or "") not in model.name:
            continue
        begin = time.monotonic()
        accepted, refused = check(model, options.simulator, options.seeds)
        seconds = time.monotonic() - begin
        print(f"{model.name}: the model follows {accepted} simulated jobs, and none of {refused} changed ones, "
              f"{seconds:.1f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
