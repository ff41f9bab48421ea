# SPDX-License-Identifier: Apache-2.0
"""The threads that complete futures of works."""

import threading
from typing import Any
from unittest import mock

import harness
import torch

from bps_rdma.torch.backend.completion import Completer


def test_the_job_ends_while_a_thread_is_added() -> None:
    """One begins where all others run callbacks."""
    completer, future = Completer(), torch.futures.Future[Any]()
    begins, may_begin, asked = threading.Event(), threading.Event(), threading.Event()
    start, counting, errors = threading.Thread.start, completer._counting, []

    def start_late(thread: threading.Thread) -> None:
        if thread.name == "bps_rdma futures":
            begins.set()
            assert may_begin.wait(30)
        start(thread)

    class Asked:
        def __enter__(self) -> None:
            asked.set()
            counting.acquire()

        def __exit__(self, *_: object) -> None:
            counting.release()

    def close() -> None:
        completer._counting = Asked()  # type: ignore[assignment]
        try:
            completer.close()
        except RuntimeError as error:
            errors.append(error)

    with mock.patch.object(threading.Thread, "start", start_late):
        completer.add(future, mock.Mock(blocker=lambda: None))
        assert begins.wait(30)
        closer = threading.Thread(target=close)
        closer.start()
        harness.eventually(lambda: asked.is_set() or not closer.is_alive(), what="close() waits, or has failed")
        may_begin.set()
        closer.join()
    assert not errors
    assert future.done()
