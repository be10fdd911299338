"""T5's encoder, and embedders and token classifiers made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.parity.test_backbones import SHORT, TOLERANCE, VISIBLE, difference, expected_of, ids_of, states
from tests.tiny import TEXTS, Layout, Normalize, Pooling, edit_json, write_checkpoint
from tests.tiny.layouts import Dense

from millpond import Engine
from millpond.errors import UnsupportedArchitectureError

pytestmark = pytest.mark.contract

BACKENDS = pytest.mark.parametrize("backend", ["native", "torch"])
FAMILIES = pytest.mark.parametrize("family", ["t5", "mt5", "umt5"])
# gtr and sentence-t5: the mean, a linear layer without bias or activation, unit length.
GTR = (Pooling(modes=("mean",)), Dense(out_features=48, activation="Identity", bias=False), Normalize())


def engine(folder: Path, **options: Any) -> Engine:
    return Engine(folder, dtype="float32", device="cpu", **options)


@BACKENDS
@FAMILIES
def test_the_encoder_equals_transformers(family, backend, tmp_path):
    folder = write_checkpoint(tmp_path / family, family, seed=2, wrapped=family == "t5")
    with engine(folder, backend=backend) as loaded:
        found = states(loaded, TEXTS)
    assert difference(found, expected_of(folder, TEXTS)) <= TOLERANCE


def test_distances_of_every_bucket(tmp_path):
    """Those beyond relative_attention_max_distance share the last one."""
    from transformers import AutoTokenizer, T5EncoderModel

    text = " ".join(TEXTS)
    folder = write_checkpoint(tmp_path / "t5", "t5", tokenizer_limit=None)
    (ids,) = [torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])]
    assert len(ids) > 256
    with torch.inference_mode():
        expected = T5EncoderModel.from_pretrained(folder).eval()(input_ids=ids[None]).last_hidden_state[0].numpy()
    with engine(folder) as loaded:
        assert loaded.spec.max_length == 8192
        found = states(loaded, [text])
    assert difference(found, [expected]) <= TOLERANCE
    edit_json(folder / "config.json", relative_attention_max_distance=32)
    with engine(folder) as loaded:
        assert difference(states(loaded, [text]), [expected]) > VISIBLE


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mt5", {"feed_forward_proj": "gated-silu"}),  # gelu_new, and not gelu, is what the test above needs
        ("t5", {"relative_attention_max_distance": 16}),
    ],
)
def test_what_config_json_says_counts(family, fields, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family)
    with engine(folder) as loaded:
        before = states(loaded, TEXTS[1:3])
    edit_json(folder / "config.json", **fields)
    with engine(folder) as loaded:
        after = states(loaded, TEXTS[1:3])
    assert difference(after, expected_of(folder, TEXTS[1:3])) <= TOLERANCE
    assert difference(after, before) > VISIBLE


def test_each_layer_of_umt5_has_a_bias_of_its_own(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "umt5")
    tensors = load_file(folder / "model.safetensors")
    first, second = (f"encoder.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight" for i in range(2))
    with engine(folder) as loaded:
        before = states(loaded, SHORT)
    save_file({**tensors, second: tensors[first]}, folder / "model.safetensors", metadata={"format": "pt"})
    with engine(folder) as loaded:
        assert difference(states(loaded, SHORT), before) > VISIBLE


def test_scores_are_not_scaled(tmp_path):
    """Queries that are smaller by the root of a head's width, as other families' scores, give other states."""
    folder = write_checkpoint(tmp_path / "model", "t5")
    expected = expected_of(folder, SHORT)
    tensors = load_file(folder / "model.safetensors")
    scaled = {name: part / 4 if name.endswith("Attention.q.weight") else part for name, part in tensors.items()}
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})
    with engine(folder) as loaded:
        assert difference(states(loaded, SHORT), expected) > VISIBLE


@BACKENDS
@FAMILIES
def test_gtr_and_sentence_t5(family, backend, tmp_path):
    from sentence_transformers import SentenceTransformer

    folder = write_checkpoint(tmp_path / family, family, sentence_transformers=Layout(modules=GTR, style="old"))
    own = SentenceTransformer(str(folder), device="cpu")
    expected = own.encode(list(SHORT), show_progress_bar=False)
    with engine(folder, backend=backend) as loaded:
        assert np.abs(loaded.embed(SHORT).embeddings - expected).max() <= TOLERANCE
    entries = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*entries[:2], entries[3]]))
    with engine(folder, backend=backend) as loaded:
        assert np.abs(loaded.embed(SHORT).embeddings - expected).max() > VISIBLE


@BACKENDS
def test_instructors_prompt_is_left_out_of_the_mean(backend, tmp_path):
    pooling = Pooling(modes=("mean",), include_prompt=False)
    folder = write_checkpoint(tmp_path / "t5", "t5", sentence_transformers=Layout(modules=(pooling, *GTR[1:])))
    prompt = "Represent the pond: "
    from transformers import T5EncoderModel

    (ids,), (lead,) = ids_of(folder, [prompt + SHORT[1]]), ids_of(folder, [prompt])
    with torch.inference_mode():
        rows = T5EncoderModel.from_pretrained(folder).eval()(input_ids=ids[None]).last_hidden_state[0].numpy()
    dense = load_file(folder / "2_Dense" / "model.safetensors")["linear.weight"]
    right, wrong = (dense @ rows[first:].mean(0) for first in (len(lead) - 1, 0))
    with engine(folder, backend=backend) as loaded:
        found = loaded.embed([SHORT[1]], prompt=prompt).embeddings[0]
    assert np.abs(found - right / np.linalg.norm(right)).max() <= TOLERANCE
    assert np.abs(found - wrong / np.linalg.norm(wrong)).max() > VISIBLE


@BACKENDS
def test_a_token_classifier(backend, tmp_path):
    from transformers import T5ForTokenClassification

    folder = write_checkpoint(tmp_path / "t5", "t5", head="TokenClassification")
    model = T5ForTokenClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = [model(input_ids=ids[None]).logits[0].softmax(-1).numpy() for ids in ids_of(folder, SHORT)]
    with engine(folder, backend=backend) as loaded:
        found = loaded.token_classify(SHORT).probs
    assert difference(found, expected) <= TOLERANCE


def test_a_classifier_of_texts_reads_the_decoder(tmp_path):
    folder = write_checkpoint(tmp_path / "t5", "t5", head="SequenceClassification")
    with pytest.raises(UnsupportedArchitectureError, match="T5ForSequenceClassification.*decoder's states"):
        engine(folder)
