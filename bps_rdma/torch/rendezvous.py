# SPDX-License-Identifier: Apache-2.0
"""Agreement over a torch store on the job that its ranks are about to join.

A store may serve several jobs, one after the other, and ranks that have died may have left anything in it: torchrun
keeps the store of its agent when it starts all ranks again. So nothing is counted, and what is found belongs to this
call only if it holds a random number of this call. Rank 0 opens a call under a number of its own. The others answer the
call that they see with a number of their own, again for each new one, and rank 0 repeats these numbers when it tells.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import Any

from bps_rdma.errors import DeadlineError

_CALL = "bps_rdma/call"
_LONGEST_PAUSE = 0.05  # seconds


def agree(store: Any, rank: int, world: int, host: str, tell: Callable[[list[str]], dict[str, Any]]) -> dict[str, Any]:
    """Returns what rank 0 tells all ranks that make this call.

    Args:
        store: a torch.distributed store that all `world` ranks share.
        rank: of this process.
        world: number of ranks.
        host: which host this rank is on.
        tell: on rank 0, what to tell; it gets the hosts of all ranks.

    Raises:
        DeadlineError: not all ranks made this call within the store's timeout.
    """
    number = secrets.token_hex(16)
    end = time.monotonic() + store.timeout.total_seconds()
    if rank == 0:
        return _open(store, number, world, host, tell, end)
    return _answer(store, number, rank, host, end)


def _open(
    store: Any, call: str, world: int, host: str, tell: Callable[[list[str]], dict[str, Any]], end: float
) -> dict[str, Any]:
    store.set(_CALL, call)
    answers = [{"host": host, "number": call}]
    for other in range(1, world):
        key = f"bps_rdma/{call}/rank/{other}"
        _await(lambda key=key: store.check([key]), end, f"rank {other} has not come")  # type: ignore[misc]
        answers.append(json.loads(store.get(key)))
    told = tell([str(each["host"]) for each in answers])
    store.set(f"bps_rdma/{call}/job", json.dumps(told | {"numbers": [each["number"] for each in answers]}))
    return told


def _answer(store: Any, number: str, rank: int, host: str, end: float) -> dict[str, Any]:
    answered = ""
    told: dict[str, Any] = {}

    def is_told() -> bool:
        nonlocal answered, told
        if not store.check([_CALL]):
            return False
        call = store.get(_CALL).decode()
        if call != answered:
            answered = call
            store.set(f"bps_rdma/{call}/rank/{rank}", json.dumps({"host": host, "number": number}))
        if not store.check([f"bps_rdma/{call}/job"]):
            return False
        told = json.loads(store.get(f"bps_rdma/{call}/job"))
        return bool(told["numbers"][rank] == number)  # else of an attempt before this one

    _await(is_told, end, "rank 0 has not told which job to join: it or another rank has not come")
    return told


def _await(condition: Callable[[], bool], end: float, missing: str) -> None:
    pause = 0.001
    while not condition():
        if time.monotonic() > end:
            raise DeadlineError(missing, "look into the logs of the other ranks")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
