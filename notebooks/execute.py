"""Execute the notebooks, each in a kernel of its own, and write them with their outputs to another folder.

``make notebooks`` runs it over all of this folder. The sources stay as they are: their outputs are not in git.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

FOLDER = Path(__file__).parent


def execute(source: Path, target: Path, *, timeout: int) -> str | None:
    """Execute one notebook, and write it with the outputs that it has, also after an error.

    Args:
        source: The notebook.
        target: The file to write.
        timeout: Seconds that a cell may take.

    Returns:
        What went wrong; ``None`` if every cell ran.
    """
    try:
        notebook = nbformat.reads(source.read_text(encoding="utf-8"), as_version=4)
    except (OSError, ValueError, nbformat.ValidationError) as error:
        return f"cannot be read: {error}"
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        coalesce_streams=True,  # a progress bar is one line, not one for each update
        record_timing=False,
        resources={"metadata": {"path": str(source.parent)}},
        extra_arguments=["--log-level=ERROR"],  # no warning about loopback connections
    )
    failure = None
    try:
        client.execute()
    except CellExecutionError as error:
        failure = f"{error.ename}: {error.evalue}"
    except CellTimeoutError:
        failure = f"a cell takes more than {timeout} s; --timeout allows more"
    except DeadKernelError:
        failure = "the kernel died"
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)
    if failure is None:
        return None
    begun = [cell.id for cell in notebook.cells if cell.cell_type == "code" and cell.execution_count is not None]
    return f"cell {begun[-1]!r}: {failure}" if begun else failure


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Execute notebooks and write them with their outputs.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of this folder")
    parser.add_argument("--out", type=Path, default=FOLDER.parent / "build" / "notebooks", help="folder to write to")
    parser.add_argument("--timeout", type=int, default=600, help="seconds that a cell may take (default: %(default)s)")
    options = parser.parse_args(arguments)
    os.environ.pop("MPLBACKEND", None)  # the kernel draws into the notebook
    failures = 0
    for source in options.notebooks or sorted(FOLDER.glob("*.ipynb")):
        start = time.perf_counter()
        failure = execute(source, options.out / source.name, timeout=options.timeout)
        seconds = time.perf_counter() - start
        print(f"{source.name}: {seconds:.1f} s" if failure is None else f"{source.name}: {failure}", flush=True)
        failures += failure is not None
    print(f"with their outputs: {options.out}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
