"""Late-interaction checkpoints beside sentence-transformers' MultiVectorEncoder: tokens, masks, matrices and scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.parity import rotary_oracles
from tests.parity.comparison import TOLERANCE, VISIBLE
from tests.tiny import SENTENCES, TEXTS
from tests.tiny.heads import DIM, DOCUMENT_LENGTH, QUERY_LENGTH, write_pylate, write_stanford
from transformers import AutoTokenizer

from millpond import Engine
from millpond.errors import InputTooLongError

pytestmark = pytest.mark.contract  # two engines for each case, one of them a peer's

Role = Literal["query", "document"]
ROLES: tuple[Role, ...] = ("query", "document")
reference = pytest.importorskip("sentence_transformers").MultiVectorEncoder

# Texts without tokens, with punctuation only, of one token, of several, and too long for both roles.
MIXED = ["", "...", "?!", *dict.fromkeys(TEXTS), " ".join(SENTENCES), "The wheel, the gate; the pond: all shut!"]


def native(folder: Path, **options: Any) -> Path:
    """The same checkpoint, saved by sentence-transformers."""
    reference(str(write_pylate(folder / "pylate", **options)), device="cpu").save(str(folder / "native"))
    return folder / "native"


def mean_native(folder: Path) -> Path:
    model = reference(str(write_pylate(folder / "pylate")), device="cpu")
    model.similarity_fn_name = "meanmaxsim"
    model.save(str(folder / "native"))
    return folder / "native"


def raw_native(folder: Path) -> Path:
    """Remove the last module, so that rows are not normalized."""
    path = native(folder) / "modules.json"
    path.write_text(json.dumps([entry for entry in json.loads(path.read_text()) if "Normalize" not in entry["type"]]))
    return path.parent


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "stanford": write_stanford,
    "stanford attends": lambda folder: write_stanford(folder, attend_to_mask_tokens=True),
    "stanford scores punctuation": lambda folder: write_stanford(folder, mask_punctuation=False),
    "stanford pickled": lambda folder: write_stanford(folder, weights="bin"),
    "stanford xlm-roberta": lambda folder: write_stanford(folder, "xlm-roberta", attend_to_mask_tokens=True),
    "pylate": write_pylate,
    "pylate attends": lambda folder: write_pylate(folder, attend_to_expansion_tokens=True),
    "pylate without expansion": lambda folder: write_pylate(folder, do_query_expansion=False),
    "pylate bert": lambda folder: write_pylate(folder, "bert"),
    "pylate three dense": lambda folder: write_pylate(folder, widths=(48, 32, DIM), residual=True),
    "pylate with prompts": lambda folder: write_pylate(
        folder, prompts={"query": "[Q] Find: ", "document": "Read: "}, do_query_expansion=False
    ),
    "pylate of no kind": lambda folder: write_pylate(folder, model_type=None, skiplist_words=None),
    "native": native,
    "native attends": lambda folder: native(folder, attend_to_expansion_tokens=True),
    "native without expansion": lambda folder: native(folder, do_query_expansion=False),
    "native bert": lambda folder: native(folder, family="bert"),
    "native mean": mean_native,
    "native not normalized": raw_native,
}


class LoadedModel:
    """A checkpoint loaded by millpond and by sentence-transformers."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder = folder
        self.engine = engine
        self.theirs = reference(str(folder), device="cpu", local_files_only=True)

    def expected(self, role: Role, texts: list[str] = MIXED, **options: Any) -> list[Any]:
        encode = self.theirs.encode_query if role == "query" else self.theirs.encode_document
        return list(encode(texts, **{"convert_to_numpy": True} | options))


Load = Callable[..., LoadedModel]
Write = Callable[[Path], Path]


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[Path, Engine]]]:
    """Write a checkpoint and load it; all settings have the same weights."""
    with ExitStack() as stack:

        def engine_of(write: Write, **options: Any) -> tuple[Path, Engine]:
            folder = write(tmp_path_factory.mktemp("late") / "model")
            return folder, stack.enter_context(Engine(folder, device="cpu", dtype="float32", **options))

        yield engine_of


