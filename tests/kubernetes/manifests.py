# SPDX-License-Identifier: Apache-2.0
"""The manifests of examples/kubernetes, and the containers in them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
NAMES = sorted(path.name for path in FOLDER.glob("*.yaml"))


def load(name: str, changes: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """The objects of a manifest, after these changes of its text."""
    text = (FOLDER / name).read_text()
    for old, new in (changes or {}).items():
        assert old in text, f"{name} has no {old}"
        text = text.replace(old, new)
    return list(yaml.safe_load_all(text))


def pod_specs(node: Any) -> Iterator[dict[str, Any]]:
    """All pod specs within."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for value in node.values():
            yield from pod_specs(value)
    elif isinstance(node, list):
        for value in node:
            yield from pod_specs(value)
