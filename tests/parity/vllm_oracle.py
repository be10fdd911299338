"""Reference results of vLLM on the CPU in float32: a separate program for the Python of vLLM's environment.

``python vllm_oracle.py JOB.json``. The job is ``{"out": folder, "rows": [row, ...]}``, a row::

    {"name": "bert", "folder": "/checkpoint", "task": "embed", "inputs": ["a text", ...],
     "options": {"hf_overrides": {...}, "max_model_len": 64}, "params": {"use_activation": false},
     "template": null}

``task`` is ``embed``, ``token_embed``, ``classify``, ``token_classify`` or ``score``; an input of ``score`` is a pair
``[query, document]``, and ``template`` is the chat template that renders it. ``options`` are passed to ``vllm.LLM``,
with the defaults below, and ``params`` to ``PoolingParams``. Over-long texts are cut at the end.

Each row writes ``{name}.npz`` with arrays ``"0"``, ``"1"``, ... (float32, one for each input) and ``"ids0"``, ... (the
token ids of vLLM's tokenizer), and ``{name}.log``. A row that fails writes ``{name}.error``; the others still run.
vLLM is imported once, and each row runs in a forked child, because an engine leaves state behind in its process.

This program imports nothing of millpond and downloads nothing.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
OPTIONS: dict[str, Any] = {
    "runner": "pooling",
    "enforce_eager": True,
    "dtype": "float32",
    "disable_log_stats": True,
    "seed": 0,
}


def main(job: dict[str, Any]) -> int:
    """Run every row; returns the number of failed rows."""
    os.environ.update({key: os.environ.get(key, value) for key, value in ENVIRONMENT.items()})
    from vllm import LLM, PoolingParams  # noqa: F401  # imported once, before forking

    out = Path(job["out"])
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for row in job["rows"]:
        child = os.fork()
        if child == 0:
            _child(row, out)
        _, status = os.waitpid(child, 0)
        written = (out / f"{row['name']}.npz").exists()
        if not written and not (out / f"{row['name']}.error").exists():
            (out / f"{row['name']}.error").write_text(f"the process ended with status {status}", encoding="utf-8")
        failed += not written
    return failed


def _child(row: dict[str, Any], out: Path) -> None:
    """Run one row, then exit the process in any case."""
    log = os.open(out / f"{row['name']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 0
    try:
        _run(row, out)
    except BaseException:
        (out / f"{row['name']}.error").write_text(traceback.format_exc(), encoding="utf-8")
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(row: dict[str, Any], out: Path) -> None:
    import numpy as np
    from vllm import LLM, PoolingParams

    task, inputs = row["task"], row["inputs"]
    options = OPTIONS | row.get("options", {})
    options["pooler_config"] = {"task": "classify" if task == "score" else task} | options.get("pooler_config", {})
    llm = LLM(model=row["folder"], **options)
    params = PoolingParams(**row["params"]) if row.get("params") else None
    if task == "score":
        queries, documents = [list(side) for side in zip(*inputs, strict=True)]
        results = llm.score(
            queries, documents, chat_template=row.get("template"), pooling_params=params, use_tqdm=False
        )
        values = [[result.outputs.score] for result in results]
    else:
        results = llm.encode(
            inputs,
            pooling_task=task,
            pooling_params=params,
            use_tqdm=False,
            tokenization_kwargs={"truncate_prompt_tokens": -1},  # with truncation_side, vLLM would cut special tokens
        )
        values = [result.outputs.data.float().numpy() for result in results]
    arrays = {str(i): np.asarray(value, dtype=np.float32) for i, value in enumerate(values)}
    arrays |= {f"ids{i}": np.asarray(result.prompt_token_ids) for i, result in enumerate(results)}
    partial = out / f"{row['name']}.partial.npz"
    np.savez(partial, **arrays)
    partial.rename(out / f"{row['name']}.npz")


if __name__ == "__main__":
    raise SystemExit(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
