# SPDX-License-Identifier: Apache-2.0
"""What the package imports: its own modules in no circle; and packages of others, which an extra brings each.

`pip install bps_rdma[...]`: each extra brings what some code imports, and what is imported can be had by one.
"""

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import bps_rdma
from bps_rdma import extras, scale_model
from bps_rdma.tools import scale_model as tools_scale_model

FOR_DEVELOPERS = {"test", "docs", "dev"}
# Imported where a user or another environment has brought them: numpy's bfloat16; the MPI peers of the benchmark; what
# only type checkers import, which have it; frameworks that their users have.
BROUGHT = {"lightning", "ml_dtypes", "mpi4py", "torchft", "typing_extensions"}
ROOT = Path(bps_rdma.__file__).parent


def modules() -> dict[str, ast.Module]:
    """Every module of the installed package, by its full name."""
    found = {}
    for file in ROOT.rglob("*.py"):
        parts = ("bps_rdma", *file.relative_to(ROOT).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(file.read_text(encoding="utf-8"))
    return found


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


# Starts torch's process groups; moves its tensors, where ray.util.collective is given some; measures those of GPUs.
WITH_TORCH = ("bps_rdma.ray.train", "bps_rdma.ray.collective", "bps_rdma.tools.bench.on_gpu")


def test_the_core_of_the_package_knows_no_framework():
    """torch/ and megatron/ use the rest of the package. Only tools that compare trainings or measure GPUs know them."""
    trees = modules()
    for name, tree in trees.items():
        if name.startswith(("bps_rdma.torch", "bps_rdma.megatron", "bps_rdma.tools.compare")) or name in WITH_TORCH:
            continue
        below = imported(tree, set(trees))
        assert not {other for other in below if other.startswith(("bps_rdma.torch", "bps_rdma.megatron"))}, name


def test_the_layer_that_moves_tensors_stands_below_all_others():
    trees = modules()
    for name, tree in trees.items():
        if name.startswith("bps_rdma.torch.transfer"):
            above = {other for other in imported(tree, set(trees)) if other.startswith("bps_rdma.torch")}
            assert {other for other in above if not other.startswith("bps_rdma.torch.transfer")} == set(), name


def test_the_library_stands_below_its_tools():
    """`import bps_rdma` loads no tool. The launcher and Ray's jobs ask `inspection` what a job waits for."""
    trees = modules()
    asked = {
        "bps_rdma.cli",
        "bps_rdma.bench",
        "bps_rdma.scale_model",
        "bps_rdma.launch.run",
        "bps_rdma.ray.supervision",
    }
    for name, tree in trees.items():
        if not name.startswith("bps_rdma.tools") and name not in asked:
            assert not {one for one in imported(tree, set(trees)) if one.startswith("bps_rdma.tools")}, name


def test_the_former_paths_of_tools_still_work(tmp_path):
    command = [sys.executable, "-m", "bps_rdma.bench.peers", "nosuch"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "unknown MPI library 'nosuch'" in done.stderr
    assert scale_model.simulate is tools_scale_model.simulate


# ---- Extras


def required() -> dict[str, set[Requirement]]:
    """What each extra of the installed package requires; under "" what all need."""
    found: dict[str, set[Requirement]] = {}
    for line in metadata.requires("bps_rdma") or ():
        requirement = Requirement(line)
        extra = str(requirement.marker).partition("extra == ")[2].strip('"') if requirement.marker else ""
        requirement.marker = None
        found.setdefault(extra, set()).add(requirement)
    return {extra: requirements for extra, requirements in found.items() if extra not in FOR_DEVELOPERS}


def packages() -> dict[str, set[str]]:
    """The packages of others that the code imports anywhere, each with the modules that do."""
    trees = modules()
    beside = Path(bps_rdma.__file__).parents[1] / "bps_rdma_torch" / "__init__.py"
    trees["bps_rdma_torch"] = ast.parse(beside.read_text(encoding="utf-8"))
    found: dict[str, set[str]] = {}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            for top in {full.partition(".")[0] for full in names}:
                if top not in sys.stdlib_module_names and not top.startswith("bps_rdma"):
                    found.setdefault(top, set()).add(name)
    return found


def distributions() -> dict[str, str]:
    """Package that is imported -> what pip calls it."""
    optional = {module.partition(".")[0]: Requirement(text).name for module, text in extras.PACKAGES.items()}
    return optional | {name: name for name in ("numpy", "typer", "rich")}


def test_each_extra_is_imported_by_code():
    known = {name: module for module, name in distributions().items()}
    users = packages()
    found = required()
    assert {"", "torch", "megatron", "ray", "ray-train", "plot", "metrics", "bench"} <= found.keys()
    for extra, requirements in found.items():
        for requirement in requirements:
            assert requirement.name in known, f"no code is known to need {requirement} of the extra {extra!r}"
            assert users.get(known[requirement.name]), f"nothing imports {requirement} of the extra {extra!r}"


def test_what_is_imported_can_be_had():
    names = {requirement.name for requirements in required().values() for requirement in requirements}
    for package, users in packages().items():
        assert package in BROUGHT or distributions().get(package, package) in names, (package, users)


def test_hints_and_extras_name_the_same_versions():
    of_extras = {r.name: str(r.specifier) for requirements in required().values() for r in requirements}
    for text in extras.PACKAGES.values():
        assert of_extras[Requirement(text).name] == str(Requirement(text).specifier), text


def test_what_the_benchmarks_can_use_is_one_extra():
    """`bench` is what some module of the benchmarks imports: no more, and no less."""
    users = packages()
    of_benchmarks = {
        name
        for name, importers in users.items()
        if any(one.startswith(("bps_rdma.tools.bench", "bps_rdma.tools.compare")) for one in importers)
    }
    wanted = {distributions().get(name, name) for name in of_benchmarks - BROUGHT} - {r.name for r in required()[""]}
    assert {requirement.name for requirement in required()["bench"]} == wanted


def test_no_hint_names_what_is_not_published():
    """An extra can be asked for by who installs a wheel or the tree; a hint has the command that works everywhere."""
    root = Path(__file__).parents[3]
    files = [file for folder in ("bps_rdma", "examples") for file in (root / folder).rglob("*")]
    texts = {file: file.read_text(encoding="utf-8") for file in files if file.suffix in {".py", ".md", ".sh", ".yaml"}}
    assert len(texts) > 150
    assert [str(file) for file, text in texts.items() if "bps_rdma[" in text] == []
