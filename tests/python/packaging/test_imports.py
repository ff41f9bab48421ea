# SPDX-License-Identifier: Apache-2.0
"""How the package's modules depend on each other."""

from __future__ import annotations

import ast

from bodies.package import modules


def imported(tree: ast.Module, known: set[str]) -> set[str]:
    """The modules of the package that a module imports anywhere, also within functions and for type checkers."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else str(node.module))
    return found & known


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle, in order; empty if there is none."""
    clear: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for following in sorted(graph[path[-1]] - clear):
            if following in path:
                return [*path[path.index(following) :], following]
            found = search([*path, following])
            if found:
                return found
        clear.add(path[-1])
        return []

    return next((found for name in sorted(graph) if name not in clear for found in [search([name])] if found), [])


def test_the_search_finds_circles():
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circle({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}) == ["b", "d", "b"]


def test_imports_form_no_circle():
    trees = modules()
    known = {*trees, "bps_rdma._core"}  # a module of its own, so that importing it is not importing the package
    assert len(trees) > 50
    graph = {name: imported(tree, known) - {name} for name, tree in trees.items()}
    assert circle({**graph, "bps_rdma._core": set()}) == []


# Starts torch's process groups; moves its tensors, where ray.util.collective is given some.
WITH_TORCH = ("bps_rdma.ray.train", "bps_rdma.ray.moves")


def test_the_core_of_the_package_knows_no_framework():
    """torch/ and megatron/ use the rest of the package; only the tools that start them know of them."""
    trees = modules()
    for name, tree in trees.items():
        if name.split(".")[1:2] in (["torch"], ["megatron"], ["bench"]) or name in WITH_TORCH:
            continue
        below = imported(tree, set(trees))
        assert not {other for other in below if other.startswith(("bps_rdma.torch", "bps_rdma.megatron"))}, name


def test_the_layer_that_moves_tensors_stands_below_all_others():
    trees = modules()
    for name, tree in trees.items():
        if name.startswith("bps_rdma.torch.transfer"):
            above = {other for other in imported(tree, set(trees)) if other.startswith("bps_rdma.torch")}
            assert {other for other in above if not other.startswith("bps_rdma.torch.transfer")} == set(), name
