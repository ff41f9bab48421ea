# SPDX-License-Identifier: Apache-2.0
"""ci/release: a tree that is no release is told why, and the archives of servers have what they must."""

import importlib.util
import tarfile
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "ci" / "release"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="not in a checkout")
CHANGELOG = """# Changelog

## [Unreleased]

## [1.2.3] - 2026-01-02

A line.

### Added
- x

## [1.2.2] - 2026-01-01

Old.
"""


@pytest.fixture(scope="module")
def release():
    loader = SourceFileLoader("release", str(SCRIPT))
    spec = importlib.util.spec_from_loader("release", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "CMakeLists.txt").write_text("project(bps_rdma VERSION 1.2.3 LANGUAGES NONE)\n")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "examples" / "kubernetes").mkdir(parents=True)
    (tmp_path / "examples" / "kubernetes" / "job.yaml").write_text("image: example.org/bps_rdma:1.2.3\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "kubernetes.md").write_text("docker push $REGISTRY/bps_rdma-ray:1.2.3\n")
    (tmp_path / "pyproject.toml").write_text('Source = "https://github.com/somebody/bps_rdma"\n')
    return tmp_path


def test_this_tree_agrees_with_itself(release):
    assert release.problems(ROOT, None) == []


def test_a_release(release, tree):
    assert release.problems(tree, "v1.2.3") == []


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("CMakeLists.txt", "1.2.3", "1.2.4", "the tag must be v1.2.4"),
        ("CMakeLists.txt", "1.2.3", "1.2.4", "no section [1.2.4]"),
        ("CHANGELOG.md", " - 2026-01-02", "", "no date"),
        ("CHANGELOG.md", "## [Unreleased]\n", "## [Unreleased]\n- more\n", "changes in [Unreleased]"),
        ("examples/kubernetes/job.yaml", "1.2.3", "1.2.2", "job.yaml has the image bps_rdma:1.2.2"),
        ("docs/kubernetes.md", "1.2.3", "1.2.2", "docs/kubernetes.md has the image bps_rdma-ray:1.2.2"),
        ("pyproject.toml", "somebody", "OWNER", "pyproject.toml has OWNER"),
    ],
)
def test_what_keeps_a_tree_from_being_one(release, tree, file, old, new, said):
    text = (tree / file).read_text()
    assert old in text
    (tree / file).write_text(text.replace(old, new))
    assert any(said in problem for problem in release.problems(tree, "v1.2.3"))


def test_notes_are_one_section(release):
    assert release.sections_of(CHANGELOG)["1.2.3"] == ("2026-01-02", "A line.\n\n### Added\n- x")


def wheel(folder: Path, tag: str, names: tuple[str, ...]) -> None:
    with zipfile.ZipFile(folder / f"bps_rdma-1.2.3-cp312-cp312-{tag}.whl", "w") as archive:
        for name in names:
            archive.writestr(name, f"{tag} {name}")


def test_archives_of_servers(release, tmp_path):
    names = ("bps_rdma/__init__.py", "bps_rdma-1.2.3.data/scripts/bps-server",
      "bps_rdma-1.2.3.data/scripts/bps-scheduler", "bps_rdma-1.2.3.dist-info/licenses/LICENSE")  # fmt: skip
    for tag in ("manylinux_2_27_x86_64.manylinux_2_28_x86_64", "manylinux_2_28_aarch64"):
        wheel(tmp_path, tag, names)
    made = release.archive_servers(tmp_path)
    assert {path.name for path in made} == {f"bps-servers-1.2.3-linux-{cpu}.tar.gz" for cpu in ("x86_64", "aarch64")}
    with tarfile.open(tmp_path / "bps-servers-1.2.3-linux-aarch64.tar.gz") as archive:
        modes = {member.name: member.mode for member in archive}
        assert modes == {f"bps-servers-1.2.3-linux-aarch64/{name}": mode for name, mode in
                         (("bps-server", 0o755), ("bps-scheduler", 0o755), ("LICENSE", 0o644))}  # fmt: skip
        text = archive.extractfile("bps-servers-1.2.3-linux-aarch64/bps-server").read().decode()
    assert text.startswith("manylinux_2_28_aarch64 ")


def test_a_wheel_without_the_binaries_is_refused(release, tmp_path):
    wheel(tmp_path, "manylinux_2_28_x86_64", ("bps_rdma-1.2.3.data/scripts/bps-server",))
    with pytest.raises(SystemExit, match="of the two binaries and LICENSE"):
        release.archive_servers(tmp_path)
