"""One version, one licence and one set of pinned dependencies for all seven packages."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import millpond
from release.changelog import stale_pages
from release.distributions import PACKAGES

ROOT = Path(__file__).parents[2]
FOLDERS = [
    ROOT,
    *(ROOT / "integrations" / name for name in ("langchain", "llama-index", "qdrant", "milvus", "lancedb", "pgvector")),
]
OURS = {"millpond", "langchain-millpond", "llama-index-millpond"} | {
    f"millpond-{name}" for name in ("qdrant", "milvus", "lancedb", "pgvector")
}


def project(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def requirements(folder: Path) -> list[Requirement]:
    table = project(folder)
    lines = [
        *table["dependencies"],
        *(line for extra in table.get("optional-dependencies", {}).values() for line in extra),
    ]
    return [Requirement(line) for line in lines]


PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split())


def test_the_seven_packages_have_one_version():
    versions = {project(folder)["name"]: project(folder)["version"] for folder in FOLDERS}
    assert versions.keys() == OURS
    assert set(versions.values()) == {millpond.__version__}


@pytest.mark.parametrize("name", sorted(OURS))
def test_the_installed_packages_have_this_version(name: str):
    assert version(name) == millpond.__version__


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_our_own_packages_are_required_in_this_version(folder: Path):
    own = [line for line in requirements(folder) if line.name in OURS and not line.extras]
    assert own
    assert {str(line.specifier) for line in own} == {f"=={millpond.__version__}"}


def test_the_changelog_has_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(millpond.__version__)}\]", changelog, re.MULTILINE)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_package_has_licence_readme_and_types(folder: Path):
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert project(folder)["license"] == "Apache-2.0"
    assert (folder / "README.md").read_text(encoding="utf-8").count("\n") > 10
    markers = list((folder / "src" if folder == ROOT else folder).rglob("py.typed"))
    assert len(markers) == (4 if folder.name == "llama-index" else 1)
    assert all((marker.parent / "__init__.py").is_file() for marker in markers)


@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name if folder != ROOT else "core" for folder in FOLDERS])
def test_a_release_checks_all_import_packages(folder: Path):
    sources = folder / "src" if folder == ROOT else folder
    typed = {path.parent.relative_to(sources).as_posix() for path in sources.rglob("py.typed")}
    assert typed == {*PACKAGES[project(folder)["name"]]}


def test_namespace_packages_have_no_init_file():
    namespace = ROOT / "integrations" / "llama-index" / "llama_index"
    assert {path.parent.relative_to(namespace).as_posix() for path in namespace.rglob("__init__.py")} == {
        "embeddings/millpond",
        "postprocessor/millpond_rerank",
        "retrievers/millpond",
        "sparse_embeddings/millpond",
    }


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_constraints_pin_what_the_packages_require(folder: Path):
    pins = {canonicalize_name(name): pin for name, pin in PINS.items()}
    for line in requirements(folder):
        if line.name in OURS or (line.marker is not None and not line.marker.evaluate()):
            continue
        pin = pins.get(canonicalize_name(line.name))
        assert pin is not None, f"constraints.txt does not pin {line.name}: run `make constraints`"
        assert line.specifier.contains(pin), f"constraints.txt pins {line.name}=={pin}, {folder.name} requires {line}"


def test_the_sinks_are_found_by_name():
    sinks = {point.name: point.value for point in entry_points(group="millpond.sinks")}
    names = ("qdrant", "milvus", "lancedb", "pgvector")
    assert sinks == {name: f"millpond_{name}:sink_from_url" for name in names}
    assert all(callable(point.load()) for point in entry_points(group="millpond.sinks"))


LOWEST = dict(
    line.split("==")
    for line in (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
)


def lowest_of(folder: Path) -> dict[str, str]:
    """The lowest version of each direct dependency that the package allows, without those for development."""
    table = project(folder)
    extras = {name: lines for name, lines in table.get("optional-dependencies", {}).items() if name != "dev"}
    found: dict[str, str] = {}
    for line in map(Requirement, [*table["dependencies"], *(line for lines in extras.values() for line in lines)]):
        if line.name not in OURS and line.name != "torch":
            (lowest,) = (part.version for part in line.specifier if part.operator in (">=", "=="))
            name = canonicalize_name(line.name)
            found[name] = max(found.get(name, lowest), lowest, key=Version)
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_lowest_versions_are_those_that_the_tests_run_with(folder: Path):
    lowest = lowest_of(folder)
    assert lowest
    wrong = {name: low for name, low in lowest.items() if Version(LOWEST.get(name, "0")) != Version(low)}
    assert not wrong, "pyproject.toml and constraints-lowest.txt must name the same lowest versions"


def test_the_lowest_versions_are_those_of_direct_dependencies():
    assert LOWEST.keys() == {name for folder in FOLDERS for name in lowest_of(folder)}


@pytest.mark.parametrize("page", ["README.md", "docs/a/b.md", "integrations/qdrant/README.md", "notebooks/README.md"])
def test_a_release_finds_pages_that_deny_it(page: str, tmp_path: Path):
    for name in (page, "CONTRIBUTING.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("There is no release on a package index\nyet.", encoding="utf-8")
    assert stale_pages(tmp_path) == [page]
