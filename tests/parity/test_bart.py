"""BART compared with transformers: classifiers, zero-shot classes and embeddings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.tiny import SENTENCES, drop_tensor, write_checkpoint
from tests.tiny.heads import write_nli

from millpond.errors import ModelLoadError
from millpond.values.inputs import Pair

TOLERANCE = 1e-5
VISIBLE = 1e-3
LABELS = ["water", "the wheel", "a bakery"]
PAIRS = [Pair(SENTENCES[i], SENTENCES[i + 3]) for i in range(5)]


def logits(folder: Path, mistake: str = "") -> np.ndarray:
    """``[pairs, 3]`` by transformers, or with what is plausible and wrong."""
    import torch
    from transformers import AutoTokenizer, BartForSequenceClassification

    model = BartForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, rows = AutoTokenizer.from_pretrained(folder), []
    if mistake == "offset":
        for half in (model.model.encoder, model.model.decoder):
            half.embed_positions.offset = 0
    with torch.inference_mode():
        for pair in PAIRS:
            ids = tokenizer(pair.query, pair.document, return_tensors="pt")["input_ids"]
            if not mistake or mistake == "offset":
                rows.append(model(input_ids=ids).logits[0])
                continue
            shifted = torch.cat((ids.new_tensor([[2]]), ids[:, :-1]), 1)
            read = model.model(input_ids=ids, decoder_input_ids=ids if mistake == "no shift" else shifted)
            first = int((ids[0] == 2).nonzero()[0])
            states = read.encoder_last_hidden_state if mistake == "encoder" else read.last_hidden_state
            rows.append(model.classification_head(states[:, first if mistake == "first end" else -1])[0])
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_pairs(backend, checkpoint_of, engine_of, record_property):
    folder = checkpoint_of(write_nli, "bart")
    ours = engine_of(folder, backend=backend).classify(PAIRS, activation=False).probs
    worst = float(np.abs(ours - logits(folder)).max())
    record_property("error", worst)
    assert worst <= TOLERANCE
    for mistake in ("offset", "no shift", "first end", "encoder"):
        assert np.abs(ours - logits(folder, mistake)).max() > VISIBLE, mistake


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("conditional", [False, True])
def test_vectors_of_long_texts(backend, conditional, tmp_path, engine_of, record_property):
    """The decoder's states, of texts that are computed in slices; scaled words; the table of words under one name."""
    import torch
    from transformers import AutoTokenizer, BartModel

    fields = {"max_position_embeddings": 1024, "scale_embedding": True}
    folder = write_checkpoint(tmp_path, "bart", config=fields, wrapped=conditional, tokenizer_limit=None)
    for half in ("encoder", "decoder"):
        drop_tensor(folder, f"{'model.' if conditional else ''}{half}.embed_tokens.weight")
    texts = ["a", " ".join(SENTENCES), " ".join(SENTENCES * 3), SENTENCES[0]]
    model, tokenizer = BartModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        read = [tokenizer(text, return_tensors="pt", truncation=True, max_length=1024)["input_ids"] for text in texts]
        theirs = [model(input_ids=ids).last_hidden_state[0].mean(0).numpy() for ids in read]
    assert max(ids.shape[1] for ids in read) > 600
    ours = engine_of(folder, backend=backend, max_length=1024).embed(texts, normalize=False).embeddings
    worst = float(np.abs(ours - np.stack(theirs)).max())
    record_property("error", worst)
    assert worst <= TOLERANCE


def test_refuses_layers_that_normalize_what_they_read(checkpoint_of, engine_of):
    folder = checkpoint_of(write_checkpoint, "bart", config={"normalize_before": True})
    with pytest.raises(ModelLoadError, match="normalize_before"):
        engine_of(folder)
