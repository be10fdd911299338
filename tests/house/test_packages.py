"""The packages: one version, pinned dependencies, recorded signatures, light imports, install lines that are true."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from difflib import unified_diff
from functools import cached_property
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from typing import Any, is_typeddict

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tests.house.signatures import PACKAGES, own_members, surface

import millpond
from release import constraints, distributions

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT, *(path.parent for path in sorted(ROOT.glob("integrations/*/pyproject.toml")))]
PROJECTS: dict[str, Any] = {
    (table := tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"])["name"]: table
    for folder in FOLDERS
}
# The libraries of doors have their versions in tests/doors/requirements.txt: no other environment has them.
DOORS = {"chromadb", "daft", "haystack-ai", "mteb"}
NAMES = [f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__]


def requirements(table: dict[str, Any], *, dev: bool = True) -> list[Requirement]:
    extras = [
        lines for name, lines in table.get("optional-dependencies", {}).items() if dev or name not in ("dev", "test")
    ]
    return [Requirement(line) for line in chain(table["dependencies"], *extras)]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return {canonicalize_name((pin := line.split("=="))[0]): pin[1] for line in lines if line and line[0] != "#"}


def test_the_packages_have_one_version_licence_and_marker_of_types():
    assert PROJECTS.keys() == distributions.PACKAGES.keys()
    assert {table["version"] for table in PROJECTS.values()} == {millpond.__version__}
    assert f"\n## [{millpond.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for folder, (name, table) in zip(FOLDERS, PROJECTS.items(), strict=True):
        own = {str(line.specifier) for line in requirements(table) if line.name in PROJECTS and not line.extras}
        assert own <= {f"=={millpond.__version__}"}, name
        assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
        sources = folder / "src" if folder == ROOT else folder
        typed = {path.parent.relative_to(sources).as_posix() for path in sources.rglob("py.typed")}
        assert typed == {*distributions.PACKAGES[name]}


def test_constraints_pin_what_the_packages_require():
    pinned, lowest = pins("constraints.txt"), pins("constraints-lowest.txt")
    pinned |= {name: version for name, version in pins("tests/doors/requirements.txt").items() if name in DOORS}
    named = set()
    for table in PROJECTS.values():
        for line in requirements(table):
            if line.name not in PROJECTS and (line.marker is None or line.marker.evaluate()):
                assert line.specifier.contains(pinned.get(canonicalize_name(line.name), "0")), (
                    f"constraints.txt: {line}"
                )
        for line in requirements(table, dev=False):
            if line.name not in {*PROJECTS, *DOORS, "torch"}:
                (low,) = (part.version for part in line.specifier if part.operator in (">=", "=="))
                name = canonicalize_name(line.name)
                assert Version(lowest.get(name, "0")) >= Version(low), f"constraints-lowest.txt: {line}"
                named.add(name)
    assert lowest.keys() == named


def test_new_constraints_keep_the_pins_of_what_is_not_installed():
    """What only the environment of doors has, or a GPU: `make constraints` sees neither."""
    former = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    doors = constraints.pins((ROOT / "tests" / "doors" / "requirements.txt").read_text(encoding="utf-8"))
    optional = {"mcp", "mcp-types", "tree-sitter", "tree-sitter-rust", "torchao"}
    assert (
        optional < constraints.pins(former).keys() and {"mcp", "tree-sitter-rust", "torchao"} < constraints.required()
    )
    installed = {name: line for name, line in constraints.pins(former).items() if name not in optional}
    lines = constraints.merged(installed, constraints.pins(former), doors, constraints.required())
    assert set(lines) == set(former.splitlines())
    installed["numpy"] = "numpy==99.0"
    lines = constraints.merged(
        installed,
        constraints.pins("mcp==2.0.0\nnumpy==1.0\nabandoned==1.0\nTorchAO==0.1"),
        {"mcp": "mcp==2.3.0"},
        constraints.required(),
    )
    assert {"mcp==2.3.0", "numpy==99.0", "TorchAO==0.1"} < set(lines) and not [x for x in lines if "abandoned" in x]


def test_the_entry_points_of_sinks_can_be_loaded():
    points = entry_points(group="millpond.sinks")
    assert {point.name for point in points} == {"qdrant", "milvus", "lancedb", "pgvector"}
    assert all(point.load() for point in points)


def test_the_signatures_are_as_recorded():
    recorded = (Path(__file__).parent / "signatures.txt").read_text(encoding="utf-8").splitlines()
    difference = "\n".join(unified_diff(recorded, surface(), "signatures.txt", "the code", lineterm="", n=0))
    assert not difference, f"{difference}\nintended? python tests/house/signatures.py > tests/house/signatures.txt"


def undocumented(path: str) -> list[str]:
    """What a public name's docstring does not say: its fields, its arguments, its methods."""
    package, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(package), name)
    if not (inspect.isroutine(value) or inspect.isclass(value)):
        return []
    text = value.__doc__ or ""
    if len(text) < 20 or text.startswith(f"{value.__name__}("):
        return [name]
    missing = []
    if inspect.isclass(value):  # what a base of ours documents is documented
        text = "\n".join(base.__doc__ or "" for base in value.__mro__ if "millpond" in base.__module__)
        for member, found in own_members(value).items():
            plain = getattr(found, "__func__", found)
            public = inspect.isfunction(plain) or isinstance(found, property | cached_property)
            if not member.startswith("_") and public and not inspect.getdoc(found):
                missing.append(member)
    if dataclasses.is_dataclass(value):
        return missing + [field.name for field in dataclasses.fields(value) if field.repr and field.name not in text]
    text += getattr(value, "__init__", value).__doc__ or ""
    if "Args:" in text and not is_typeddict(value):
        arguments = list(inspect.signature(value).parameters)
        if hasattr(value, "model_fields"):  # a framework's class: only what ours add
            ours = [base for base in value.__mro__ if "millpond" in base.__module__]
            arguments = [each for each in arguments if any(each in inspect.get_annotations(base) for base in ours)]
        missing += [each for each in arguments if not re.search(rf"^ +\**{each}:", text, re.MULTILINE)]
    return missing


