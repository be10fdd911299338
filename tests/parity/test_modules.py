"""Modules in the place of a Transformer, or between it and the pooling, as sentence-transformers computes them.

The reference reads one text at a time: some modules read the padding of a batch there, and a text has one vector here.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.comparison import TOLERANCE, VISIBLE
from tests.tiny import TEXTS as SAMPLES
from tests.tiny import write_checkpoint

from millpond import Engine, ModelLoadError

pytest.importorskip("sentence_transformers")
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer import modules as st
from sentence_transformers.sentence_transformer.modules.tokenizer import (
    TransformersTokenizerWrapper,
    WhitespaceTokenizer,
)

pytestmark = pytest.mark.contract

WIDTH = 24
WORDS = "PADDING_TOKEN mill pond water Water the wheel stands turns by old stone".split()
TEXTS = [
    "the mill pond",
    "",
    "nothing known",
    "Water. (wheel) STANDS by; old Stone mill",
    "pond " * 90,
    "mill and pond",
]
PROMPTS = ("", "Water by ")
WEIGHTS = {"mill": 2.5, "pond": 0.3, "water": 1.7}
MODES = ("mean", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens")
BACKENDS = pytest.mark.parametrize("backend", ["native", "torch"])
Edit = Callable[[Any], object]  # a mistake, made in the reference


def table(length: int = 1_000_000, **options: Any) -> Any:
    rows = np.random.default_rng(1).standard_normal((len(WORDS), WIDTH)).astype(np.float32)
    tokenizer = WhitespaceTokenizer(WORDS, **{"stop_words": ["the"], **options})
    return st.WordEmbeddings(tokenizer, rows, max_seq_length=length)


def weights(words: list[str] = WORDS) -> Any:
    return st.WordWeights(words, WEIGHTS | {word: i % 5 / 2 for i, word in enumerate(words[12:-2])}, 0.5)


def by_count(model: Any) -> None:
    """A mean that divides by the number of tokens."""

    def forget(_: Any, arguments: Any) -> None:
        del arguments[0]["token_weights_sum"]

    next(module for module in model if isinstance(module, st.Pooling)).register_forward_pre_hook(forget)


def mirrored(model: Any) -> None:
    """Kernels that read a text backwards."""
    for module in model:
        if isinstance(module, st.CNN):
            for conv in module.convs:
                conv.weight.data = conv.weight.data.flip(-1)


def one_bias(model: Any) -> None:
    """An LSTM whose second bias is forgotten."""
    model[1].encoder.bias_hh_l0.data.zero_()


def equal_layers(model: Any) -> None:
    model[1].layer_weights.data.fill_(1)


# Modules, and a mistake that must show.
TABLES: dict[str, tuple[Callable[[], list[Any]], Edit]] = {
    "words": (lambda: [table(), st.Pooling(WIDTH, MODES)], lambda m: m[0].tokenizer.stop_words.clear()),
    "cut": (lambda: [table(3), st.Pooling(WIDTH, MODES)], lambda m: setattr(m[0], "max_seq_length", 4)),
    "lower case": (
        lambda: [table(do_lower_case=True), st.Pooling(WIDTH), Normalize()],
        lambda m: setattr(m[0].tokenizer, "do_lower_case", False),
    ),
    "a prompt not pooled": (  # sentence-transformers does not know its length, and pools it
        lambda: [table(), st.Pooling(WIDTH, include_prompt=False)],
        lambda m: m[0].tokenizer.stop_words.update({"Water", "by"}),
    ),
    "WordWeights": (lambda: [table(), weights(), st.Pooling(WIDTH, MODES)], by_count),
    "CNN": (lambda: [table(), st.CNN(WIDTH, 8, [1, 3, 5]), st.Pooling(WIDTH, MODES)], mirrored),
    "LSTM": (lambda: [table(), st.LSTM(WIDTH, 7, num_layers=2), st.Pooling(14, MODES)], one_bias),
    "LSTM one way": (lambda: [table(), st.LSTM(WIDTH, 7, bidirectional=False), st.Pooling(7, MODES)], one_bias),
    "WordWeights, Dense, CNN": (
        lambda: [
            table(),
            weights(),
            Dense(WIDTH, 10, module_input_name="token_embeddings", module_output_name="token_embeddings"),
            st.CNN(10, 6, [3]),
            st.Pooling(6, "mean"),
        ],
        by_count,
    ),
    "BoW": (lambda: [st.BoW(WORDS, WEIGHTS, 0.7)], lambda m: setattr(m[0], "cumulative_term_frequency", False)),
    "BoW once": (
        lambda: [st.BoW(WORDS, WEIGHTS, 0.7, cumulative_term_frequency=False)],
        lambda m: setattr(m[0], "cumulative_term_frequency", True),
    ),
    "BoW, Dense": (
        lambda: [st.BoW(WORDS, WEIGHTS, 0.7), st.Dropout(), Dense(len(WORDS), 5), Normalize()],
        lambda m: setattr(m[0], "weights", [1.0] * len(WORDS)),
    ),
}
BACKBONES: dict[str, tuple[Callable[[int, int, list[str]], list[Any]], Edit]] = {
    "layers": (lambda width, layers, _: [layer_pooling(width, layers, 1), st.Pooling(width, "cls")], equal_layers),
    "layers and embeddings": (
        lambda width, layers, _: [layer_pooling(width, layers, 0), st.Pooling(width, MODES)],
        equal_layers,
    ),
    "WordWeights": (
        lambda width, _, words: [weights(words), st.Pooling(width, (*MODES, "cls"), include_prompt=False)],
        by_count,
    ),
    "CNN": (lambda width, *_: [st.CNN(width, 8, [1, 3]), st.Pooling(16, (*MODES, "cls"))], mirrored),
    "layers, CNN": (
        lambda width, layers, _: [layer_pooling(width, layers, 1), st.CNN(width, 8, [3]), st.Pooling(8)],
        equal_layers,
    ),
}


def layer_pooling(width: int, layers: int, start: int) -> Any:
    module = st.WeightedLayerPooling(width, num_hidden_layers=layers, layer_start=start)
    module.layer_weights.data = torch.linspace(-0.3, 1.5, layers + 1 - start)
    return module


def saved(folder: Path, modules: list[Any], **options: Any) -> Path:
    """Modules as sentence-transformers writes them."""
    SentenceTransformer(modules=modules, device="cpu").save(str(folder), create_model_card=False, **options)
    return folder


def encoder(folder: Path, family: str, *, hidden_states: bool = True) -> Any:
    write_checkpoint(folder, family)
    return Transformer(str(folder), config_kwargs={"output_hidden_states": hidden_states})


def on_backbone(folder: Path, name: str, family: str = "bert") -> Path:
    first = encoder(folder / "backbone", family)
    vocabulary = first.tokenizer.get_vocab()
    config = first.auto_model.config
    modules, _ = BACKBONES[name]
    behind = modules(config.hidden_size, config.num_hidden_layers, sorted(vocabulary, key=vocabulary.__getitem__))
    return saved(folder / "model", [first, *behind])


def reference_of(folder: Path) -> Any:
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def one_by_one(model: Any, texts: list[str], prompt: str = "") -> np.ndarray:
    rows = np.concatenate([model.encode([text], prompt=prompt) for text in texts])
    return np.where(np.isneginf(rows), np.float32(0), rows)  # of max pooling over no words: the zero vector here


def off(found: Any, expected: np.ndarray) -> float:
    found = np.asarray(found)
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def check(folder: Path, backend: str, wrong: Edit, texts: list[str]) -> None:
    reference = reference_of(folder)
    torch.manual_seed(0)
    with Engine(folder, backend=backend, device="cpu", dtype="float32") as engine:
        for prompt in PROMPTS:
            expected = one_by_one(reference, texts, prompt)
            assert engine.spec.dimensions == expected.shape[1]
            assert off(engine.embed(texts, prompt=prompt), expected) <= TOLERANCE
            alone = np.concatenate([engine.embed([text], prompt=prompt) for text in texts])
            assert off(alone, expected) <= TOLERANCE
        wrong(reference)
        assert off(engine.embed(texts, prompt=prompt), one_by_one(reference, texts, prompt)) > VISIBLE


@BACKENDS
@pytest.mark.parametrize("name", TABLES)
def test_in_the_place_of_a_transformer(tmp_path: Path, name: str, backend: str) -> None:
    torch.manual_seed(2)
    modules, wrong = TABLES[name]
    check(saved(tmp_path, modules()), backend, wrong, TEXTS)


@BACKENDS
@pytest.mark.parametrize(
    ("name", "family"),
    [
        *((name, "bert") for name in BACKBONES),
        *(pytest.param("layers", family, marks=pytest.mark.slow) for family in ("roberta", "electra", "distilbert")),
        ("layers", "mpnet"),
        ("WordWeights", "qwen3"),
    ],
)
def test_behind_a_transformer(tmp_path: Path, name: str, family: str, backend: str) -> None:
    torch.manual_seed(3)
    check(on_backbone(tmp_path, name, family), backend, BACKBONES[name][1], list(SAMPLES))


@pytest.mark.parametrize("family", ["modernbert", "qwen3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_layers_that_only_transformers_class_gives(tmp_path: Path, family: str) -> None:
    folder = on_backbone(tmp_path, "layers and embeddings", family)
    check(folder, "torch", equal_layers, list(SAMPLES))
    with pytest.raises(ModelLoadError, match="no native plan that averages its layers"):
        Engine(folder, backend="native")


def test_layers_of_a_family_that_keeps_none_are_refused(tmp_path: Path) -> None:
    folder = on_backbone(tmp_path, "layers", "albert")
    with pytest.raises(ModelLoadError, match="WeightedLayerPooling over Albert"):
        Engine(folder)


@BACKENDS
def test_layers_without_hidden_states_are_the_last_one(tmp_path: Path, backend: str) -> None:
    """As in sentence-transformers, whose Transformer then has no others to tell."""
    first = encoder(tmp_path / "backbone", "bert", hidden_states=False)
    width, layers = first.auto_model.config.hidden_size, first.auto_model.config.num_hidden_layers
    folder = saved(tmp_path / "model", [first, layer_pooling(width, layers, 1), st.Pooling(width)])
    check(
        folder, backend, lambda model: setattr(model[0].auto_model.config, "output_hidden_states", True), list(SAMPLES)
    )


def test_a_batch_changes_a_cnn_there_and_not_here(tmp_path: Path) -> None:
    """Its kernels read the padding of shorter texts; the vector of a text alone is the one that it has here."""
    folder = on_backbone(tmp_path, "CNN")
    texts, reference = list(SAMPLES), reference_of(folder)
    assert off(reference.encode(texts), one_by_one(reference, texts)) > VISIBLE


@BACKENDS
def test_a_text_without_words_is_0_in_max_pooling(tmp_path: Path, backend: str) -> None:
    folder = saved(tmp_path, [table(), st.Pooling(WIDTH, "max")])
    assert np.isneginf(reference_of(folder).encode([""])).all()
    with Engine(folder, backend=backend, device="cpu") as engine:
        assert np.abs(engine.embed(["", "the"])).max() == 0


@BACKENDS
@pytest.mark.parametrize("length", [1_000_000, 5])
def test_a_tokenizer_of_transformers(tmp_path: Path, backend: str, length: int) -> None:
    """Its special tokens are words like others, and the last ones are cut off."""
    tokenizer = encoder(tmp_path / "backbone", "bert").tokenizer
    rows = np.random.default_rng(4).standard_normal((len(tokenizer), WIDTH)).astype(np.float32)
    words = st.WordEmbeddings(TransformersTokenizerWrapper(tokenizer), rows, max_seq_length=length)
    folder = saved(tmp_path / "model", [words, st.Pooling(WIDTH, ("mean", "lasttoken"))])
    check(folder, backend, lambda m: setattr(m[0], "max_seq_length", length - 1 if length == 5 else 8), list(SAMPLES))


@BACKENDS
def test_published_layouts(tmp_path: Path, backend: str) -> None:
    """Version 2 to 4 wrote modules into folders of their own, as pickles, by the old names of classes and fields."""
    old = "sentence_transformers.models"
    folder = saved(tmp_path, [table(), weights(), st.CNN(WIDTH, 8), st.Pooling(WIDTH)], safe_serialization=False)
    first = folder / "0_WordEmbeddings"
    first.mkdir()
    for name in ("wordembedding_config.json", "whitespacetokenizer_config.json", "pytorch_model.bin"):
        (folder / name).rename(first / name)
    names = ("WordEmbeddings", "WordWeights", "CNN", "Pooling")
    entries = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}", "type": f"{old}.{name}"} for i, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    _fields(
        first / "wordembedding_config.json", tokenizer_class=f"{old}.tokenizer.WhitespaceTokenizer.WhitespaceTokenizer"
    )
    path = folder / "2_CNN" / "cnn_config.json"
    config = json.loads(path.read_text())
    config["in_word_embedding_dimension"] = config.pop("in_embedding_dimension")
    path.write_text(json.dumps(config))
    check(folder, backend, by_count, TEXTS)


def _fields(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class _Code:
    """What a pickle may hold: a call."""

    def __reduce__(self) -> Any:
        return (print, ("a pickle ran code",))


def test_a_pickled_table_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path, [table(), st.Pooling(WIDTH)])
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"emb_layer.weight": _Code()}))
    with pytest.raises(ModelLoadError, match="damaged"):
        Engine(folder)
    assert "ran code" not in capsys.readouterr().out


REFUSED: dict[str, tuple[Callable[[], list[Any]], str, dict[str, Any], str]] = {
    "an even kernel": (
        lambda: [table(), st.CNN(WIDTH, 8, [2]), st.Pooling(8)],
        "1_CNN/cnn_config.json",
        {},
        "fewer rows than tokens",
    ),
    "strides": (
        lambda: [table(), st.CNN(WIDTH, 8, [3]), st.Pooling(8)],
        "1_CNN/cnn_config.json",
        {"stride_sizes": [2]},
        "strides of 1",
    ),
    "another width": (
        lambda: [table(), st.CNN(WIDTH, 8, [3]), st.Pooling(8)],
        "1_CNN/cnn_config.json",
        {"in_embedding_dimension": 8},
        "1_CNN takes 8 features, and gets 24",
    ),
    "other tensors": (
        lambda: [table(), st.LSTM(WIDTH, 8), st.Pooling(16)],
        "1_LSTM/lstm_config.json",
        {"num_layers": 2},
        "for encoder.weight_ih_l1 the file has no tensor",
    ),
    "the first word": (
        lambda: [table(), st.Pooling(WIDTH, "cls")],
        "1_Pooling/config.json",
        {},
        "which sentence-transformers has no vector of",
    ),
    "phrases": (
        lambda: [table(), st.Pooling(WIDTH)],
        "wordembedding_config.json",
        {"tokenizer_class": "sentence_transformers.models.tokenizer.PhraseTokenizer.PhraseTokenizer"},
        "joins phrases",
    ),
    "code": (
        lambda: [table(), st.Pooling(WIDTH)],
        "wordembedding_config.json",
        {"tokenizer_class": "mine.Tokenizer"},
        "'mine.Tokenizer', which is code of the checkpoint's own",
    ),
    "weights that are no numbers": (
        lambda: [table(), weights(), st.Pooling(WIDTH)],
        "1_WordWeights/config.json",
        {"word_weights": {"mill": "heavy"}},
        "word_weights as numbers by word",
    ),
    "a module behind a bag": (
        lambda: [st.BoW(WORDS), weights()],
        "0_BoW/config.json",
        {},
        "lists WordWeights after BoW",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    modules, path, changes, message = REFUSED[name]
    folder = saved(tmp_path, modules())
    _fields(folder / path, **changes)
    with pytest.raises(ModelLoadError, match=message):
        Engine(folder, device="cpu")


def test_an_lstm_behind_a_transformer_runs_nowhere(tmp_path: Path) -> None:
    first = encoder(tmp_path / "backbone", "bert")
    folder = saved(tmp_path / "model", [first, st.LSTM(first.get_embedding_dimension(), 8), st.Pooling(16)])
    with pytest.raises(KeyError, match="sentence_lengths"):
        reference_of(folder).encode(["mill"])
    with pytest.raises(ModelLoadError, match="lists LSTM behind a Transformer"):
        Engine(folder)


def test_the_first_word_has_no_vector_there(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        reference_of(saved(tmp_path, [table(), st.Pooling(WIDTH, "cls")])).encode(["mill"])
