# SPDX-License-Identifier: Apache-2.0
"""The chaos campaign: jobs to whose members something happens, and what must hold all the same.

    python -m tests.chaos --seed 1 --trials 60
    python -m tests.chaos --seed 1 --trial 17     # repeats one, and keeps its logs

Every sum is right, or every surviving rank gets an exception within its deadline that names the culprit; no byte of an
array changes after its call has returned or raised, and none around it ever; nothing is left behind.
"""

from __future__ import annotations

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from tests.chaos import network, plan
from tests.chaos.run import Run

_LOGS = Path("build/chaos").resolve()


def campaign(
    seed: Annotated[int, typer.Option(help="Decides every trial.")] = 1,
    trials: Annotated[int, typer.Option(min=1, help="How many trials.")] = 60,
    trial: Annotated[int | None, typer.Option(help="Only this trial; its logs are kept.")] = None,
    at_once: Annotated[int, typer.Option("--at-once", min=1, help="Trials at the same time.")] = 2,
    transport: Annotated[list[str] | None, typer.Option(help="Transports to draw from. Default: shm and tcp.")] = None,
    event: Annotated[list[str] | None, typer.Option(help=f"Events to draw from: {', '.join(plan.EVENTS)}.")] = None,
    patience: Annotated[float, typer.Option(help="Factor for all limits of time.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the chaos campaign. The exit status is 1 when a trial violated something."""
    if unknown := set(event or ()) - set(plan.EVENTS):
        raise typer.BadParameter(f"no such event: {', '.join(sorted(unknown))}", param_hint="--event")
    transports = tuple(transport or ("shm", "tcp"))
    # Which events there are must not depend on the machine: a trial is known by its seed and number.
    events = tuple(event or plan.EVENTS)
    no_cuts = network.why_not() if "cut" in events and "rdma" not in transports else ""
    if "rdma" in transports:
        no_cuts = "over rdma tests/rdma pulls the cables"
    numbers = [trial] if trial is not None else list(range(trials))
    drawn = [plan.draw(seed, number, transports, events) for number in numbers]
    left_out = [one for one in drawn if one.event == "cut" and no_cuts]
    runs = [Run(one, _LOGS / f"{seed}-{one.number}", patience) for one in drawn if one not in left_out]
    _LOGS.mkdir(parents=True, exist_ok=True)

    found = {}
    watched = Console(stderr=True)
    with ThreadPoolExecutor(at_once) as pool:
        futures = {pool.submit(run): run for run in runs}
        done = as_completed(futures)
        for future in track(done, total=len(runs), console=watched, transient=True, disable=not watched.is_terminal):
            run = futures[future]
            violations = future.result()
            found[run.trial.number] = violations
            if violations:
                more = [f"... and {len(violations) - 5} more"] if len(violations) > 5 else []
                print(f"seed {seed}, trial {run.trial.number}: {run.trial.describe()}; logs in {run.folder}",
                      *violations[:5], *more, sep="\n  ", file=sys.stderr, flush=True)  # fmt: skip
            elif trial is None:
                shutil.rmtree(run.folder)

    bad = sum(1 for violations in found.values() if violations)
    if as_json:
        print(json.dumps({"seed": seed, "trials": len(runs), "left_out": len(left_out), "violations": found}))
    else:
        skipped = f"; {len(left_out)} network cuts left out: {no_cuts}" if left_out else ""
        print(f"chaos: seed {seed}, {len(runs)} trials, {bad} violated something{skipped}")
    raise typer.Exit(1 if bad or not runs else 0)


if __name__ == "__main__":
    typer.run(campaign)
