"""The checks of the release find what is wrong with a distribution, and nothing in those that are built here."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import io
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("elftools", reason="pip install pyelftools")

from release import contents, distributions
from release.changelog import section
from release.contents import LIBRARY, library_needs, library_problems, pip_problems, problems

ROOT = Path(__file__).parents[2]
VERSION = contents.projects()["millpond"]["version"]
INFO = f"millpond_pgvector-{VERSION}.dist-info"
PURE = f"millpond-{VERSION}-py3-none-any.whl"
KERNELS = f"millpond-{VERSION}-py3-none-{distributions.PLATFORM}.whl"
on_linux = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or shutil.which("g++") is None,
    reason="needs g++ on x86-64 Linux",
)
Files = dict[str, bytes]


def built(folder: str, target: Path, *kinds: str, **variables: str) -> Path:
    """Distributions of a package, built into ``target``."""
    distributions._build(*kinds, "--outdir", str(target), str(ROOT / folder), **variables)
    return target


@pytest.fixture(scope="module")
def pgvector(tmp_path_factory) -> Path:
    """The wheel and the source distribution of the smallest package; the wheel is built from the latter."""
    return built("integrations/pgvector", tmp_path_factory.mktemp("pgvector"), MILLPOND_NATIVE="0")


@pytest.fixture(scope="module")
def pure(tmp_path_factory) -> Path:
    """millpond's wheel for every platform."""
    return built(".", tmp_path_factory.mktemp("pure"), "--wheel", MILLPOND_NATIVE="0") / PURE


