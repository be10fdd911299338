"""The workflows: their commands exist, and every package is published, without a stored secret."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS: dict[str, Any] = {
    path.name: yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader) for path in sorted(FOLDER.glob("*.yml"))
}
JOBS = [(name, job) for name, workflow in WORKFLOWS.items() for job in workflow["jobs"]]
RELEASE = WORKFLOWS["release.yml"]["jobs"]
PACKAGES = {
    tomllib.loads(path.read_text(encoding="utf-8"))["project"]["name"]
    for path in [ROOT / "pyproject.toml", *ROOT.glob("integrations/*/pyproject.toml")]
}


def job_of(name: str, job: str) -> Any:
    return WORKFLOWS[name]["jobs"][job]


def steps(name: str, job: str) -> list[dict[str, Any]]:
    return list(job_of(name, job)["steps"])


def lines(name: str, job: str) -> list[str]:
    """The shell lines of a job."""
    return [step["run"] for step in steps(name, job) if "run" in step]


@pytest.mark.parametrize(("name", "job"), JOBS, ids=[f"{name}:{job}" for name, job in JOBS])
def test_the_commands_of_a_job_exist(name: str, job: str):
    text = "\n".join(lines(name, job))
    subprocess.run(["bash", "-n", "-c", text], check=True)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    missing = [target for target in re.findall(r"\bmake ([\w-]+)", text) if f"\n{target}: " not in makefile]
    missing += [module for module in re.findall(r"-m (release\.\w+)", text) if not is_module(module)]
    missing += [path for path in re.findall(r"(?<![\w/.-])\.[\w-]*/[\w./-]+", text) if not (ROOT / path).is_file()]
    missing += [
        variable for variable in re.findall(r"\b([A-Z_]+)=[\"']?\$", text) if f"\n{variable} ?=" not in makefile
    ]
    assert missing == []


def is_module(name: str) -> bool:
    return (ROOT / f"{name.replace('.', '/')}.py").is_file()


def test_the_workflows_have_commands_to_check():
    text = "\n".join(line for name, job in JOBS for line in lines(name, job))
    assert {"coverage", "test-lowest", "packages"} <= set(re.findall(r"\bmake ([\w-]+)", text))
    assert "release.changelog" in text and ".ci/run" in text


@pytest.mark.parametrize(("name", "job"), JOBS, ids=[f"{name}:{job}" for name, job in JOBS])
def test_a_job_has_a_limit_known_needs_and_pinned_actions(name: str, job: str):
    table = job_of(name, job)
    assert int(table["timeout-minutes"]) <= 360
    needs = table.get("needs", [])
    assert {*([needs] if isinstance(needs, str) else needs)} <= WORKFLOWS[name]["jobs"].keys()
    for step in steps(name, job):
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            assert re.fullmatch(r"[\w./-]+@(v\d+(\.\d+)*|release/v1|[0-9a-f]{40})", step["uses"]), step["uses"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_only_read_and_uses_no_secret(name: str):
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    assert "secrets." not in (FOLDER / name).read_text(encoding="utf-8")


def test_a_tag_starts_a_release_and_nothing_else_publishes():
    assert WORKFLOWS["release.yml"]["on"]["push"] == {"tags": ["v*"]}
    for job, table in RELEASE.items():
        publishes = any("pypi-publish" in step.get("uses", "") for step in table["steps"])
        writes = table.get("permissions", {}).get("contents") == "write"
        if (publishes and job != "testpypi") or writes or job in ("notes", "attest"):
            assert "startsWith(github.ref, 'refs/tags/v')" in table["if"], job
        if (publishes and job != "testpypi") or writes:  # a manual run may be started on a tag, too
            assert "github.event_name == 'push'" in table["if"], job
        if publishes:
            assert table["permissions"] == {"id-token": "write"}, job
            assert table["environment"], job
            assert "password" not in str(table), job


def test_every_package_is_published_from_an_environment_of_its_own():
    """PyPI allows one future project for a workflow and environment."""
    matrix = RELEASE["publish-integrations"]["strategy"]["matrix"]["package"]
    assert len(set(matrix)) == len(matrix) == 6
    assert {"millpond", *matrix} == PACKAGES
    assert RELEASE["publish-millpond"]["environment"] == "pypi-millpond"
    assert RELEASE["publish-integrations"]["environment"] == "pypi-${{ matrix.package }}"


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_job_uploads_the_distributions_of_its_package(package: str, tmp_path: Path):
    """The shell lines of the workflow, run over files with the names of a release."""
    names = {name: name.replace("-", "_") for name in PACKAGES}
    (tmp_path / "dist").mkdir()
    for name in names.values():
        for end in ("-0.1.0-py3-none-any.whl", "-0.1.0.tar.gz"):
            (tmp_path / "dist" / f"{name}{end}").touch()
    kernels = "millpond-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    for name in (kernels, "millpond-0.1.0.cdx.json", "SHA256SUMS"):
        (tmp_path / "dist" / name).touch()
    job = "publish-millpond" if package == "millpond" else "publish-integrations"
    (line,) = [step["run"] for step in RELEASE[job]["steps"] if "run" in step]
    subprocess.run(["bash", "-ec", line], cwd=tmp_path, env={"PACKAGE": package, "PATH": "/usr/bin:/bin"}, check=True)
    expected = {f"{names[package]}-0.1.0-py3-none-any.whl", f"{names[package]}-0.1.0.tar.gz"}
    assert {path.name for path in (tmp_path / "upload").iterdir()} == expected | (
        {kernels} if package == "millpond" else set()
    )


def test_the_order_of_a_release():
    def before(job: str) -> set[str]:
        needs = RELEASE[job].get("needs", [])
        direct = {*([needs] if isinstance(needs, str) else needs)}
        return direct.union(*map(before, direct)) if direct else set()

    assert before("packages") == {"notes", "kernels"}
    assert {"packages", "attest"} <= before("publish-millpond")
    assert "publish-millpond" in before("publish-integrations")
    assert "publish-integrations" in before("github")


def test_the_kernels_are_built_for_the_same_platform_as_they_are_checked_for():
    pytest.importorskip("elftools", reason="pip install pyelftools")
    from release.distributions import PLATFORM

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    assert settings["manylinux-x86_64-image"] == PLATFORM.removesuffix("_x86_64")
    assert f"--plat {PLATFORM} --only-plat" in settings["repair-wheel-command"]
    assert settings["environment"] == {"MILLPOND_NATIVE": "1"}
    assert settings["build"].endswith("-manylinux_x86_64")
