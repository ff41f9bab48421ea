# SPDX-License-Identifier: Apache-2.0
"""Which cases of a test every landing runs over RDMA, and which `ci/test --all` adds."""

from collections.abc import Iterable
from typing import Any

import pytest


def cases(landing: Iterable[Any], long: Iterable[Any]) -> list[Any]:
    """Values for pytest.mark.parametrize; a tuple holds those of several arguments."""
    rest = (pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.long) for one in long)
    return [*landing, *rest]
