# SPDX-License-Identifier: Apache-2.0
"""The chaos campaign: jobs to whose members something happens, and what must hold all the same.

    python -m tests.chaos --seed 1 --trials 60
    python -m tests.chaos --seed 1 --trial 17     # repeats one, and keeps its logs
    python -m tests.chaos --views --trials 17     # jobs that go on without the members that they lose
    python -m tests.chaos --leaving --trials 17   # jobs that members leave while the others are at work

Every sum is right, or every surviving rank gets an exception within its deadline that names the culprit; no byte of an
array changes after its call has returned or raised, and none around it ever; nothing is left behind. What holds with
--views is said in views_run.py, and with --leaving in leaving_run.py. BPS_TEST_PATIENCE is a factor for all limits of
time.
"""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from tests.chaos import leaving_plan, plan, views_plan
from tests.chaos.leaving_run import LeavingRun
from tests.chaos.run import Run
from tests.chaos.views_run import ViewsRun
from tests.shared.harness import network

_LOGS = Path("build/chaos").resolve()
slowest: list[tuple[float, int]] = []  # trials of leaving: after how many seconds the last rank knew, and the number


def folder_of(trial: plan.Trial | views_plan.ViewsTrial) -> Path:
    """Where its logs are."""
    return _LOGS / f"{kind_of(trial).replace(', ', '-')}{trial.seed}-{trial.number}"


def kind_of(trial: plan.Trial | views_plan.ViewsTrial) -> str:
    """How messages call such a trial."""
    if isinstance(trial, views_plan.ViewsTrial):
        return "views, "
    return "leaving, " if isinstance(trial, leaving_plan.LeavingTrial) else ""


def violations_of(trial: plan.Trial | views_plan.ViewsTrial) -> list[str]:
    """Runs it."""
    folder = folder_of(trial)
    shutil.rmtree(folder, ignore_errors=True)
    if isinstance(trial, views_plan.ViewsTrial):
        return ViewsRun(trial, folder)()
    if not isinstance(trial, leaving_plan.LeavingTrial):
        return Run(trial, folder)()
    run = LeavingRun(trial, folder)
    violations = run()
    slowest.append((run.heard_s, trial.number))
    return violations


def campaign(
    seed: Annotated[int, typer.Option(help="Decides every trial.")] = 1,
    trials: Annotated[int, typer.Option(min=1, help="How many trials.")] = 60,
    trial: Annotated[int | None, typer.Option(help="Only this trial; its logs are kept.")] = None,
    at_once: Annotated[int, typer.Option("--at-once", min=1, help="Trials at the same time.")] = 2,
    transport: Annotated[list[str] | None, typer.Option(help="Transports to draw from. Default: shm and tcp.")] = None,
    event: Annotated[list[str] | None, typer.Option(help=f"Events to draw from: {', '.join(plan.EVENTS)}.")] = None,
    views: Annotated[bool, typer.Option("--views", help="Jobs that go on without the members that they lose.")] = False,
    leaving: Annotated[bool, typer.Option("--leaving", help="Jobs that members leave.")] = False,
    knows: Annotated[
        float, typer.Option(help="Seconds within which everybody must know who has left.")
    ] = LeavingRun.knows_s,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the chaos campaign. The exit status is 1 when a trial violated something."""
    if unknown := set(event or ()) - set(plan.EVENTS):
        raise typer.BadParameter(f"no such event: {', '.join(sorted(unknown))}", param_hint="--event")
    if (event and views) or (leaving and (event or views)):
        raise typer.BadParameter("what happens with --views and --leaving is drawn by itself", param_hint="--event")
    LeavingRun.knows_s = knows
    transports = tuple(transport or ("shm", "tcp"))
    numbers = [trial] if trial is not None else list(range(trials))
    drawn: list[plan.Trial] | list[views_plan.ViewsTrial]
    if views:
        drawn = [views_plan.draw(seed, number, transports) for number in numbers]
    elif leaving:
        drawn = [leaving_plan.draw(seed, number, transports) for number in numbers]
    else:
        # Which events there are must not depend on the machine: a trial is known by its seed and number.
        drawn = [plan.draw(seed, number, transports, tuple(event or plan.EVENTS)) for number in numbers]
    no_cuts = network.why_not() if any(one.needs_network for one in drawn) else ""
    if "rdma" in transports:
        no_cuts = "over rdma tests/rdma pulls the cables"
    possible = [one for one in drawn if not (one.needs_network and no_cuts)]
    left_out = len(drawn) - len(possible)

    found = {}
    watched = Console(stderr=True)
    with ThreadPoolExecutor(at_once) as pool:
        futures = {pool.submit(violations_of, one): one for one in possible}
        done = as_completed(futures)
        for future in track(
            done, total=len(possible), console=watched, transient=True, disable=not watched.is_terminal
        ):
            one = futures[future]
            violations = future.result()
            found[one.number] = violations
            if violations:
                more = [f"... and {len(violations) - 5} more"] if len(violations) > 5 else []
                name = f"{kind_of(one)}seed {seed}, trial {one.number}"
                print(f"{name}: {one.describe()}; logs in {folder_of(one)}",
                      *violations[:5], *more, sep="\n  ", file=sys.stderr, flush=True)  # fmt: skip
            elif trial is None:
                shutil.rmtree(folder_of(one))

    bad = sum(1 for violations in found.values() if violations)
    if as_json:
        print(json.dumps({"seed": seed, "trials": len(possible), "left_out": left_out, "violations": found}))
    else:
        skipped = f"; {left_out} network cuts left out: {no_cuts}" if left_out else ""
        what = kind_of(drawn[0])
        news = f"; everybody knew within {max(slowest)[0]:.1f} s (trial {max(slowest)[1]})" if slowest else ""
        print(f"chaos: {what}seed {seed}, {len(possible)} trials, {bad} violated something{skipped}{news}")
    raise typer.Exit(1 if bad or not possible else 0)


if __name__ == "__main__":
    typer.run(campaign)
