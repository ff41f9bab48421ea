# SPDX-License-Identifier: Apache-2.0
"""The settings of a job, with where each value comes from."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bps_rdma import _core
from bps_rdma.compression import Compression
from bps_rdma.errors import InvalidArgumentError


@dataclass(frozen=True)
class SettingValue:
    """One setting with its value; `bps config` prints them all.

    Attributes:
        name: the variable that sets it.
        value: the value in force; of a secret only "set" or "unset".
        source: where the value comes from: "default", "argument", or the name of a variable.
        default: the value without any of these.
        aliases: other variables that set it, in the order of their precedence.
        help: what it means, in a sentence.
    """

    name: str
    value: str
    source: str
    default: str
    aliases: tuple[str, ...]
    help: str


def config_with(settings: Mapping[str, object]) -> Any:
    """The settings that init() uses with these arguments."""
    config = _core.Config()
    for name, value in settings.items():
        config.set(f"BPS_{name.upper()}", _text_of(name, value), "argument")
    return config


def _text_of(name: str, value: object) -> str:
    if isinstance(value, Compression):
        return value.text
    if value is None or (isinstance(value, Collection) and not isinstance(value, str)):
        raise InvalidArgumentError(  # without the value, which may be a secret
            f"{name} is a {type(value).__name__}, and no text, number or truth value", "pass one, or leave it out"
        )
    return str(int(value)) if isinstance(value, bool) else str(value)


def no_text() -> InvalidArgumentError | None:
    """The error for a variable of a setting that is not UTF-8; None: there is none. A secret may have any bytes."""
    for name, aliases, *_, secret in _core.Config.table():
        if secret:
            continue
        for variable in (name, *aliases.split()):
            try:
                os.environb.get(variable.encode(), b"").decode()
            except UnicodeDecodeError:
                return InvalidArgumentError(f"{variable} is not a text in UTF-8", f"set {variable} to one, or unset it")
    return None


@contextmanager
def naming_what_is_no_text() -> Iterator[None]:
    """Raises the error of no_text() where reading a setting fails for that."""
    try:
        yield
    except UnicodeDecodeError:
        error = no_text()
        if error is None:
            raise
        raise error from None


def table_of(values: _core.Config) -> list[SettingValue]:
    """Every setting with its value and the source of the value; of a secret only whether it is set."""
    with naming_what_is_no_text():
        return [
            SettingValue(name, _shown(values, name, secret), values.source(name), default, tuple(aliases.split()), text)
            for name, aliases, default, text, secret in _core.Config.table()
        ]


def _shown(values: Any, name: str, secret: bool) -> str:
    try:
        text: str = values.text(name)
    except UnicodeDecodeError:
        if not secret:  # secrets may have any bytes
            raise
        text = "?"
    return ("set" if text else "unset") if secret else text
