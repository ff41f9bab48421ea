# SPDX-License-Identifier: Apache-2.0
"""The hosts of a job: `-H host1:8,host2:8`, and files in the form of MPI's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bps_rdma.errors import InvalidArgumentError

# ssh takes this for a host, with or without a user's name in front. It must not look like an option, nor mean anything
# to a shell. IPv6 addresses stand in brackets.
_HOST = r"(?:[\w.-]+@)?(?:\[[0-9A-Fa-f:.%\w]+\]|[\w][\w.-]*)"


@dataclass(frozen=True)
class Slots:
    """A host, as ssh takes it, and how many ranks it has room for."""

    host: str
    slots: int


def parse_hosts(text: str, option: str = "-H") -> list[Slots]:
    """Reads `host1:8,host2:8`; without a number a host has one slot, and of a host that comes twice the slots add up.

    Raises:
        InvalidArgumentError: it is not of this form.
    """
    found = []
    for word in text.split(","):
        match = re.fullmatch(rf"({_HOST})(?::(\d+))?", word.strip())
        if match is None or match[2] == "0":
            raise InvalidArgumentError(
                f"{option} {text!r}: {word!r} is not a host with its slots", "write them as in host1:8,host2:8"
            )
        found.append(Slots(_bare(match[1]), int(match[2] or 1)))
    return _merged(found)


def read_hostfile(path: Path) -> list[Slots]:
    """Reads a file with a host in each line: `host slots=8`, `host:8` or `host`; `#` begins a comment.

    Raises:
        InvalidArgumentError: it cannot be read, names no host, or a line is not of this form.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InvalidArgumentError(f"--hostfile {path}: {why}", "name a file with a host in each line") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        match = re.fullmatch(rf"({_HOST})(?::(\d+))?", words[0])
        options = [re.fullmatch(r"(slots|max[_-]slots)=(\d+)", word) for word in words[1:]]
        slots = [int(option[2]) for option in options if option and option[1] == "slots"]
        slots += [int(match[2])] if match and match[2] else []
        if match is None or None in options or 0 in slots or len(slots) > 1:
            raise InvalidArgumentError(
                f"{path}, line {number}: {line.strip()!r} is not a host with its slots", "write it as in host1 slots=8"
            )
        found.append(Slots(_bare(match[1]), slots[0] if slots else 1))
    if not found:
        raise InvalidArgumentError(f"--hostfile {path} names no host", "write a host in each line: host1 slots=8")
    return _merged(found)


def _bare(host: str) -> str:
    return host.replace("[", "").replace("]", "")


def _merged(hosts: Iterable[Slots]) -> list[Slots]:
    found: dict[str, int] = {}
    for one in hosts:
        found[one.host] = found.get(one.host, 0) + one.slots
    return [Slots(host, slots) for host, slots in found.items()]