def repacked(wheel: Path, target: Path, change: Callable[[Files], None], *, record: bool = True) -> Path:
    """A copy of a wheel with other files, and with a RECORD that fits them."""
    with zipfile.ZipFile(wheel) as source:
        files = {name: source.read(name) for name in source.namelist()}
    change(files)
    (place,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    if record:
        rows = io.StringIO()
        for name, data in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            csv.writer(rows).writerow([name, *((f"sha256={digest}", len(data)) if name != place else ("", ""))])
        files[place] = rows.getvalue().encode()
    with zipfile.ZipFile(target, "w") as copy:
        for name, data in files.items():
            copy.writestr(name, data)
    return target


def of(path: Path) -> list[str]:
    """What is wrong with one distribution, without those that are missing beside it."""
    return [line.removeprefix(f"{path.name}: ") for line in problems(path.parent) if line.startswith(f"{path.name}: ")]


def test_distributions_built_here_have_no_problem(pgvector: Path):
    paths = sorted(pgvector.iterdir())
    assert [path.suffix for path in paths] == [".whl", ".gz"]
    assert [of(path) for path in paths] == [[], []]


def test_the_pure_wheel_of_millpond_has_no_problem_and_no_library(pure: Path):
    assert of(pure) == []
    with zipfile.ZipFile(pure) as wheel:
        assert not [name for name in wheel.namelist() if name.endswith(".so")]


def put(name: str, data: bytes = b"") -> Callable[[Files], None]:
    return lambda files: files.update({name: data})


def drop(name: str) -> Callable[[Files], None]:
    return lambda files: void(files.pop(name))


def swap(name: str, old: str, new: str) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        assert old.encode() in files[name], name
        files[name] = files[name].replace(old.encode(), new.encode())

    return change


def void(_: object) -> None:
    return None


META = f"{INFO}/METADATA"
DAMAGES = {
    "a test inside": (put("millpond_pgvector/tests/test_x.py"), "contains millpond_pgvector/tests/test_x.py"),
    "a library inside": (put("millpond_pgvector/x.so"), "contains millpond_pgvector/x.so"),
    "bytecode inside": (put("millpond_pgvector/__pycache__/x.pyc"), "contains millpond_pgvector/__pycache__/x.pyc"),
    "a second package": (put("tests/__init__.py"), "contains tests/__init__.py, which is in none of its packages"),
    "no py.typed": (drop("millpond_pgvector/py.typed"), "has no millpond_pgvector/py.typed"),
    "no __init__": (drop("millpond_pgvector/__init__.py"), "has no millpond_pgvector/__init__.py"),
    "no licence": (drop(f"{INFO}/licenses/LICENSE"), "has no licence file"),
    "no entry points": (drop(f"{INFO}/entry_points.txt"), "lacks the entry point pgvector = millpond_pgvector:"),
    "no metadata": (drop(META), "has no metadata"),
    "another name": (swap(META, "Name: millpond-pgvector", "Name: millpond-other"), "says in its metadata that it is"),
    "another version": (swap(META, f"\nVersion: {VERSION}", "\nVersion: 9"), "that it is millpond-pgvector 9"),
    "a loose requirement": (
        swap(META, f"millpond=={VERSION}", f"millpond>={VERSION}"),
        f"requires millpond>={VERSION}; the seven packages require each other in exactly their own version",
    ),
    "no core": (swap(META, f"Requires-Dist: millpond=={VERSION}\n", ""), "does not require millpond"),
    "another licence": (swap(META, "License-Expression: Apache-2.0", "License-Expression: MIT"), "has the licence MIT"),
    "no description": (lambda files: files.update({META: files[META].split(b"\n\n")[0]}), "has no description"),
    "invalid metadata": (swap(META, "Requires-Dist: numpy", "Requires-Dist: !!"), "has invalid metadata:"),
    "another Python": (swap(META, ">=3.11", ">=3.8"), "requires Python >=3.8, pyproject.toml says >=3.11"),
    "no classifier": (swap(META, "Classifier: Typing :: Typed\n", ""), "lacks the classifier Typing :: Typed"),
    "another tag": (swap(f"{INFO}/WHEEL", "py3-none-any", "cp311-none-any"), "its tags are cp311-none-any"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_wheel_is_found(pgvector: Path, tmp_path: Path, damage: str):
    change, expected = DAMAGES[damage]
    (wheel,) = pgvector.glob("*.whl")
    found = of(repacked(wheel, tmp_path / wheel.name, change))
    assert any(expected in line for line in found), found


def test_a_file_that_changed_after_the_build_is_found(pgvector: Path, tmp_path: Path):
    (wheel,) = pgvector.glob("*.whl")
    changed = repacked(wheel, tmp_path / wheel.name, put("millpond_pgvector/url.py", b"x = 1\n"), record=False)
    assert of(changed) == ["has millpond_pgvector/url.py with another hash than in RECORD"]


def test_a_wheel_that_is_cut_off_is_found(pgvector: Path, tmp_path: Path):
    (wheel,) = pgvector.glob("*.whl")
    (tmp_path / wheel.name).write_bytes(wheel.read_bytes()[:-500])
    assert of(tmp_path / wheel.name)[0].startswith("is damaged: BadZipFile")


def archived(archive: Path, target: Path, change: Callable[[Files], None]) -> Path:
    """A copy of a source distribution with other files."""
    with tarfile.open(archive) as source:
        files = {member.name: source.extractfile(member).read() for member in source if member.isfile()}  # type: ignore[union-attr]
    change(files)
    with gzip.open(target, "wb") as stream, tarfile.open(fileobj=stream, mode="w") as copy:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            copy.addfile(member, io.BytesIO(data))
    return target


SOURCE = f"millpond_pgvector-{VERSION}"
SOURCE_DAMAGES = {
    "no pyproject": (drop(f"{SOURCE}/pyproject.toml"), "has no pyproject.toml"),
    "no licence": (drop(f"{SOURCE}/LICENSE"), "has no LICENSE"),
    "no py.typed": (drop(f"{SOURCE}/millpond_pgvector/py.typed"), "has no millpond_pgvector/py.typed"),
    "a library": (put(f"{SOURCE}/millpond_pgvector/x.so"), "contains millpond_pgvector/x.so"),
    "a test": (put(f"{SOURCE}/tests/test_sink.py"), "contains tests/test_sink.py"),
    "a file outside": (put("elsewhere/x"), "contains elsewhere/x, which is no file below"),
    "no metadata": (drop(f"{SOURCE}/PKG-INFO"), "is damaged: KeyError"),
}


@pytest.mark.parametrize("damage", SOURCE_DAMAGES)
def test_a_damaged_source_distribution_is_found(pgvector: Path, tmp_path: Path, damage: str):
    change, expected = SOURCE_DAMAGES[damage]
    (archive,) = pgvector.glob("*.tar.gz")
    found = of(archived(archive, tmp_path / archive.name, change))
    assert any(expected in line for line in found), found


def test_missing_and_strange_distributions_are_named(pgvector: Path, tmp_path: Path):
    for path in pgvector.iterdir():
        shutil.copy(path, tmp_path)
    shutil.copy(next(pgvector.glob("*.whl")), tmp_path / "other-1-py3-none-any.whl")
    lines = [line for line in problems(tmp_path) if not line.startswith(("other-1", "millpond_pgvector"))]
    names = {name.replace("-", "_") for name in distributions.PACKAGES if name != "millpond-pgvector"}
    missing = {f"{name}-{VERSION}{end}" for name in names for end in ("-py3-none-any.whl", ".tar.gz")}
    assert set(lines) == {
        f"{KERNELS} is missing: it is the wheel with the compiled kernels",
        *(f"{name} is missing" for name in missing),
    }
    assert f"other-1-py3-none-any.whl belongs to no package of version {VERSION}" in problems(tmp_path)


def library(folder: Path, source: str, *options: str) -> bytes:
    (folder / "x.cpp").write_text(source)
    command = ["g++", "-shared", "-fPIC", "-nostartfiles", "-o", folder / "x.so", folder / "x.cpp", *options]
    subprocess.run(command, check=True)
    return (folder / "x.so").read_bytes()


@on_linux
def test_a_library_of_old_symbols_has_no_problem(tmp_path: Path):
    data = library(tmp_path, '#include <cstdlib>\nextern "C" void* f() { return malloc(8); }\n', "-Wl,--as-needed")
    assert library_needs(data) == ({"libc.so.6"}, {"GLIBC_2.2.5"})
    assert [*library_problems(data)] == []


@on_linux
@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 34),
    reason="this glibc has the old symbol as well",
)
def test_a_library_that_needs_a_newer_glibc_is_found(tmp_path: Path):
    source = (
        '#include <pthread.h>\nextern "C" int f(pthread_t* t) { return pthread_create(t, nullptr, nullptr, nullptr); }'
    )
    data = library(tmp_path, source, "-pthread", "-Wl,--as-needed")
    assert [*library_problems(data)] == ["needs symbols of GLIBC_2.34; the newest allowed are those of GLIBC_2.28"]


@on_linux
def test_a_library_that_needs_another_library_is_found(tmp_path: Path):
    data = library(tmp_path, "#include <string>\nstd::string f(std::string x) { return x + x; }\n")
    found = [*library_problems(data)]
    assert "needs the library libstdc++.so.6" in found
    assert any(line.startswith("needs symbols of GLIBCXX_") for line in found)


@pytest.fixture
def both(pure: Path, tmp_path: Path) -> Path:
    """A folder with the pure wheel, and one with the tag of manylinux."""

    def change(files: Files) -> None:
        files[LIBRARY] = b""
        name = next(name for name in files if name.endswith(".dist-info/WHEEL"))
        files[name] = files[name].replace(b"py3-none-any", f"py3-none-{distributions.PLATFORM}".encode())

    shutil.copy(pure, tmp_path)
    repacked(pure, tmp_path / KERNELS, change)
    return tmp_path


@pytest.mark.slow
def test_pip_takes_the_wheel_with_kernels_only_where_it_fits(both: Path):
    assert [*pip_problems(both)] == []


@pytest.mark.slow
def test_a_pip_that_takes_the_wrong_wheel_is_found(both: Path):
    (both / KERNELS).unlink()
    assert f"pip takes {PURE} for {distributions.PLATFORM}" in [*pip_problems(both)]
    (both / PURE).rename(both / f"millpond-{VERSION}-py3-none-macosx_14_0_arm64.whl")
    assert any(line.startswith("pip finds no wheel of millpond for win_amd64") for line in pip_problems(both))


def test_a_wheel_with_the_tag_of_manylinux_needs_a_library_that_runs_there(both: Path):
    assert of(both / KERNELS) == ["is damaged: ELFError('Magic number does not match')"]


def test_a_build_of_kernels_that_does_not_exist_is_an_error(tmp_path: Path):
    with pytest.raises(SystemExit, match="no file; name the wheel"):
        distributions.build(tmp_path / "dist", tmp_path / "absent.whl")
    assert not (tmp_path / "dist").exists()


@on_linux
def test_the_kernels_are_linked_by_the_named_linker(tmp_path: Path, monkeypatch):
    pytest.importorskip("hatchling")
    monkeypatch.syspath_prepend(str(ROOT))
    import hatch_build

    native = tmp_path / "native"
    native.mkdir()
    for name in ("norm.cpp", "rotary.cpp", "lanes.h", "parallel.h", "packing.h", "library.py"):
        shutil.copy(ROOT / "src/millpond/native" / name, native)
    (native / "norm.cpp").write_text('extern "C" int one() { return 1; }\n')
    (native / "rotary.cpp").unlink()
    script = tmp_path / "linker"
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\nexec g++ -shared "$@"\n')
    script.chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("LDCXXSHARED", str(script))
    assert hatch_build._compile(native / "libmillpond.so") is None
    assert (native / "libmillpond.so").is_file()
    assert "norm.cpp.o" in (tmp_path / "called").read_text()
    assert library_needs((native / "libmillpond.so").read_bytes())[0] <= contents.SYSTEM_LIBRARIES
    monkeypatch.setenv("LDCXXSHARED", "false")
    assert hatch_build._compile(native / "libmillpond.so") is not None


CHANGES = """\
# Changelog

## [Unreleased]

- a

## [1.2.0] - 2026-12-01

Text.

- b

## [1.1.0]

[1.2.0]: x
"""


def test_the_notes_of_a_release_are_its_section():
    assert section("v1.2.0", CHANGES, {"1.2.0"}) == "Text.\n\n- b"


@pytest.mark.parametrize(
    ("tag", "versions", "message"),
    [
        ("v1.2.1", {"1.2.0"}, "the tag 'v1.2.1' is not v1.2.0"),
        ("1.2.0", {"1.2.0"}, "the tag '1.2.0' is not v1.2.0"),
        ("v1.2.0", {"1.2.0", "1.1.0"}, "is not v1.1.0, v1.2.0"),
        ("v1.3.0", {"1.3.0"}, "has no section '## [1.3.0]'"),
        ("v1.1.0", {"1.1.0"}, "the section '## [1.1.0]' of CHANGELOG.md is empty"),
    ],
    ids=["another", "without v", "two versions", "no section", "empty"],
)
def test_a_wrong_tag_stops_a_release(tag: str, versions: set[str], message: str):
    with pytest.raises(SystemExit) as stopped:
        section(tag, CHANGES, versions)
    assert message in str(stopped.value)


@pytest.mark.slow
@on_linux
def test_everything_is_built_and_sound(tmp_path: Path):
    pytest.importorskip("ziglang", reason="pip install -r release/requirements.txt")
    distributions.build(tmp_path)
    assert problems(tmp_path) == []
    assert [*pip_problems(tmp_path)] == []
    with zipfile.ZipFile(tmp_path / KERNELS) as wheel:
        needed, symbols = library_needs(wheel.read(LIBRARY))
    assert needed and symbols  # so that the checks above had something to check
