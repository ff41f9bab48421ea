# SPDX-License-Identifier: Apache-2.0
"""`bps pool`: what pools of servers have, and which jobs they serve."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from bps_rdma import _core
from bps_rdma.errors import BpsError, InvalidArgumentError
from bps_rdma.launch.pools import connect, parse_pools
from bps_rdma.terminal import print_error, wide_console


def pool(
    pools: Annotated[
        str | None, typer.Argument(metavar="[HOST:PORT]", help="As in dpu1,dpu2:9031. Default: BPS_POOL.")
    ] = None,
    end: Annotated[str | None, typer.Option(metavar="JOB", help="End the servers of this job of yours.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Show how much of each pool is taken, and your jobs there.

    BPS_POOL_KEY_FILE says who you are. The user `operator` sees the jobs of all, and may end them.
    """
    names = parse_pools(_core.Config().text("BPS_POOL") if pools is None else pools)
    if not names:
        raise InvalidArgumentError("no pool is named", "name one, as in `bps pool dpu1:9030`, or set BPS_POOL")
    found: list[dict[str, Any]] = []
    status = 0
    for name in names:
        try:
            client = connect(name)
            if end is not None:
                why = client.end(end)
                print(f"{name}: {f'it has ended before: {why}' if why else 'it is ended'}", file=sys.stderr)
            found.append({"pool": str(name)} | json.loads(client.list()))
        except BpsError as error:
            status = 1
            found.append({"pool": str(name), "error": error.message, "hint": error.hint})
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _show(found)
    return status


def _show(found: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    for one in found:
        if "error" in one:
            print_error(one["error"], one["hint"])
            continue
        print(
            f"{one['pool']}: {one['jobs_taken']} of {one['most_jobs']} jobs, {one['cores_taken']} of {one['cores']} "
            f"cores, {one['memory_taken'] >> 20} of {one['memory'] >> 20} MiB; load {one['load']:.2f}"
        )
        if not one["jobs"] and not one["ended"]:
            continue
        table = Table(box=SIMPLE_HEAD)
        for heading in ("job", "user", "state", "for", "cores", "memory", "used", "computed"):
            table.add_column(heading, overflow="fold")
        for job in [*one["jobs"], *one["ended"]]:
            used = f"{job['memory_used'] >> 20} MiB" if "memory_used" in job else ""
            computed = f"{job['cpu_seconds']:.1f} s" if "cpu_seconds" in job else ""
            state = job["state"] if "why" not in job else f"{job['state']}: {job['why']}"
            table.add_row(
                job["job"], job["user"], state, f"{job['seconds']:.0f} s", str(job["cores"]),
                f"{job['memory'] >> 20} MiB", used, computed,
            )  # fmt: skip
        wide_console().print(table)
