"""A new BERT-like family is one row of the table: FooBert, which is BERT under other names for everything."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tests.tiny import TEXTS, write_checkpoint
from tests.tiny.heads import write_splade

from millpond import Engine
from millpond.checkpoints import architectures
from millpond.checkpoints.architecture import Architecture, EncoderFields, EncoderNames, MaskedHeadNames
from millpond.checkpoints.classifier_steps import FamilyHead, Linear
from millpond.checkpoints.tokenizer_file import read_as_is
from millpond.errors import UnsupportedArchitectureError, WeightMismatchError
from millpond.models.encoder import PackedEncoder

# Everything that is written to add the family.
FOOBERT = Architecture(
    prefix="FooBert",
    model_type="foobert",
    native="BertModel",
    pooling="cls",
    positions="absolute",
    token_types=True,
    forward="millpond.models.encoder:PackedEncoder",
    encoder=EncoderNames(
        prefix="foo",
        layers="blocks",
        query="mix.q",
        key="mix.k",
        value="mix.v",
        attention_out="mix.out",
        attention_norm="mix.norm",
        up="feed.up",
        down="feed.down",
        norm="feed.norm",
        fields=EncoderFields(layers="depth", heads="branches", inner="feed_size", activation="feed_act"),
    ),
    head=FamilyHead(
        sequence=(Linear(name="summary"), "tanh", Linear(name="verdict")), tokens=(Linear(name="verdict"),)
    ),
    mlm=MaskedHeadNames(
        backbone="foo",
        dense="words.dense",
        norm="words.norm",
        decoder="words.out.weight",
        biases=("words.out.bias",),
        activation="feed_act",
    ),
    tokenizers=("BertTokenizer",),
    example="nobody/foobert",
)

TENSORS = {
    "bert.": "foo.",
    "encoder.layer.": "blocks.",
    "attention.self.query": "mix.q",
    "attention.self.key": "mix.k",
    "attention.self.value": "mix.v",
    "attention.output.dense": "mix.out",
    "attention.output.LayerNorm": "mix.norm",
    "intermediate.dense": "feed.up",
    "output.dense": "feed.down",
    "output.LayerNorm": "feed.norm",
    "pooler.dense": "summary",
    "classifier.": "verdict.",
    "cls.predictions.transform.dense": "words.dense",
    "cls.predictions.transform.LayerNorm": "words.norm",
    "cls.predictions.bias": "words.out.bias",
}
FIELDS = {
    "num_hidden_layers": "depth",
    "num_attention_heads": "branches",
    "intermediate_size": "feed_size",
    "hidden_act": "feed_act",
}


def renamed(folder: Path) -> Path:
    """The BERT in ``folder`` made a FooBert."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for old, new in TENSORS.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = {FIELDS.get(name, name): value for name, value in config.items()}
    config |= {"model_type": "foobert", "architectures": [f"Foo{config['architectures'][0]}"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def use_row(monkeypatch: pytest.MonkeyPatch, row: Architecture = FOOBERT) -> None:
    """The table with one more row."""
    monkeypatch.setattr(architectures, "ARCHITECTURES", (*architectures.ARCHITECTURES, row))


def vectors(engine: Engine) -> Any:
    return engine.embed(TEXTS).embeddings


def classes(engine: Engine) -> Any:
    return engine.classify(TEXTS).probs


def token_classes(engine: Engine) -> Any:
    return engine.token_classify(TEXTS).probs.flat


def sparse_weights(engine: Engine) -> Any:
    output = engine.encode(TEXTS, task="sparse_embed")
    return np.concatenate([[*row.keys(), *row.values()] for row in output.embeddings])


Writer = Callable[[Path], Path]
KINDS: dict[str, tuple[Writer, Callable[[Engine], Any]]] = {
    "embeds": (lambda folder: write_checkpoint(folder), vectors),
    "classifies": (lambda folder: write_checkpoint(folder, head="SequenceClassification"), classes),
    "classifies tokens": (lambda folder: write_checkpoint(folder, head="TokenClassification"), token_classes),
    "embeds sparsely": (lambda folder: write_splade(folder), sparse_weights),
}


def result(folder: Path, read: Callable[[Engine], Any], dtype: str = "float32") -> Any:
    with Engine(folder, device="cpu", dtype=dtype) as engine:
        assert isinstance(engine._replicas.runners[0].backbone, PackedEncoder)
        return read(engine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_row_is_all_that_a_new_family_needs(kind, dtype, tmp_path, monkeypatch):
    write, read = KINDS[kind]
    expected = result(write(tmp_path / "bert"), read, dtype)
    folder = renamed(write(tmp_path / "foo"))
    with pytest.raises(UnsupportedArchitectureError, match="foobert"):
        Engine(folder, device="cpu")
    use_row(monkeypatch)
    np.testing.assert_array_equal(result(folder, read, dtype), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_names_in_the_row_are_the_ones_that_are_read(kind, tmp_path, monkeypatch):
    """Control: a row that exchanges two names gives other numbers."""
    write, read = KINDS[kind]
    expected = result(write(tmp_path / "bert"), read)
    names = FOOBERT.encoder
    assert names is not None
    use_row(monkeypatch, replace(FOOBERT, encoder=replace(names, query=names.value, value=names.query)))
    other = result(renamed(write(tmp_path / "foo")), read)
    assert other.shape != expected.shape or np.abs(other - expected).max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("classifies", {"head": FamilyHead(sequence=(Linear(name="summary"), "relu", Linear(name="verdict")))}),
        ("classifies", {"head": FamilyHead(sequence=(Linear(name="verdict"),))}),
        ("embeds", {"pooling": "mean"}),
    ],
)
def test_the_rest_of_the_row_is_read_too(kind, changes, tmp_path, monkeypatch):
    write, read = KINDS[kind]
    folder = write(tmp_path / "foo")
    expected = result(folder, read)
    changed: dict[str, Any] = changes
    use_row(monkeypatch, replace(FOOBERT, **changed))
    if changed.get("head") is not None and len(changed["head"].sequence) == 1:
        # summary belongs to no head of this row, so it is a tensor that nobody knows.
        with pytest.raises(WeightMismatchError):
            Engine(renamed(folder), device="cpu")
    else:
        assert np.abs(result(renamed(folder), read) - expected).max() > 1e-3


def test_the_tokenizer_is_read_without_transformers(tmp_path, monkeypatch):
    folder = renamed(write_checkpoint(tmp_path / "foo"))
    assert read_as_is(folder) is None
    use_row(monkeypatch)
    assert read_as_is(folder) is not None
    use_row(monkeypatch, replace(FOOBERT, model_type="barbert", tokenizers=()))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "barbert"}), encoding="utf-8")
    assert read_as_is(folder) is None


