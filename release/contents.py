"""Checks the distributions in a folder: ``python -m release.contents dist``.

It reads files only: which distributions there are, what they contain and declare, and which symbols of glibc the
kernels need. ``release/installs.py`` then installs them.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from email import message_from_bytes
from email.message import Message
from pathlib import Path, PurePosixPath
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from packaging.metadata import InvalidMetadata, Metadata
from packaging.requirements import Requirement
from packaging.tags import sys_tags
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from release.distributions import ARM_PLATFORMS, FOLDERS, GLIBC, PACKAGES, PLATFORM, ROOT

LIBRARY = "millpond/native/libmillpond.so"
# Every Linux with this glibc has them. libstdc++ is not among them: slim images may lack it.
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
SYSTEM_LIBRARIES |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
MACH_O = b"\xcf\xfa\xed\xfe"  # what a library of macOS begins with
# Names that a build leaves behind, or that belong to the repository alone.
FOREIGN = re.compile(r"(^|/)(tests?|benchmarks|notebooks|__pycache__|\.git[^/]*)/|\.(py[cod]|o|so|orig|rej|db|sqlite)$")


def projects() -> dict[str, dict[str, Any]]:
    """The table ``[project]`` of each of the nine packages."""
    tables = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"] for folder in FOLDERS
    )
    return {table["name"]: table for table in tables}


def problems(dist: Path) -> list[str]:
    """What is wrong with the distributions in ``dist``, one line for each problem; empty if nothing is."""
    wheels, sdists = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    found = [*_missing(wheels, sdists)]
    for path in wheels:
        try:
            found += [f"{path.name}: {problem}" for problem in _wheel_problems(path)]
        except (zipfile.BadZipFile, InvalidWheelFilename, KeyError, ELFError) as error:
            found.append(f"{path.name}: is damaged: {error!r}")
    for path in sdists:
        try:
            found += [f"{path.name}: {problem}" for problem in _sdist_problems(path)]
        except (tarfile.TarError, InvalidSdistFilename, EOFError, OSError, KeyError) as error:
            found.append(f"{path.name}: is damaged: {error!r}")
    return found


def _missing(wheels: list[Path], sdists: list[Path]) -> Iterator[str]:
    """Distributions that are absent, or that belong to no package."""
    tables = projects()
    versions = {table["version"] for table in tables.values()}
    if len(versions) != 1:
        yield f"the seven pyproject.toml files have the versions {', '.join(sorted(versions))}; they must be equal"
        return
    (version,) = versions
    expected = {f"{name.replace('-', '_')}-{version}-py3-none-any.whl" for name in tables}
    kernels = f"millpond-{version}-py3-none-{PLATFORM}.whl"
    expected |= {f"{name.replace('-', '_')}-{version}.tar.gz" for name in tables}
    names = {path.name for path in (*wheels, *sdists)}
    # auditwheel adds the tags of the older standards that the wheel fulfils as well.
    tagged = {platform: _kernels_of(platform, version, names) for platform in (PLATFORM, *ARM_PLATFORMS)}
    if not tagged[PLATFORM]:
        yield f"{kernels} is missing: it is the wheel with the compiled kernels"
    yield from (f"{len(several)} wheels are for {platform}" for platform, several in tagged.items() if len(several) > 1)
    yield from (f"{name} is missing" for name in sorted(expected - names))
    yield from (
        f"{name} belongs to no package of version {version}"
        for name in sorted(names - expected.union(*tagged.values()))
    )


def _kernels_of(platform: str, version: str, names: Iterable[str]) -> set[str]:
    """The wheels with kernels for a platform."""
    return {name for name in names if name.startswith(f"millpond-{version}-py3-none-") and platform in name}


def _wheel_problems(path: Path) -> Iterator[str]:
    name, version, _, tags = parse_wheel_filename(path.name)
    with zipfile.ZipFile(path) as wheel:
        files = {entry: wheel.read(entry) for entry in wheel.namelist() if not entry.endswith("/")}
    info = next((PurePosixPath(entry).parent for entry in files if entry.endswith(".dist-info/METADATA")), None)
    if info is None or name not in PACKAGES:
        yield "has no metadata" if info is None else "is none of the nine packages"
        return
    code = {entry: data for entry, data in files.items() if not entry.startswith(f"{info}/")}
    kernels = not {PLATFORM, *ARM_PLATFORMS}.isdisjoint(part for tag in tags for part in tag.platform.split("."))

    yield from _metadata_problems(
        message_from_bytes(files[f"{info}/METADATA"]), files[f"{info}/METADATA"], name, str(version)
    )
    yield from _record_problems(files, f"{info}/RECORD")
    if f"{info}/licenses/LICENSE" not in files or b"Apache License" not in files[f"{info}/licenses/LICENSE"]:
        yield "has no licence file"
    folders = PACKAGES[name]
    yield from (f"has no {folder}/py.typed" for folder in folders if f"{folder}/py.typed" not in code)
    yield from (f"has no {folder}/__init__.py" for folder in folders if f"{folder}/__init__.py" not in code)
    inside = tuple(f"{folder}/" for folder in folders)
    yield from (f"contains {entry}, which is in none of its packages" for entry in code if not entry.startswith(inside))
    allowed = {LIBRARY} if kernels else set()
    yield from (f"contains {entry}" for entry in code if FOREIGN.search(entry) and entry not in allowed)
    told = {
        line.partition(": ")[2] for line in files[f"{info}/WHEEL"].decode().splitlines() if line.startswith("Tag: ")
    }
    if told != {str(tag) for tag in tags}:
        yield f"says in WHEEL that its tags are {', '.join(sorted(told))}"
    points = files.get(f"{info}/entry_points.txt", b"").decode()
    yield from (f"lacks the entry point {point}" for point in _entry_points(name) if point not in points)
    if kernels:
        if LIBRARY not in code:
            yield f"has no {LIBRARY}"
        elif any(tag.platform.startswith("macosx") for tag in tags):
            yield from () if code[LIBRARY].startswith(MACH_O) else (f"has a {LIBRARY} that is not for macOS",)
        else:
            yield from library_problems(code[LIBRARY])


def _entry_points(name: str) -> list[str]:
    table = projects()[name]
    points = [table.get("scripts", {}), *table.get("entry-points", {}).values()]
    return [f"{key} = {value}" for group in points for key, value in group.items()]


def _record_problems(files: dict[str, bytes], record: str) -> Iterator[str]:
    """Files that are not in RECORD with their hash, as an installer demands."""
    rows = {row[0]: row[1] for row in csv.reader(io.StringIO(files[record].decode())) if row}
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if name != record and rows.get(name) != f"sha256={digest}":
            yield f"has {name} with another hash than in RECORD"
    yield from (f"names {name} in RECORD and does not contain it" for name in rows.keys() - files.keys())


def _metadata_problems(fields: Message, text: bytes, name: str, version: str) -> Iterator[str]:
    """What PyPI or a user would miss in the metadata."""
    invalid = False
    try:
        Metadata.from_email(text, validate=True)
    except* InvalidMetadata as group:
        yield from [f"has invalid metadata: {error}" for error in group.exceptions]
        invalid = True
    if invalid:
        return
    table = projects()[name]
    if canonicalize_name(str(fields["Name"])) != name or fields["Version"] != version:
        yield f"says in its metadata that it is {fields['Name']} {fields['Version']}"
    if fields["License-Expression"] != "Apache-2.0":
        yield f"has the licence {fields['License-Expression']}, not Apache-2.0"
    if fields["Description-Content-Type"] != "text/markdown" or len(str(fields.get_payload())) < 500:
        yield "has no description"
    if fields["Requires-Python"] != table["requires-python"]:
        yield f"requires Python {fields['Requires-Python']}, pyproject.toml says {table['requires-python']}"
    missing = set(table["classifiers"]) - set(fields.get_all("Classifier", []))
    yield from (f"lacks the classifier {classifier}" for classifier in sorted(missing))
    required = [Requirement(line) for line in fields.get_all("Requires-Dist", [])]
    for line in required:
        if line.name in PACKAGES and not line.extras and str(line.specifier) != f"=={version}":
            yield f"requires {line}; the nine packages require each other in exactly their own version"
    if name != "millpond" and "millpond" not in {line.name for line in required if line.marker is None}:
        yield "does not require millpond"


def library_problems(data: bytes) -> Iterator[str]:
    """What keeps a shared library from running on every Linux with glibc 2.28 and its processor."""
    needed, symbols = library_needs(data)
    yield from (f"needs the library {library}" for library in sorted(needed - SYSTEM_LIBRARIES))
    for symbol in sorted(symbols):
        version = re.fullmatch(r"GLIBC_(\d+(?:\.\d+)+)", symbol)
        if version is None or tuple(map(int, version[1].split("."))) > GLIBC:
            yield f"needs symbols of {symbol}; the newest allowed are those of GLIBC_{GLIBC[0]}.{GLIBC[1]}"


def library_needs(data: bytes) -> tuple[set[str], set[str]]:
    """The libraries that a shared library loads, and the versions of the symbols that it takes from them."""
    library = ELFFile(io.BytesIO(data))
    dynamic, versions = library.get_section_by_name(".dynamic"), library.get_section_by_name(".gnu.version_r")
    if not isinstance(dynamic, DynamicSection):
        raise ELFError("it is no shared library")
    needed = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}  # type: ignore[attr-defined]
    entries = versions.iter_versions() if isinstance(versions, GNUVerNeedSection) else ()
    return needed, {entry.name for _, group in entries for entry in group}


def _sdist_problems(path: Path) -> Iterator[str]:
    name, version = parse_sdist_filename(path.name)
    root = path.name.removesuffix(".tar.gz")
    with tarfile.open(path) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
        if odd := [member.name for member in members if not member.isfile() or not member.name.startswith(f"{root}/")]:
            yield f"contains {odd[0]}, which is no file below {root}"
            return
        notes = archive.extractfile(f"{root}/PKG-INFO")
        assert notes is not None
        text = notes.read()
    yield from _metadata_problems(message_from_bytes(text), text, name, str(version))
    names = {member.name.removeprefix(f"{root}/") for member in members}
    sources = "src/" if name == "millpond" else ""
    own = {f"{sources}{folder}/{file}" for folder in PACKAGES[name] for file in ("__init__.py", "py.typed")}
    own |= {"pyproject.toml", "README.md", "LICENSE", *(("hatch_build.py",) if name == "millpond" else ())}
    yield from (f"has no {entry}" for entry in sorted(own - names))
    # hatchling always adds .gitignore: the build from the source distribution follows it.
    yield from (f"contains {entry}" for entry in sorted(names - {".gitignore"}) if FOREIGN.search(entry))


def pip_problems(dist: Path) -> Iterator[str]:
    """Whether pip takes the wheel with kernels where it fits, and the pure one elsewhere."""
    (version,) = {table["version"] for table in projects().values()}
    pure = f"millpond-{version}-py3-none-any.whl"
    here = {tag.platform for tag in sys_tags()}
    names = [path.name for path in dist.glob("*.whl")]
    platforms = {name: bool(_kernels_of(name, version, names)) for name in (PLATFORM, *ARM_PLATFORMS)}
    platforms |= {"macosx_14_0_x86_64": False, "win_amd64": False}
    cases = [(("--platform", name), kernels) for name, kernels in platforms.items()]
    # Without --platform: this machine.
    for options, kernels in [*cases, *([((), True)] if PLATFORM in here else [])]:
        command = [
            sys.executable,
            "-m",
            "pip",
            "--isolated",
            "--disable-pip-version-check",
            "install",
            "--dry-run",
            "--quiet",
        ]
        command += ["--no-deps", "--ignore-installed", "--no-index", "--find-links", str(dist), "--report", "-"]
        target = ("--only-binary", ":all:", "--target", str(dist / "unused"), *options) if options else ()
        done = subprocess.run([*command, *target, "millpond"], capture_output=True, text=True)
        chosen = re.findall(r"millpond-[\w.]+-py3-none-[\w.]+\.whl", done.stdout)
        where = options[1] if options else "this machine"
        if done.returncode != 0 or not chosen:
            yield f"pip finds no wheel of millpond for {where}: {done.stderr.strip()[-300:]}"
        elif (chosen[0] != pure) != kernels:
            yield f"pip takes {chosen[0]} for {where}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dist", type=Path)
    dist: Path = parser.parse_args().dist
    found = problems(dist) or [*pip_problems(dist)]
    paths = sorted(str(path) for kind in ("*.whl", "*.tar.gz") for path in dist.glob(kind))
    rendered = subprocess.run([sys.executable, "-m", "twine", "--no-color", "check", "--strict", *paths])
    if rendered.returncode != 0:
        found.append("twine check found the problems above")
    if found:
        raise SystemExit("\n".join(found))
    (wheel,) = dist.glob(f"millpond-*{PLATFORM}*.whl")
    with zipfile.ZipFile(wheel) as archive:
        needed, symbols = library_needs(archive.read(LIBRARY))
    print(f"{wheel.name}: needs {', '.join(sorted(needed))} and the symbols of {', '.join(sorted(symbols))}")
    print(f"{len(paths)} distributions: no problem found.")


if __name__ == "__main__":
    main()
