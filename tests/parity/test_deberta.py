"""DeBERTa v2 and v3: millpond's packed forward compared with transformers' class, for each form of checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.parity.oracles import oracle
from tests.parity.test_backbones import SHORT, TOLERANCE, VISIBLE, difference, expected_of, states
from tests.tiny import TEXTS, write_checkpoint

from millpond import Engine
from millpond.errors import ModelLoadError

FORMS: dict[str, dict[str, Any]] = {
    "v3": {},
    "own position projections": {"share_att_key": False},
    "content to position": {"pos_att_type": ["c2p"]},
    "position to content": {"pos_att_type": ["p2c"], "share_att_key": False},
    "a convolution": {"conv_kernel_size": 3, "conv_act": "gelu"},  # v2-xlarge
    "distances without buckets": {"position_buckets": -1},
    "distances cut": {"position_buckets": -1, "max_relative_positions": 20},
    "positions in the input too": {"position_biased_input": True, "type_vocab_size": 2},
    "plain distances": {"norm_rel_ebd": "none"},
    "no distances": {"relative_attention": False, "position_biased_input": True},
    "narrow embeddings": {"embedding_size": 24},
    "tanh": {"hidden_act": "tanh"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_transformers(form, plain, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "deberta-v2", config=FORMS[form])
    expected = expected_of(folder, TEXTS)
    with Engine(folder, dtype="float32", device="cpu") as engine:
        assert difference(states(engine, TEXTS), expected) <= TOLERANCE
    if form != "v3":  # each field changes the states, or its row could not fail
        assert difference(expected_of(folder, SHORT), expected_of(plain("deberta-v2"), SHORT)) > VISIBLE


def test_texts_longer_than_every_bucket(tmp_path):
    """With distances only, a text may be longer than max_position_embeddings, as in transformers."""
    texts = [" ".join(TEXTS), "a", " ".join(TEXTS[1:3])]
    folder = write_checkpoint(tmp_path / "model", "deberta-v2", tokenizer_limit=None)
    with Engine(folder, dtype="float32", device="cpu", max_length=64) as engine:
        assert engine.spec.max_length == 64
    reference = oracle(folder)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        expected = [reference(torch.tensor(tokenizer(text)["input_ids"])).numpy() for text in texts]
    assert max(map(len, expected)) > 256
    with Engine(folder, dtype="float32", device="cpu", max_length=1024) as engine:
        worst = difference(states(engine, texts), expected)
    assert worst <= TOLERANCE


def test_a_table_of_positions_ends_the_texts(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "deberta-v2", config={"position_biased_input": True})
    with pytest.raises(ModelLoadError, match="max_length=65 is more than .* choose 1 to 64"):
        Engine(folder, dtype="float32", device="cpu", max_length=65)