def test_a_family_without_a_packed_forward_runs_in_transformers_class(tmp_path, monkeypatch):
    """Under BERT's own names, since the row has no module that would rename the tensors."""
    folder = write_checkpoint(tmp_path / "foo")
    expected = result(folder, vectors)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "foobert", "architectures": ["FooBertModel"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    use_row(monkeypatch, replace(FOOBERT, forward=None, encoder=None, pooler=True))
    with Engine(folder, device="cpu", dtype="float32") as engine:
        assert type(engine._replicas.runners[0].backbone).__name__ == "BertModel"
        np.testing.assert_allclose(vectors(engine), expected, atol=1e-5)


def test_every_row_names_code_that_is_there():
    for row in architectures.ARCHITECTURES:
        assert isinstance(row.forward_class(), type) == (row.forward is not None)
        hooks = row.hooks()
        assert (hooks is None) == (row.module is None)
        if hooks is not None:
            assert {"translate", "tensors", "backbone_class", "finish"} & vars(hooks).keys()
        assert architectures.row_of(row.model_type) is row
        # The data that a forward reads is in the row if, and only if, the row names that forward.
        assert (row.encoder is not None) == (row.forward == "millpond.models.encoder:PackedEncoder")
        assert (row.traits is not None) == (row.forward == "millpond.models.decoder:PackedDecoder")


def test_every_model_type_has_one_row():
    names = [name for row in architectures.ARCHITECTURES for name in (row.model_type, *row.aliases)]
    assert len(names) == len(set(names)) >= 24
