"""Each wheel contains all files of its packages and no others."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from millpond.native.library import LIBRARY

ROOT = Path(__file__).parents[2]
WHEELS = {  # folder: (root of its sources, its packages...)
    ".": ("src", "millpond"),
    "integrations/langchain": (".", "langchain_millpond"),
    "integrations/llama-index": (
        ".",
        "llama_index/embeddings/millpond",
        "llama_index/postprocessor/millpond_rerank",
        "llama_index/retrievers/millpond",
        "llama_index/sparse_embeddings/millpond",
    ),
    "integrations/qdrant": (".", "millpond_qdrant"),
    "integrations/milvus": (".", "millpond_milvus"),
    "integrations/lancedb": (".", "millpond_lancedb"),
    "integrations/pgvector": (".", "millpond_pgvector"),
}


# That of the root compiles the kernels.
@pytest.mark.parametrize("folder", [pytest.param(".", marks=pytest.mark.slow), *list(WHEELS)[1:]])
def test_a_wheel_contains_its_packages(folder: str, tmp_path: Path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT / folder]
    run = subprocess.run(build, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        notes = {Path(name).name: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    root, *packages = WHEELS[folder]
    sources = ROOT / folder / root
    expected = {
        file.relative_to(sources).as_posix()
        for package in packages
        for file in (sources / package).rglob("*")
        if file.suffix in (".py", ".jinja", ".html", ".css", ".js", ".svg", ".cpp", ".h") or file.name == "py.typed"
    }
    if LIBRARY.is_file() and folder == ".":  # built if there is a compiler; works with every Python of the platform
        expected.add("millpond/native/libmillpond.so")
        assert "-py3-none-linux_" in path.name
    assert names == expected
    assert {f"{package}/py.typed" for package in packages} <= names
    assert "Apache License" in notes["LICENSE"]
    if Path(folder).name in ("qdrant", "milvus", "lancedb", "pgvector"):
        kind = Path(folder).name
        assert f"[millpond.sinks]\n{kind} = millpond_{kind}:sink_from_url" in notes["entry_points.txt"]
    if folder == ".":
        assert "millpond = millpond.cli.app:main" in notes["entry_points.txt"]
