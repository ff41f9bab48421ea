# SPDX-License-Identifier: Apache-2.0
"""This terminal becomes that of a shell on a host of the lab; started by ci/lab/hosts and ci/lab/shell."""

from __future__ import annotations

import os
import subprocess
import sys
import termios
import threading
import tty
from collections.abc import Sequence
from pathlib import Path

from .frames import Frames, Kind
from .host import management_address
from .lab import Lab
from .process import connect

HERE = Path(__file__).resolve().parent


def shell(host: int, command: Sequence[str]) -> int:
    """Run a command, or a shell, on a host; returns the status for our own shell."""
    is_terminal = os.isatty(0)
    size = tuple(os.get_terminal_size()) if is_terminal else (80, 24)
    env = {"TERM": os.environ.get("TERM", "dumb"), "HISTFILE": "", "PS1": r"\u@\h:\w\$ "}
    # The user's own start-up files may want to write.
    frames = connect(management_address(host), command or ["bash", "--norc", "-i"], env, size[::-1])
    before = termios.tcgetattr(0) if is_terminal else None
    if before:
        tty.setraw(0)
    threading.Thread(target=_forward, args=(frames,), daemon=True).start()
    try:
        while frame := frames.receive():
            if frame[0] is Kind.STATUS:
                return int(frame[1])
            os.write(1, frame[1])
        return 1  # the host has ended
    finally:
        if before:
            termios.tcsetattr(0, termios.TCSADRAIN, before)


def _forward(frames: Frames) -> None:
    while typed := os.read(0, 4096):
        frames.send(Kind.INPUT, typed)


def main(what: str, number: str, *rest: str) -> int:
    """Do `boot HOSTS [RAILS]` or `shell HOST [COMMAND...]`; returns the exit status."""
    if what == "shell":
        return shell(int(number), rest)
    with Lab(int(number), *map(int, rest)) as lab:
        for host in lab.hosts:
            print(f"{host.name} has {', '.join(host.rails)}")
        places = [*(host.name for host in lab.hosts[1:]), "switch"]
        is_tmux = "TMUX" in os.environ
        windows = [_open_window(place) for place in places] if is_tmux else []
        if is_tmux:
            print("Ctrl-B and a number: a shell on another host, or on the switch, where cables are pulled")
        else:
            print(f"in other terminals: {', '.join(f'ci/lab/shell {place}' for place in places)}")
        print("this is h0, and its exit ends the lab", flush=True)
        try:
            return shell(0, ())
        finally:
            for window in windows:  # a host that ends like this one says good-bye to nobody
                subprocess.run(["tmux", "kill-window", "-t", window], check=False, capture_output=True)


def _open_window(place: str) -> str:
    """A shell on this host, in a window of our tmux; returns the window's id."""
    command = ["tmux", "new-window", "-d", "-P", "-F", "#{window_id}", "-n", place, f"{HERE}/shell", place]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
