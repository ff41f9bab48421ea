# SPDX-License-Identifier: Apache-2.0
"""Calls that threads of a process make, or processes beside it."""

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Iterator


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


@contextlib.contextmanager
def beside(*calls: Callable[[], object]) -> Iterator[None]:
    """Makes these calls, which do not end, in processes forked from this one, until the block ends."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=call, daemon=True) for call in calls]
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()
