"""`millpond mcp`: the time from its start to an answer, from a change to its being found, a large tree, known items.

    python benchmarks/mcp_search.py [--smoke] [--only start,large,known] [--files 10000] [--questions 1000] [--out FILE]

The model is all-MiniLM-L6-v2. Requests are JSON-RPC over the program's own standard input, so that no client's import
is measured. Known items: the docstrings of this repository's functions are the questions, and the functions, without
any docstring, the answers. Nothing here is measured in a smoke run.
"""

from __future__ import annotations

import ast
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from argparse import ArgumentParser
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from record import record

ROOT = Path(__file__).parents[1]
SMALL = 5_000  # passages of the index that a start is measured with
_VERSION = "2025-06-18"


class Server:
    """A running `millpond mcp`, asked by JSON-RPC."""

    def __init__(self, target: Path, cache: Path) -> None:
        self.begun = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "millpond", "mcp", str(target), "--wait", "3600"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        )
        self._number = 0
        self.initialized = self._initialize()

    def _initialize(self) -> float:
        client = {"name": "benchmark", "version": "1"}
        self._ask("initialize", {"protocolVersion": _VERSION, "capabilities": {}, "clientInfo": client})
        self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return time.perf_counter() - self.begun

    def search(self, query: str, **options: Any) -> dict[str, Any]:
        result = self._ask("tools/call", {"name": "search", "arguments": {"query": query, **options}})
        assert not result.get("isError"), result
        found: dict[str, Any] = result["structuredContent"]
        return found

    def memory(self, name: str) -> int:
        """MB of the process: VmHWM, the most it ever had, or VmRSS."""
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.search(rf"{name}:\s+(\d+) kB", text)[1]) // 1024  # type: ignore[index]

    def close(self) -> None:
        self._process.communicate("", timeout=60)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _ask(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        self._send({"jsonrpc": "2.0", "id": self._number, "method": method, "params": parameters})
        assert self._process.stdout is not None
        while True:
            answer = json.loads(self._process.stdout.readline())
            if answer.get("id") == self._number:
                result: dict[str, Any] = answer["result"]
                return result


# ------------------------------------------------------------------------------------------------------------- a start


def start(folder: Path, *, passages: int, rounds: int) -> dict[str, Any]:
    """Process start to first answer over an index that exists, and a changed file in the next search."""
    root, cache = folder / "passages", folder / "cache"
    write_tree(root, passages, per_folder=100, units=1)
    server = Server(root, cache)
    server.search("first")
    server.close()
    starts, answers = [], []
    for number in range(rounds):
        server = Server(root, cache)
        found = server.search(f"topic {number} of a passage")
        answers.append(time.perf_counter() - server.begun)
        starts.append(server.initialized)
        assert found["searched"][0]["facts"]["units"] == passages
        if number < rounds - 1:
            server.close()
    changes, again = [], []
    for number in range(20):
        (root / "0" / "0.md").write_text(f"# Changed {number}\nThe zeppelin{number} flies over the pond.\n")
        begun = time.perf_counter()
        found = server.search(f"zeppelin{number}", top_k=1)
        changes.append(time.perf_counter() - begun)
        assert f"zeppelin{number}" in found["hits"][0]["text"]
        begun = time.perf_counter()
        server.search(f"topic {number} of a passage", top_k=1)
        again.append(time.perf_counter() - begun)
    memory = server.memory("VmHWM")
    server.close()
    return {
        "passages": passages,
        "rounds": rounds,
        "start to first answer, s": _middle(answers),
        "start to first answer, fastest, s": min(answers),
        "start to initialize answered, s": _middle(starts),
        "import of the SDK alone, s": _alone("import mcp.server.mcpserver"),
        "engine and one text alone, s": _alone(
            "import sys; from millpond.mcp.targets.folder import default_model; from millpond import Engine; "
            "Engine(default_model()).embed(['x'])"
        ),
        "changed file found by the next search, s": _middle(changes),
        "changed file found, slowest of 20, s": max(changes),
        "search without a change, s": _middle(again),
        "memory, MB": memory,
    }


def _alone(code: str) -> float:
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append(time.perf_counter() - begun)
    return _middle(times)


def _middle(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4)


# -------------------------------------------------------------------------------------------------------- a large tree

NOUNS = "parser buffer socket cache index vector token queue thread record mill pond engine batch header chunk".split()
VERBS = "read write merge split open close flush scan rank encode decode reject retry lock count sort".split()


def write_tree(root: Path, files: int, *, per_folder: int, units: int) -> None:
    """Markdown and Python in folders; every passage has words of its own."""
    chance = random.Random(files)
    for number in range(files):
        folder = root / str(number // per_folder)
        folder.mkdir(parents=True, exist_ok=True)
        names = [f"{chance.choice(VERBS)}_{chance.choice(NOUNS)}_{number}_{unit}" for unit in range(units)]
        sentence = " ".join(chance.choice(NOUNS + VERBS) for _ in range(40))
        if units == 1 or number % 3 == 0:
            text = "\n".join(f"# Topic {name}\n{textwrap.fill(sentence)}\n" for name in names)
            (folder / f"{number % per_folder}.md").write_text(text)
        else:
            body = "\n".join(f"    {chance.choice(NOUNS)} = {chance.choice(VERBS)}({number})" for _ in range(6))
            text = "\n\n".join(f"def {name}(value):\n{body}\n    return value" for name in names)
            (folder / f"{number % per_folder}.py").write_text(text + "\n")


def large(folder: Path, *, files: int, questions: int) -> dict[str, Any]:
    """Index a tree for the first time, then ask."""
    root, cache = folder / "large", folder / "cache"
    write_tree(root, files, per_folder=100, units=3)
    server = Server(root, cache)
    begun = time.perf_counter()
    facts = server.search("first")["searched"][0]["facts"]
    indexed = time.perf_counter() - begun
    peak = server.memory("VmHWM")
    chance, times = random.Random(0), []
    for _ in range(questions):
        query = " ".join(chance.choice(NOUNS + VERBS) for _ in range(5))
        begun = time.perf_counter()
        server.search(query)
        times.append(time.perf_counter() - begun)
    (root / "0" / "new.md").write_text("# Zeppelin\nA zeppelin flies over the pond.\n")
    begun = time.perf_counter()
    assert server.search("zeppelin", top_k=1)["hits"][0]["metadata"]["path"] == "0/new.md"
    changed = time.perf_counter() - begun
    server.close()
    server = Server(root, cache)
    server.search("again")
    again, resident = time.perf_counter() - server.begun, server.memory("VmRSS")
    server.close()
    return {
        "files": facts["files"],
        "units": facts["units"],
        "first index, s": round(indexed, 1),
        "memory at most while indexing, MB": peak,
        "search p50, s": round(statistics.median(times), 4),
        "search p99, s": round(sorted(times)[math.ceil(0.99 * len(times)) - 1], 4),
        "new file found by the next search, s": round(changed, 4),
        "start to first answer, s": round(again, 3),
        "memory after it, MB": resident,
        "bytes on the disk, MB": sum(each.stat().st_size for each in (cache / "millpond" / "mcp").iterdir()) >> 20,
    }


# --------------------------------------------------------------------------------------------------------- known items


def known(folder: Path, *, questions: int, model: str) -> dict[str, Any]:
    """MRR@10 of the functions that docstrings describe."""
    from millpond import Engine
    from millpond.mcp.folder.index import FolderIndex
    from millpond.mcp.folder.store import UnitStore

    root = folder / "source"
    items = list(without_docstrings(ROOT / "src" / "millpond", root))
    chosen = random.Random(0).sample(items, min(questions, len(items)))
    results: dict[str, Any] = {"functions with a docstring": len(items), "questions": len(chosen)}
    with Engine(model) as engine:
        index = FolderIndex(root, UnitStore(folder / "known.db"), lambda: engine)
        index.update()
        for name, rank in rankers(index, engine).items():
            begun = time.perf_counter()
            scores = [reciprocal(rank(question), wanted) for question, *wanted in chosen]
            results[f"MRR@10, {name}"] = round(sum(scores) / len(scores), 4)
            results[f"ms a question, {name}"] = round(1000 * (time.perf_counter() - begun) / len(scores), 1)
    return results


def without_docstrings(source: Path, target: Path) -> Iterator[tuple[str, str, int]]:
    """Copy the modules without their docstrings; yields first lines of functions' docstrings, paths and lines."""
    for path in sorted(source.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines, wanted = text.split("\n"), {}
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            doc = ast.get_docstring(node)
            if doc is None:
                continue
            statement = node.body[0]
            first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
            filler = (
                " " * statement.col_offset + "..." if len(node.body) == 1 and not isinstance(node, ast.Module) else ""
            )
            lines[first:last] = [filler, *[""] * (last - first - 1)]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                wanted[node.lineno] = doc.split("\n")[0]
        # Blank lines stay in place of a docstring, so that a function is where it was.
        name = path.relative_to(source).as_posix()
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text("\n".join(lines), encoding="utf-8")
        for line, question in wanted.items():
            if len(question.split()) >= 4:
                yield question, name, line


def reciprocal(found: Sequence[tuple[str, int, int]], wanted: Sequence[Any]) -> float:
    path, line = wanted
    for rank, (name, first, last) in enumerate(found[:10], start=1):
        if name == path and first <= line <= last:
            return 1 / rank
    return 0.0


def rankers(index: Any, engine: Any) -> dict[str, Callable[[str], list[tuple[str, int, int]]]]:
    """Ways to rank the units of an index for a question."""
    from millpond.ingest.sinks.search import Hit
    from millpond.mcp.folder.index import fuse
    from millpond.mcp.folder.words import expression, words
    from millpond.search.stages import StagePlan, rank_again

    with index.store.reading() as snapshot:
        rows = snapshot.rows().tolist()
        units = snapshot.units(rows)

    def places(rows: Sequence[int]) -> list[tuple[str, int, int]]:
        return [(units[row].path, units[row].first, units[row].last) for row in rows]

    def dense(question: str) -> list[int]:
        query = engine.embed([question], role="query", normalize=True).embeddings[0]
        with index.store.reading() as snapshot:
            index._table.refresh(snapshot)
            return [row for row, _ in index._table.nearest(query, 100, None)]

    def lexical(question: str) -> list[int]:
        with index.store.reading() as snapshot:
            return [row for row, _ in snapshot.ranked_by_words(expression(question) or '""', 100)]

    def hybrid(question: str) -> list[tuple[str, int, int]]:
        found = index.search(question, k=10)
        return [(each.unit.path, each.unit.first, each.unit.last) for each in found]

    def reranked(question: str) -> list[tuple[str, int, int]]:
        scores = fuse([dense(question), lexical(question)])
        best = sorted(scores, key=lambda row: -scores[row])[:50]
        hits = [Hit(id=str(row), score=0.0, text=units[row].text, metadata={}) for row in best]
        return places([int(each.hit.id) for each in rank_again(engine, question, hits, StagePlan())[:10]])

    texts = {row: f"{unit.path} {unit.name}\n{unit.text}" for row, unit in units.items()}
    bm25 = Bm25({row: words(text) for row, text in texts.items()})
    plain = Bm25({row: re.findall(r"\w+", text.lower()) for row, text in texts.items()})
    lowered = {row: text.lower() for row, text in texts.items()}

    def grep(question: str) -> list[tuple[str, int, int]]:
        """What searching for each word of the question finds, most words first."""
        asked = set(re.findall(r"\w{3,}", question.lower()))
        counts = {row: sum(word in text for word in asked) for row, text in lowered.items()}
        return places(sorted(counts, key=lambda row: -counts[row])[:10])

    return {
        "millpond mcp": hybrid,
        "millpond mcp --rerank self": reranked,
        "its vectors alone": lambda question: places(dense(question)[:10]),
        "its words alone (FTS5)": lambda question: places(lexical(question)[:10]),
        "BM25, words of identifiers": lambda question: places(bm25.best(words(question))),
        "BM25, plain words": lambda question: places(plain.best(re.findall(r"\w+", question.lower()))),
        "grep of each word (no ripgrep here)": grep,
    }


class Bm25:
    """Okapi BM25 with k1 = 1.5 and b = 0.75."""

    def __init__(self, documents: dict[int, list[str]]) -> None:
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._lengths = {row: len(found) for row, found in documents.items()}
        self._mean = sum(self._lengths.values()) / max(1, len(documents))
        for row, found in documents.items():
            for word, count in Counter(found).items():
                self._postings[word].append((row, count))

    def best(self, question: Sequence[str]) -> list[int]:
        scores: dict[int, float] = defaultdict(float)
        for word in set(question):
            postings = self._postings.get(word, [])
            weight = math.log(1 + (len(self._lengths) - len(postings) + 0.5) / (len(postings) + 0.5))
            for row, count in postings:
                norm = 1.5 * (0.25 + 0.75 * self._lengths[row] / self._mean)
                scores[row] += weight * count * 2.5 / (count + norm)
        return sorted(scores, key=lambda row: -scores[row])[:10]


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a few files and questions, to see that it runs")
    parser.add_argument("--only", default="start,large,known")
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--questions", type=int, default=1_000)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/mcp.json")
    options = parser.parse_args()
    from millpond.mcp.targets.folder import default_model

    passages, files, questions = SMALL, options.files, options.questions
    if options.smoke:
        passages, files, questions = 50, 60, 10
    results: dict[str, Any] = {"load before": [round(each, 2) for each in os.getloadavg()]}
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, Callable[[Path], dict[str, Any]]] = {
            "start": lambda path: start(path, passages=passages, rounds=2 if options.smoke else 9),
            "large": lambda path: large(path, files=files, questions=min(questions, 300)),
            "known": lambda path: known(path, questions=questions, model=default_model()),
        }
        for name in options.only.split(","):
            path = Path(folder, name)
            path.mkdir()
            results[name] = runs[name](path)
            print(json.dumps({name: results[name]}, indent=2), flush=True)
    results["load after"] = [round(each, 2) for each in os.getloadavg()]
    print(json.dumps({key: results[key] for key in ("load before", "load after")}))
    if options.record and not options.smoke:
        record("mcp", results)


if __name__ == "__main__":
    main()
