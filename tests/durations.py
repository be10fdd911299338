"""How long the tests take: `make durations` runs the fast ring and prints what is slow. A report; nothing fails by it.

python tests/durations.py build/junit.xml     prints, and writes tests/durations.json: seconds of each file
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

RECORD = Path(__file__).with_suffix(".json")
TEST_SECONDS = 0.5
FILE_SECONDS = 6.0


def main(junit: str) -> None:
    """Read the times of a run of pytest, fixtures included."""
    tests: list[tuple[float, str]] = []
    files: Counter[str] = Counter()
    for case in ElementTree.parse(junit).iter("testcase"):
        seconds, name = float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}"
        tests.append((seconds, name))
        files[(case.get("classname") or "").replace(".", "/") + ".py"] += seconds  # type: ignore[assignment]
    before = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    print(f"{len(tests)} tests in {len(files)} files: {sum(files.values()):.0f} s of all processes together")
    print(f"\nFiles of more than {FILE_SECONDS:g} s (recorded before):")
    for name, seconds in files.most_common():
        if seconds > FILE_SECONDS:
            print(f"{seconds:8.1f}  {before.get(name, '-'):>6}  {name}")
    print(f"\nTests of more than {TEST_SECONDS:g} s:")
    for seconds, name in sorted(tests, reverse=True):
        if seconds > TEST_SECONDS:
            print(f"{seconds:8.2f}  {name}")
    RECORD.write_text(json.dumps({name: round(seconds, 1) for name, seconds in sorted(files.items())}, indent=0) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
