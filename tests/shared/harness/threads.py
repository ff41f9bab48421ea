# SPDX-License-Identifier: Apache-2.0
"""Calls that threads of one process make."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_threads(*calls: Callable[[], object]) -> None:
    """Makes all calls at once, each in a thread of its own. Raises what one of them has raised, when all are over."""
    failed: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
