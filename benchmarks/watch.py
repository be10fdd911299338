"""`millpond watch`: from a file that is saved to its text being found, and the processor time of a watcher at rest.

    python benchmarks/watch.py [--smoke] [--files 10000] [--saves 200] [--rest 60] [--to lancedb] [--record]

The program runs by itself, with all-MiniLM-L6-v2, over a tree of files; this process saves files, and searches the
collection (LanceDB in a folder, or a PostgreSQL of its own with `--to pgvector`) until the new text is the best hit.
Nothing is measured in a smoke run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from record import record

WORDS = "mill pond wheel sluice river stone grain flour miller oven bread yeast tide moon harbour rope".split()


def text(chance: random.Random, mark: str) -> str:
    return f"# Note {mark}\n\n" + " ".join(chance.choices(WORDS, k=24)) + f" {mark}\n"


def mark(chance: random.Random) -> str:
    """Words that no other file has."""
    return " ".join(
        "".join(chance.choices("bcdfghklmnprstvz", k=1)[0] + chance.choice("aeiou") for _ in range(4)) for _ in range(3)
    )


def write_tree(folder: Path, files: int, chance: random.Random) -> list[Path]:
    paths = []
    for number in range(files):
        path = folder / f"d{number % 100}" / f"s{number // 100 % 10}" / f"n{number}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(chance, str(number)))
        paths.append(path)
    return paths


class Program:
    """A running `millpond watch`."""

    def __init__(self, folder: Path, model: str, url: str, cache: Path) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = int(one.getsockname()[1])
        command = [sys.executable, "-m", "millpond", "watch", str(folder), "-m", model, "--to", url, "--grace", "1"]
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        self.process = subprocess.Popen([*command, "--metrics", f"127.0.0.1:{self.port}"], env=environment)

    def metrics(self) -> dict[str, float]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return {}
        return {name: float(value) for name, value in (line.split() for line in lines if line[0] != "#")}

    def until_idle(self) -> None:
        while True:
            assert self.process.poll() is None, "the watcher ended"
            found = self.metrics()
            if found.get("millpond_watch_passes_total") and not found["millpond_watch_oldest_pending_seconds"]:
                return
            time.sleep(0.5)

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def database(kind: str, folder: Path) -> Iterator[str]:
    if kind == "lancedb":
        yield f"lancedb+path:{folder}/l#docs"
        return
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.ingest.postgres import running_server

    with running_server() as server:
        yield f"pgvector+{server.schema()}#docs"


def saves(paths: list[Path], url: str, engine: Any, count: int, chance: random.Random) -> list[float]:
    """Seconds from each save to its being found."""
    from millpond.ingest import open_sink

    found = []
    with closing(open_sink(url)) as sink:
        collection: Any = sink
        for _ in range(count):
            path, own = chance.choice(paths), mark(chance)
            content = text(chance, own)
            begun = time.perf_counter()
            path.write_text(content)
            while True:
                hits = collection.search(engine, content, k=1)
                if hits and hits[0].text.strip() == content.strip():
                    break
                assert time.perf_counter() - begun < 60, "not found within a minute"
                time.sleep(0.005)
            found.append(time.perf_counter() - begun)
            time.sleep(chance.random() * 0.3)
    return found


def measure(kind: str, files: int, count: int, rest: float) -> dict[str, Any]:
    from millpond import Engine
    from millpond.mcp.targets.folder import default_model

    chance, model = random.Random(1), default_model()
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(database(kind, base))
        paths = write_tree(base / "tree", files, chance)
        begun = time.perf_counter()
        program = Program(base / "tree", model, url, base / "cache")
        stack.callback(program.process.kill)
        program.until_idle()
        first = time.perf_counter() - begun
        with Engine(model) as engine:
            seconds = sorted(saves(paths, url, engine, count, chance))
        program.until_idle()
        time.sleep(min(rest, 65))  # a look at all files follows the last change after a minute
        before = program.cpu_seconds()
        time.sleep(rest)
        idle = program.cpu_seconds() - before
        assert program.end() == 143
    return {
        "files": files,
        "first pass, seconds": round(first, 1),
        "saves": count,
        "save to found, seconds": {
            "p50": round(statistics.median(seconds), 3),
            "p99": round(seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))], 3),
            "longest": round(seconds[-1], 3),
        },
        "processor seconds at rest": {"seconds": rest, "used": round(idle, 3)},
    }


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a few files and saves, to see that it runs")
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--saves", type=int, default=200)
    parser.add_argument("--rest", type=float, default=60)
    parser.add_argument("--to", default="lancedb", help="lancedb,pgvector")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/watch.json")
    options = parser.parse_args()
    files, count, rest = (30, 3, 0.5) if options.smoke else (options.files, options.saves, options.rest)
    results: dict[str, Any] = {"load before": [round(each, 2) for each in os.getloadavg()]}
    for kind in options.to.split(","):
        results[kind] = measure(kind, files, count, rest)
        print(json.dumps({kind: results[kind]}, indent=2), flush=True)
    results["load after"] = [round(each, 2) for each in os.getloadavg()]
    print(json.dumps({key: results[key] for key in ("load before", "load after")}))
    if options.record and not options.smoke:
        record("watch", results)


if __name__ == "__main__":
    main()