def test_every_public_name_is_documented():
    assert not {path: missing for path in NAMES if (missing := undocumented(path))}


_LOAD = """
import importlib, sys
for module in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "millpond"]:
        del sys.modules[name]
    importlib.import_module(module)
    heavy = {"torch", "transformers", "tokenizers", "asyncio", "rich", "tqdm", "qdrant_client", "pymilvus"}
    print(module, *sorted(heavy & sys.modules.keys()))
"""


def test_light_modules_load_nothing_heavy():
    """Each is imported as the first module of millpond, so that no earlier import hides a circle."""
    light = "errors values.spec values.outputs cache.vector_cache engine.shared ingest late_interaction cli.app".split()
    modules = ["millpond", *(f"millpond.{name}" for name in light), "millpond.backends.torch.attention.sdpa"]
    run = subprocess.run([sys.executable, "-c", _LOAD, *modules], capture_output=True, text=True, timeout=120)
    *lines, heavy = run.stdout.splitlines()
    assert lines == modules[:-1], run.stderr
    assert "torch" in heavy.split()  # the test sees what is loaded


# A folder of ours or one of our packages, with its extras, as an argument of pip.
OURS = r"(?<![\w/-])(?:\.(?:/[\w/-]+)?|[\w-]*millpond[\w-]*)(?:\[[\w,-]+\])?(?![\w/{-])"


def install_lines() -> list[tuple[str, str]]:
    """(file, argument) of every ``pip install`` of the pages and of the program's messages that names our packages."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("integrations/*/README.md")]
    found = []
    for path in [*files, *ROOT.glob("src/**/*.py"), *ROOT.glob("integrations/*/*_*/**/*.py")]:
        if path.name != "CHANGELOG.md":
            for rest in re.findall(r"pip install ([^\n`()]*)", path.read_text(encoding="utf-8")):
                words = re.findall(
                    r"(?<![\w/-])(?:\.(?:/[\w/-]+)?|[\w-]*millpond[\w-]*)(?:\[[\w,-]+\])?(?![\w/{-])", rest
                )
                found += [(path.relative_to(ROOT).as_posix(), word) for word in words]
    return found


def test_what_is_recommended_can_be_installed():
    lines = install_lines()
    assert {".", "./integrations/qdrant", "millpond[server]"} <= {word for _, word in lines}
    for file, word in lines:
        folder, _, extras = word.rstrip("]").partition("[")
        name = folder
        if folder.startswith("."):
            assert (ROOT / folder / "pyproject.toml").is_file(), f"{file}: {word}"
            name = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
        known = PROJECTS[name].get("optional-dependencies", {}).keys() if name in PROJECTS else set()
        assert name in PROJECTS and set(filter(None, extras.split(","))) <= known, f"{file}: {word}"


@pytest.mark.parametrize("package", ["millpond", "millpond.ingest", "millpond.late_interaction"])
def test_an_unknown_name_is_an_attribute_error(package: str):
    module = importlib.import_module(package)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing
