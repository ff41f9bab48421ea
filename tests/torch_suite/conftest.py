# SPDX-License-Identifier: Apache-2.0
"""Leaves out the tests that run.py names in BPS_SUITE_LEAVE; pytest's own --deselect takes beginnings of names."""

import os


def pytest_collection_modifyitems(config, items):
    leave = set(os.environ.get("BPS_SUITE_LEAVE", "").split(","))
    config.hook.pytest_deselected(items=[item for item in items if item.name in leave])
    items[:] = [item for item in items if item.name not in leave]