@pytest.fixture(scope="module")
def load(engine_of: Callable[..., tuple[Path, Engine]]) -> Load:
    made: dict[str, LoadedModel] = {}

    def load(name: str) -> LoadedModel:
        if name not in made:
            made[name] = LoadedModel(*engine_of(LAYOUTS[name]))
        return made[name]

    return load


def matrices(engine: Engine, role: Role, texts: list[str] = MIXED, **options: Any) -> list[np.ndarray]:
    return [np.asarray(matrix) for matrix in engine.token_embed(texts, role=role, **options).embeddings]


def difference(actual: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest difference of any value."""
    assert [matrix.shape for matrix in actual] == [matrix.shape for matrix in expected]
    return max(float(np.abs(one - other).max()) for one, other in zip(actual, expected, strict=True) if one.size)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_matrices(name: str, role: Role, load: Load) -> None:
    loaded = load(name)
    actual = matrices(loaded.engine, role)
    assert difference(actual, loaded.expected(role)) <= TOLERANCE
    assert {matrix.shape[1] for matrix in actual} == {DIM} and actual[0].dtype == np.float32
    assert max(map(len, actual)) <= (QUERY_LENGTH if role == "query" else DOCUMENT_LENGTH)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", ["stanford", "pylate"])
def test_packed_is_alone(name: str, role: Role, load: Load) -> None:
    engine = load(name).engine
    alone = [matrices(engine, role, [text])[0] for text in MIXED]
    assert difference(matrices(engine, role), alone) <= TOLERANCE


@pytest.mark.parametrize("name", ["stanford", "pylate without expansion", "native mean", "native not normalized"])
def test_scores(name: str, load: Load) -> None:
    loaded = load(name)
    queries, documents = MIXED[3:7], MIXED[7:11]
    theirs = loaded.theirs.similarity(
        loaded.expected("query", queries, convert_to_numpy=False),
        loaded.expected("document", documents, convert_to_numpy=False),
    ).numpy()
    size = max(12.0, np.abs(theirs).max())  # the score of 12 unit vectors is at most 12
    assert np.abs(loaded.engine.score(queries, documents).scores - theirs.diagonal()).max() <= TOLERANCE * size
    ranked = loaded.engine.rerank(queries[1], documents)
    assert [result.index for result in ranked] == np.argsort(-theirs[1]).tolist()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", ["stanford", "native"])
def test_cut_then_normalized(name: str, role: Role, load: Load, engine_of: Any) -> None:
    """Matryoshka: the first columns of the projected row, divided by their norm."""
    whole = load(name).expected(role)
    # Normalizing before the cut does not change the result, because the cut row is normalized again.
    cut = [matrix[:, :16] / np.linalg.norm(matrix[:, :16], axis=1, keepdims=True) for matrix in whole]
    _, engine = engine_of(LAYOUTS[name], hf_overrides={"is_matryoshka": True})
    actual = matrices(engine, role, dimensions=16)
    assert difference(actual, cut) <= TOLERANCE
    assert difference(actual, [matrix[:, :16] for matrix in whole]) > VISIBLE


# The same weights under a setting of another name: (layout, role, the layout with the mistake).
MISTAKES: dict[str, tuple[str, Role, Write]] = {
    "a query's marker": ("stanford", "query", lambda folder: write_stanford(folder, query_token_id="[MASK]")),
    "a document's marker": ("stanford", "document", lambda folder: write_stanford(folder, doc_token_id="[MASK]")),
    "attended": ("stanford", "query", LAYOUTS["stanford attends"]),
    "not attended": ("stanford attends", "query", write_stanford),
    "a query's marker, pylate": ("pylate", "query", lambda folder: write_pylate(folder, query_prefix="[D] ")),
    "attended, pylate": ("pylate", "query", LAYOUTS["pylate attends"]),
}
OTHER_ROWS: dict[str, tuple[str, Role, Write]] = {
    "no marker": ("pylate", "document", lambda folder: write_pylate(folder, document_prefix="")),
    "no expansion": ("pylate", "query", LAYOUTS["pylate without expansion"]),
    "no skiplist": ("stanford", "document", LAYOUTS["stanford scores punctuation"]),
    "a longer document": (
        "stanford",
        "document",
        lambda folder: write_stanford(folder, doc_maxlen=DOCUMENT_LENGTH + 1),
    ),
    "a longer query": ("pylate", "query", lambda folder: write_pylate(folder, query_length=QUERY_LENGTH + 1)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str, load: Load, engine_of: Any) -> None:
    """Negative controls with the same shapes: each changes the vectors far beyond the tolerance."""
    name, role, write = MISTAKES[mistake]
    _, engine = engine_of(write)
    assert difference(matrices(engine, role), load(name).expected(role)) > VISIBLE


@pytest.mark.parametrize("mistake", OTHER_ROWS)
def test_a_mistake_in_the_rows_is_seen(mistake: str, load: Load, engine_of: Any) -> None:
    """Negative controls with other numbers of rows than the reference."""
    name, role, write = OTHER_ROWS[mistake]
    _, engine = engine_of(write)
    assert [len(matrix) for matrix in matrices(engine, role)] != [len(matrix) for matrix in load(name).expected(role)]


@pytest.mark.parametrize("name", ["stanford", "pylate", "native"])
def test_a_text_that_holds_the_marker_is_read_as_text(name: str, load: Load) -> None:
    """A deliberate difference: sentence-transformers treats a marker in the text as a real marker."""
    loaded = load(name)
    text = "the [unused1] mill" if name == "stanford" else "the [D] mill"
    (ours,), (theirs,) = matrices(loaded.engine, "document", [text]), loaded.expected("document", [text])
    assert len(ours) > len(theirs)  # several tokens instead of one


def test_over_long_is_an_error_on_request(load: Load) -> None:
    with pytest.raises(InputTooLongError, match="the query at index 1 has"):
        load("stanford").engine.token_embed(["a", MIXED[-2]], role="query", truncate="error")


@pytest.mark.parametrize("name", ["HF_ColBERT", "ColBERTModernBertModel"])
def test_an_override_of_the_architecture(name: str, load: Load, engine_of: Any) -> None:
    write = "stanford" if name == "HF_ColBERT" else "pylate"
    _, engine = engine_of(LAYOUTS[write], hf_overrides={"architectures": [name]})
    assert difference(matrices(engine, "query"), matrices(load(write).engine, "query")) == 0


def jina_colbert(folder: Path, **metadata: Any) -> Path:
    """jina-colbert-v2; some copies lack the field ``attend_to_mask_tokens``."""
    return write_stanford(folder, "jina", **{"attend_to_mask_tokens": None} | metadata)


@pytest.mark.parametrize("overrides", [{}, {"architectures": ["ColBERTJinaRobertaModel"]}], ids=["as it is", "vLLM's"])
def test_jina_colbert(overrides: dict[str, Any], engine_of: Any) -> None:
    """A query: rotary XLM-RoBERTa, projection, normalization of its tokens, the marker and the expansion."""
    folder, engine = engine_of(jina_colbert, hf_overrides=overrides or None)
    config = json.loads((folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    states = rotary_oracles.jina(folder, config, adapter=None)
    projection = load_file(folder / "model.safetensors")["linear.weight"]
    actual = matrices(engine, "query")
    for text, rows in zip(MIXED, actual, strict=True):
        start, *body, end = tokenizer(text, truncation=True, max_length=QUERY_LENGTH - 1)["input_ids"]
        ids = torch.tensor([start, config["vocab_size"] - 2, *body, end])
        ids = torch.cat((ids, torch.full((QUERY_LENGTH - len(ids),), tokenizer.mask_token_id)))
        with torch.inference_mode():
            expected = torch.nn.functional.normalize(states(ids) @ projection.T, dim=-1)
        assert np.abs(rows - expected.numpy()).max() <= TOLERANCE
    _, unattended = engine_of(lambda place: jina_colbert(place, attend_to_mask_tokens=False))
    assert difference(matrices(unattended, "query"), actual) > VISIBLE
