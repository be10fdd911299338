"""What a native forward returns, read as a forward in torch is read: pooled rows, all rows, and through heads."""

import numpy as np
import pytest
from tests.tiny import SENTENCES, write_checkpoint
from tests.tiny.layouts import Dense, Layout, Normalize, Pooling

from millpond import Engine
from millpond.models import load
from millpond.models.native.encoder import NativeEncoder
from millpond.pooling.pooler import Pooler

TEXTS = [*SENTENCES[:6], "a", " ".join(SENTENCES[:5])]
LAYOUTS = {
    "mean": Layout(modules=(Pooling(),)),
    "cls": Layout(modules=(Pooling(modes=("cls",)),)),
    "max": Layout(modules=(Pooling(modes=("max",)),)),
    "cls and mean": Layout(modules=(Pooling(modes=("cls", "mean")),)),
    "mean without prompt": Layout(modules=(Pooling(include_prompt=False),)),
    "cls without prompt": Layout(modules=(Pooling(modes=("cls",), include_prompt=False),)),
    "dense": Layout(modules=(Pooling(), Dense(out_features=12))),
    "cls, normalized, dense": Layout(modules=(Pooling(modes=("cls",)), Normalize(), Dense(out_features=12))),
    "tokens dense": Layout(modules=(Dense(out_features=12, stage="token_embeddings"), Pooling())),
}


# Widths that the kernels have.
SIZE = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}


def checkpoint(folder, name):
    return write_checkpoint(folder, "bert", sentence_transformers=LAYOUTS[name], config=SIZE)


def vectors(folder):
    """Of all texts in one batch, and of one alone; with a prompt and without; and the texts' token vectors."""
    with Engine(folder, dtype="float32", device="cpu") as engine:
        native = isinstance(engine._replicas.runner.backbone, NativeEncoder)
        found = [
            engine.embed(TEXTS, normalize=False).embeddings,
            engine.embed(TEXTS[:1], normalize=False).embeddings,
            engine.embed(TEXTS, prompt="find the river: ", normalize=False).embeddings,
            engine.token_embed(TEXTS, normalize=False).embeddings.flat,
        ]
    return native, found


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_a_native_forward_equal_those_of_torch(name, tmp_path, monkeypatch):
    folder = checkpoint(tmp_path / "model", name)
    native, found = vectors(folder)
    if not native:
        pytest.skip("the compiled kernels are not available")
    monkeypatch.setattr(load, "native_forward", lambda *_: None)
    in_torch, expected = vectors(folder)
    assert not in_torch
    for rows, same in zip(found, expected, strict=True):
        np.testing.assert_allclose(rows, same, atol=2e-5)
    assert np.abs(np.roll(found[0], 1, axis=0) - expected[0]).max() > 1e-3


def test_only_rows_that_no_module_follows_are_plain(tmp_path, monkeypatch):
    plain = []
    decide = Pooler.is_plain
    monkeypatch.setattr(Pooler, "is_plain", lambda *args: plain.append(decide(*args)) or plain[-1])
    for name in ("mean", "dense"):
        native, _ = vectors(checkpoint(tmp_path / name, name))
        if not native:
            pytest.skip("the compiled kernels are not available")
    assert plain == [True] * 3 + [False] * 3
