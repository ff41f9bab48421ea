# SPDX-License-Identifier: Apache-2.0
"""Packages that only some parts need. An error about a missing one names the command that installs it."""

from __future__ import annotations

import importlib.util
import shlex
import sys

# Module -> what pip calls it, as in pyproject.toml.
PACKAGES = {
    "torch": "torch>=2.4",
    "megatron.core": "megatron-core>=0.14",
    "ray": "ray>=2.60",
    "matplotlib": "matplotlib>=3.8",
    "prometheus_client": "prometheus-client>=0.20",
}


def is_installed(module: str) -> bool:
    """Returns whether `module` can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package that it is in
        return False


def install_command(module: str) -> str:
    """The command that installs it for this Python."""
    command = f"{shlex.quote(sys.executable)} -m pip install '{PACKAGES[module]}'"
    return command + " (a CPU build is enough; pytorch.org has its command)" * (module == "torch")


def require(module: str, what: str) -> None:
    """Checks that a module is there.

    Args:
        module: a key of PACKAGES.
        what: needs it.

    Raises:
        ImportError: it is not installed.
    """
    if not is_installed(module):
        raise ImportError(f"{what} needs {module}, which is not installed: {install_command(module)}", name=module)
