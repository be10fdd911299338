"""WhitespaceTokenizer's rules, and what they give a table of words: no torch is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.tiny.tokenizers import write_tokenizer

from millpond import Engine, ModelLoadError
from millpond.checkpoints.layouts.static import StaticTable
from millpond.checkpoints.layouts.words import Words
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.engine.tokenize.word_tokenizer import WholeTokenizer, WordTokenizer
from millpond.native.library import portable

_VOCABULARY = ["PADDING_TOKEN", "mill", "Pond", "the-wheel", "old!", "stone"]


def _tokenizer(*, lower: bool = False, length: int = 1_000_000) -> WordTokenizer:
    words = Words(
        ids={word: i for i, word in enumerate(_VOCABULARY)}, stop_words=frozenset(("the", "Old!")), lower=lower
    )
    table = StaticTable(folder=Path("folder"), length=length, words=words)
    return WordTokenizer(words, table, rows=len(_VOCABULARY))


def _encode(text: str, *, limit: int = 99, prompt: str = "", lower: bool = False, **options: Any) -> Any:
    (item,) = _tokenizer(lower=lower).encode(
        [text], prompt=prompt, limit=limit, truncate="end", index_of=lambda i: i, align=True, **options
    )
    return item


@pytest.mark.parametrize(
    ("text", "lower", "words"),
    [
        ("mill\u2003stone\n", False, ["mill", "stone"]),
        ("(mill), --the-wheel--", False, ["mill", "the-wheel"]),
        ("MILL. pond Pond", False, ["MILL", "Pond"]),  # lower case is tried last, and the vocabulary's is not folded
        ("old! Old! \u201cmill\u201d", False, ["old!"]),  # as it is, before punctuation is stripped; only ASCII's is
        ("the The THE-WHEEL", False, ["THE-WHEEL"]),
        ("Old! MILL", True, ["Old!", "MILL"]),  # the text in lower case, and not the stop words
    ],
)
def test_the_words_that_are_found(text: str, lower: bool, words: list[str]) -> None:
    item = _encode(text, lower=lower)
    assert [text[begin:end] for begin, end in item.alignment.offsets] == words
    ids = {word.lower(): i for i, word in enumerate(_VOCABULARY)}
    assert item.ids.tolist() == [ids[word.lower()] for word in words]


def test_a_text_is_cut_after_the_words_that_are_found() -> None:
    item = _encode("unknown mill nothing stone mill", prompt="see: Pond ", limit=2)
    assert item.truncated and item.ids.tolist() == [2, 1]


def test_a_text_alone_is_cut_as_among_others(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "bert", limit=None)
    for kind in (WholeTokenizer, TextTokenizer):
        whole = kind.load(tmp_path, lower=False)
        for limit in (4, 99):
            options: dict[str, Any] = {"prompt": "", "limit": limit, "truncate": "end"}
            (found,) = whole.encode(["the mill and the pond"], index_of=int, **options)
            alone = whole.encode_one("the mill and the pond", **options)
            assert alone is None or (alone.ids.tolist(), alone.truncated) == (found.ids.tolist(), found.truncated)
            assert portable() is None or (alone is None) == (limit == 4 and kind is WholeTokenizer)


def test_a_text_without_words_has_the_id_behind_the_last_one() -> None:
    for text in ("", "nothing known"):
        assert _encode(text).ids.tolist() == [len(_VOCABULARY)]


def _bag(folder: Path, **config: Any) -> Path:
    place = folder / "0_BoW"
    place.mkdir()
    fields = {"vocab": ["mill", "pond", "mill", "Stone"], "word_weights": {"mill": 2.5, "stone": 0.5}}
    (place / "config.json").write_text(json.dumps(fields | {"unknown_word_weight": 3} | config))
    _list(folder, ("0_BoW", "BoW"))
    return folder


def _list(folder: Path, *modules: tuple[str, str]) -> None:
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))


@pytest.mark.parametrize(("counted", "first"), [(True, 5.0), (False, 2.5)])
def test_a_bag_of_words(tmp_path: Path, counted: bool, first: float) -> None:
    with Engine(_bag(tmp_path, cumulative_term_frequency=counted), device="cpu", backend="native") as engine:
        assert engine.spec.tasks == {"embed"} and engine.spec.dimensions == 3
        assert np.asarray(engine.embed(["mill Mill! Stone", "", "pond"])).tolist() == [
            [first, 0, 0.5],
            [0, 0, 0],
            [0, 3, 0],
        ]


def test_a_table_of_words(tmp_path: Path) -> None:
    (tmp_path / "wordembedding_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "sentence_transformers.models.tokenizer.WhitespaceTokenizer.WhitespaceTokenizer"}
        )
    )
    (tmp_path / "whitespacetokenizer_config.json").write_text(json.dumps({"vocab": ["", "mill", "pond"]}))
    save_file({"emb_layer.weight": np.array([[9, 9], [1, 2], [3, 6]], np.float32)}, tmp_path / "model.safetensors")
    _list(tmp_path, ("", "WordEmbeddings"), ("1_Pooling", "Pooling"))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    with Engine(tmp_path, device="cpu", backend="native") as engine:
        assert np.asarray(engine.embed(["mill pond", ""])).tolist() == [[2, 4], [0, 0]]
        fingerprint = engine.spec.fingerprint
    (tmp_path / "whitespacetokenizer_config.json").write_text(json.dumps({"vocab": ["", "pond", "mill"]}))
    with Engine(tmp_path, device="cpu", backend="native") as engine:
        assert engine.spec.fingerprint != fingerprint
    (tmp_path / "whitespacetokenizer_config.json").write_text(json.dumps({"vocab": ["", "pond", "mill", "wheel"]}))
    with pytest.raises(ModelLoadError, match="4 words, and the table 3 rows"):
        Engine(tmp_path)
