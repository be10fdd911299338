"""What executes the Dockerfile without Docker finds the mistakes that a build would, and .dockerignore is obeyed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("docker.utils.build", reason="pip install -r release/requirements.txt")
pytest.importorskip("dockerfile_parse", reason="pip install -r release/requirements.txt")

from release.dockerfile import send_context

ROOT = Path(__file__).parents[2]
as_root = pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root on Linux: chroot, mount")
FROM = "FROM python:3.12-slim"


def executed(folder: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    (folder / "Dockerfile").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "release.dockerfile", "--no-run", "--file", str(folder / "Dockerfile")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_the_context_is_the_package_alone(tmp_path: Path):
    names = send_context(ROOT, ROOT / "Dockerfile", tmp_path)
    assert {"pyproject.toml", "hatch_build.py", "LICENSE", "src/millpond/native/norm.cpp"} <= set(names)
    assert not [name for name in names if name.endswith((".so", ".pyc")) or name.startswith(("tests", ".git", "docs"))]
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()} == set(names)


@pytest.mark.slow
@as_root
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((FROM, "RUN false"), "line 2: RUN false\n    exited with 1"),
        ((FROM, "COPY absent ."), "a source does not exist, or .dockerignore excludes it"),
        ((FROM, "USER nobody2"), "there is no user 'nobody2'"),
        ((FROM, "VOLUME /absent"), "/absent does not exist"),
        ((FROM, "ENTRYPOINT millpond serve"), "a shell would not pass on signals"),
        ((FROM, "COPY --from=build /opt /opt"), "there is no stage 'build'"),
        ((FROM, "STOPSIGNAL SIGINT"), "is not known here"),
        (("FROM alpine",), "is no image that can be stood for here"),
        ((FROM, FROM, "RUN g++ --version"), "exited with"),
    ],
    ids=["run", "copy", "user", "volume", "entrypoint", "stage", "unknown", "image", "compiler"],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, lines: tuple[str, ...], message: str):
    done = executed(tmp_path, *lines)
    assert done.returncode == 1
    assert message in done.stdout


@pytest.mark.slow
@as_root
def test_stages_arguments_and_users_are_those_of_a_build(tmp_path: Path):
    (tmp_path / "one.txt").write_text("1")
    done = executed(
        tmp_path,
        "ARG VERSION=3.12",
        "FROM python:${VERSION}-slim AS build",
        "ARG WORD=hello",
        'ENV A="x y" B=${WORD:-no}',
        "WORKDIR /source",
        "COPY one.txt ./",
        'RUN test "$A" = "x y" && test "$B" = hello && test "$(pwd)" = /source && mkdir /opt/x && cp one.txt /opt/x',
        "FROM python:${VERSION}-slim",
        "RUN useradd --create-home --uid 10001 millpond && install --directory --owner millpond /models",
        "COPY --from=build /opt/x /opt/x",
        "USER millpond",
        "WORKDIR /models",
        'RUN test "$(id -u)" = 10001 && touch y && ! touch /opt/x/no',
        'RUN test "$(cat /opt/x/one.txt)" = 1 && test ! -e /source',
        "VOLUME /models",
    )
    assert done.returncode == 0, done.stdout + done.stderr
