# SPDX-License-Identifier: Apache-2.0
"""The last thing that a host of the lab starts: runs what it is told to over the management network (frames.py).

A caller that goes away takes its process with it, and the children of that process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import termios
import threading

from frames import PORT, Frames, Kind


def start(order: dict) -> tuple[subprocess.Popen, list[tuple[int, Kind]], int]:
    """The process, the descriptors of its output, and that of its input."""
    options = {"env": order["env"], "cwd": order["cwd"]}
    if order["size"] is None:
        child = subprocess.Popen(
            order["argv"], **options, bufsize=0, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        return child, [(child.stdout.fileno(), Kind.OUTPUT), (child.stderr.fileno(), Kind.ERROR)], child.stdin.fileno()
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", *order["size"], 0, 0))
    # setsid(1) makes the terminal the one that controls the session, so that Ctrl-C works.
    in_terminal = ["setsid", "--ctty", "--wait", *order["argv"]]
    child = subprocess.Popen(in_terminal, **options, stdin=its, stdout=its, stderr=its)
    os.close(its)
    return child, [(ours, Kind.OUTPUT)], ours


def listen(frames: Frames, child: subprocess.Popen, stdin: int) -> None:
    """Pass on the caller's input and signals; kill the process when the caller is gone."""
    while frame := frames.receive():
        kind, content = frame
        with contextlib.suppress(OSError):  # it has ended, or closed its input
            if kind is Kind.SIGNAL:
                os.killpg(child.pid, int(content))
            elif content:
                os.write(stdin, content)
            elif child.stdin is not None:
                child.stdin.close()
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)


def copy(frames: Frames, source: int, kind: Kind) -> None:
    """Send what the process writes."""
    with contextlib.suppress(OSError):  # the caller is gone; or the terminal, whose end is EIO
        while content := os.read(source, 1 << 16):
            frames.send(kind, content)


def serve(connection: socket.socket) -> None:
    """One process, from its order to its status."""
    frames = Frames(connection)
    frame = frames.receive()
    if frame is None:
        return
    try:
        child, outputs, stdin = start(json.loads(frame[1]))
    except OSError as error:
        frames.send(Kind.ERROR, f"{error}\n".encode())
        frames.send(Kind.STATUS, b"127")
        return
    threading.Thread(target=listen, args=(frames, child, stdin), daemon=True).start()
    copies = [threading.Thread(target=copy, args=(frames, *output)) for output in outputs]
    for thread in copies:
        thread.start()
    for thread in copies:
        thread.join()
    with contextlib.suppress(OSError):
        frames.send(Kind.STATUS, str(child.wait()).encode())
    frames.close()


def main() -> None:
    """Serve until the host ends."""
    listener = socket.create_server(("0.0.0.0", PORT), backlog=64)  # noqa: S104  # a network of this machine's own
    print("ready", flush=True)  # on the console, for Host.await_ready()
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


if __name__ == "__main__":
    main()
