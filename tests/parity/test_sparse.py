"""Sparse weights compared with sentence-transformers' SparseEncoder, and BGE-M3's with a formula in this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.comparison import TOLERANCE, VISIBLE
from tests.tiny import MAX_TOKENS, TEXTS, drop_tensor, edit_json, write_checkpoint
from tests.tiny.heads import write_m3, write_splade
from transformers import AutoModel, AutoTokenizer

from millpond.attention.segments import Segments
from millpond.checkpoints.architectures import find
from millpond.checkpoints.checkpoint import Checkpoint, read_checkpoint
from millpond.checkpoints.layouts.sparse import Splade, TokenWeights
from millpond.checkpoints.native_config import translate
from millpond.errors import ModelLoadError, UnsupportedArchitectureError, WeightMismatchError
from millpond.models.load import load_backbone
from millpond.pooling.masked_lm import build_masked_head
from millpond.pooling.sparse import SpladeHead, build_sparse, build_token_vectors

CPU = torch.device("cpu")
FAMILIES = ("bert", "distilbert", "roberta", "xlm-roberta", "mpnet", "modernbert")
# A text of one token, and one of the maximum length.
EXTREMES = ("", " ".join(["deep"] * 2 * MAX_TOKENS))


def states(checkpoint: Checkpoint, texts: tuple[str, ...]) -> tuple[torch.Tensor, Segments, torch.Tensor]:
    """Hidden states [tokens, hidden], segments and ids [tokens] of ``texts`` packed into one row."""
    name, folder = checkpoint.source.name, checkpoint.layout.transformer
    row = find(checkpoint.config, name)
    backbone = load_backbone(checkpoint, row, device=CPU, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = tokenizer(list(texts), truncation=True, max_length=MAX_TOKENS)["input_ids"]
    offset = row.position_offset(translate(row, checkpoint.config, name))
    places = torch.tensor([i + offset for text in ids for i in range(len(text))])
    flat, segments = torch.tensor([token for text in ids for token in text]), Segments.of([len(text) for text in ids])
    types = {"token_type_ids": torch.zeros_like(flat)[None]} if row.token_types else {}
    with torch.inference_mode():
        out = backbone(input_ids=flat[None], position_ids=places[None], segments=segments, **types)
    return out.last_hidden_state[0], segments, flat


def weights(folder: Path, texts: tuple[str, ...], *, logits: int | None = None, **overrides: Any) -> np.ndarray:
    """Dense weights ``[n, vocabulary]`` of the checkpoint; ``logits`` limits the logits in memory at once."""
    checkpoint = read_checkpoint(folder, hf_overrides=overrides or None)
    description = checkpoint.layout.sparse
    assert description is not None
    head: Any = build_sparse(description, checkpoint.config, width=48, device=CPU)
    if logits is not None:
        head = SpladeHead(head.vocabulary, description.strategy, description.activation, logits=logits)
    hidden, segments, ids = states(checkpoint, texts)
    with torch.inference_mode():
        entries, values, counts = head.read(hidden, segments, ids)
    assert entries.dtype is torch.int32
    assert values.dtype is torch.float32
    assert (values > 0).all()
    assert len(counts) == len(texts)
    dense = np.zeros((len(texts), int(checkpoint.config["vocab_size"])), np.float32)
    rows = np.repeat(np.arange(len(texts)), counts)
    assert len({*zip(rows.tolist(), entries.tolist(), strict=True)}) == len(entries)  # no entry twice
    dense[rows, entries.numpy()] = values.numpy()
    return dense


def reference(folder: Path, texts: tuple[str, ...]) -> np.ndarray:
    encoder = pytest.importorskip("sentence_transformers").SparseEncoder(
        str(folder), device="cpu", local_files_only=True
    )
    actual: np.ndarray = encoder.encode(list(texts), convert_to_sparse_tensor=False, convert_to_tensor=True).numpy()
    return actual


def difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest weight of all texts (some texts have no weights)."""
    assert actual.shape == expected.shape
    assert 0 < (expected > 0).mean() < 1
    return float(np.abs(actual - expected).max() / expected.max())


@pytest.mark.parametrize("family", FAMILIES)
def test_splade_equals_sentence_transformers(family, tmp_path):
    folder = write_splade(tmp_path / "model", family)
    texts = (*TEXTS, *EXTREMES)
    expected = reference(folder, texts)
    actual = weights(folder, texts)
    assert difference(actual, expected) <= TOLERANCE
    alone = np.concatenate([weights(folder, (text,)) for text in texts[:3]])
    assert difference(alone, expected[:3]) <= TOLERANCE
    # Negative control: a head with another projection.
    name = next(name for name in load_file(folder / "model.safetensors") if _is_projection(name))
    _change(folder, name, lambda tensor: tensor.flip(0))
    assert difference(weights(folder, texts), expected) > VISIBLE


def _is_projection(name: str) -> bool:
    return (name.endswith("dense.weight") and name.startswith(("cls.", "lm_head.", "head."))) or (
        name == "vocab_transform.weight"
    )


def _change(folder: Path, name: str, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("style", ["old", "new"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_pooling_strategies(strategy, activation, style, tmp_path):
    folder = write_splade(tmp_path / "model", style=style, strategy=strategy, activation=activation)
    expected = reference(folder, TEXTS)
    assert difference(weights(folder, TEXTS), expected) <= TOLERANCE
    edit_json(folder / "1_SpladePooling" / "config.json", pooling_strategy="sum" if strategy == "max" else "max")
    assert difference(weights(folder, TEXTS), expected) > VISIBLE


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("tokens", [1, 2, 7, 1000])
def test_chunks_change_nothing(tokens, strategy, tmp_path):
    folder = write_splade(tmp_path / "model", strategy=strategy)
    vocabulary = read_checkpoint(folder).config["vocab_size"]
    expected = weights(folder, TEXTS)
    assert difference(weights(folder, TEXTS, logits=tokens * vocabulary), expected) <= TOLERANCE


def test_no_more_logits_at_once_than_a_chunk(tmp_path):
    folder = write_splade(tmp_path / "model")
    checkpoint = read_checkpoint(folder)
    head = SpladeHead(build_masked_head(folder, checkpoint.config, CPU), "max", "relu", logits=5 * 400)
    seen: list[int] = []
    head.vocabulary.register_forward_hook(lambda module, inputs, logits: seen.append(logits.numel()))
    hidden, segments, ids = states(checkpoint, TEXTS)
    head.read(hidden, segments, ids)
    assert sum(seen) == segments.total * head.vocabulary.vocabulary  # each token once
    assert max(seen) <= 5 * 400
    assert len(seen) > 10


def test_a_plain_masked_language_model_is_a_splade_with_the_override(tmp_path):
    folder = write_checkpoint(tmp_path / "plain", wrapped=True)
    assert read_checkpoint(folder).layout.sparse is None
    named = {"architectures": ["BertSpladeSparseEmbeddingModel"]}
    assert read_checkpoint(folder, hf_overrides=named).layout.sparse == Splade(folder=folder)
    expected = reference(write_splade(tmp_path / "listed"), TEXTS)
    assert difference(weights(folder, TEXTS, **named), expected) <= TOLERANCE


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta"])
def test_an_untied_decoder_and_pickled_weights(family, tmp_path):
    """With untied weights, the vocabulary head is not the embedding table."""
    folder = write_splade(tmp_path / "model", family, config={"tie_word_embeddings": False})
    names = load_file(folder / "model.safetensors")
    decoder = next(name for name in names if name.endswith(("decoder.weight", "vocab_projector.weight")))
    tied = decoder, next(name for name in names if name.endswith("word_embeddings.weight"))
    assert not torch.equal(names[tied[0]], names[tied[1]])
    expected = reference(folder, TEXTS)
    assert difference(weights(folder, TEXTS), expected) <= TOLERANCE
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert difference(weights(folder, TEXTS), expected) <= TOLERANCE
    del names[decoder]
    torch.save(names, folder / "pytorch_model.bin")
    assert difference(weights(folder, TEXTS), expected) > VISIBLE


def test_older_names_of_the_norm(tmp_path):
    folder = write_splade(tmp_path / "model")
    expected = reference(folder, TEXTS)
    tensors = load_file(folder / "model.safetensors")
    older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, old in older.items():
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert difference(weights(folder, TEXTS), expected) <= TOLERANCE


# --- BGE-M3 -----------------------------------------------------------------------------------------------------------


def m3_reference(folder: Path, texts: tuple[str, ...]) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """(sparse [n, vocabulary], colbert n x [tokens - 1, d], dense [n, hidden]), one text at a time, token by token."""
    model = AutoModel.from_pretrained(folder, attn_implementation="eager", local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    layers = [torch.load(folder / f"{name}_linear.pt", weights_only=True) for name in ("sparse", "colbert")]
    lexical, vectors = ({key: tensor.float() for key, tensor in layer.items()} for layer in layers)
    special = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    sparse = np.zeros((len(texts), model.config.vocab_size), np.float32)
    colbert, dense = [], []
    for i, text in enumerate(texts):
        inputs = tokenizer(text, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**inputs).last_hidden_state[0]
            each = torch.relu(hidden @ lexical["weight"].T + lexical["bias"])[:, 0]
            rows = hidden[1:] @ vectors["weight"].T + vectors["bias"]
        for token, weight in zip(inputs["input_ids"][0].tolist(), each.tolist(), strict=True):
            if token not in special:
                sparse[i, token] = max(sparse[i, token], weight)
        colbert.append(torch.nn.functional.normalize(rows, dim=-1).numpy())
        dense.append(torch.nn.functional.normalize(hidden[0], dim=-1).numpy())
    return sparse, colbert, np.stack(dense)


def test_m3_weights(tmp_path):
    folder = write_m3(tmp_path / "model")
    texts = (*TEXTS, EXTREMES[1])
    expected = m3_reference(folder, texts)[0]
    assert difference(weights(folder, texts), expected) <= TOLERANCE
    layer = torch.load(folder / "sparse_linear.pt", weights_only=True)
    torch.save({**layer, "bias": layer["bias"] + 0.1}, folder / "sparse_linear.pt")
    assert difference(weights(folder, texts), expected) > VISIBLE


def test_m3_gives_special_tokens_no_weight(tmp_path):
    folder = write_m3(tmp_path / "model")
    layer = torch.load(folder / "sparse_linear.pt", weights_only=True)
    torch.save({**layer, "bias": layer["bias"] + 100}, folder / "sparse_linear.pt")  # every token gets a weight
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    actual = weights(folder, (*TEXTS, ""))
    unused = [tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id]
    assert (actual[:, unused] == 0).all()
    assert actual[-1].max() == 0  # special tokens only
    for row, text in zip(actual, TEXTS, strict=False):
        ids = set(tokenizer(text, truncation=True, max_length=MAX_TOKENS)["input_ids"])
        assert set(row.nonzero()[0].tolist()) == ids - set(unused)


@pytest.mark.parametrize("width", [48, 24])
def test_m3_vectors(width, tmp_path):
    folder = write_m3(tmp_path / "model", colbert_width=width)
    expected = m3_reference(folder, TEXTS)[1]
    checkpoint = read_checkpoint(folder)
    assert checkpoint.layout.token_vectors is not None
    head = build_token_vectors(checkpoint.layout.token_vectors, width=48, device=CPU)
    hidden, segments, _ = states(checkpoint, TEXTS)
    with torch.inference_mode():
        rows = torch.nn.functional.normalize(head(hidden), dim=-1).split(list(segments.lengths))
    for actual, text in zip(rows, expected, strict=True):
        assert np.abs(actual.numpy()[1:] - text).max() <= TOLERANCE
    assert np.abs(rows[1].numpy()[:-1] - expected[1]).max() > VISIBLE  # the first token is left out, not the last


def test_m3_is_recognized_by_its_files(tmp_path):
    folder = write_m3(tmp_path / "model")
    layout = read_checkpoint(folder).layout
    assert isinstance(layout.sparse, TokenWeights)
    digest = read_checkpoint(folder).digest()
    (folder / "colbert_linear.pt").unlink()
    assert read_checkpoint(folder).layout.token_vectors is None
    assert read_checkpoint(folder).digest() != digest
    (folder / "sparse_linear.pt").unlink()
    assert read_checkpoint(folder).layout.sparse is None


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "fields", "match"),
    [
        ("1_SpladePooling/config.json", {"pooling_strategy": "mean"}, "pooling_strategy 'mean'.*max, sum"),
        ("1_SpladePooling/config.json", {"activation_function": "gelu"}, "activation_function 'gelu'"),
        ("sentence_bert_config.json", {"transformer_task": "feature-extraction"}, "must be 'fill-mask'"),
    ],
)
def test_settings_that_millpond_does_not_know(file, fields, match, tmp_path):
    folder = write_splade(tmp_path / "model")
    edit_json(folder / file, **fields)
    with pytest.raises(ModelLoadError, match=match):
        read_checkpoint(folder)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", ["Router", "SparseStaticEmbedding", "SparseAutoEncoder"])
def test_other_sparse_modules_are_refused_by_name(name, place, tmp_path):
    folder = write_splade(tmp_path / "model")
    modules = (folder / "modules.json").read_text()
    old = ("Transformer", "SpladePooling")[place]
    changed = modules.replace(f'.{old}"', f'.{name}"')
    assert changed != modules
    (folder / "modules.json").write_text(changed)
    with pytest.raises(ModelLoadError, match=rf"{name}\b.*millpond"):
        read_checkpoint(folder)


def test_a_backbone_without_its_language_model(tmp_path):
    folder = write_splade(tmp_path / "model")
    drop_tensor(folder, "cls.predictions.transform.dense.weight")
    with pytest.raises(WeightMismatchError, match=r"cls\.predictions\.transform\.dense\.weight.*no masked language"):
        weights(folder, TEXTS)


def test_a_head_that_does_not_fit(tmp_path):
    folder = write_splade(tmp_path / "model")
    _change(folder, "cls.predictions.bias", lambda tensor: tensor[:-1])
    with pytest.raises(WeightMismatchError, match="decoder_bias"):
        build_masked_head(folder, read_checkpoint(folder).config, CPU)


def test_a_family_without_a_known_head(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "llama")
    with pytest.raises(UnsupportedArchitectureError, match="model_type 'llama'.*bert"):
        build_masked_head(folder, read_checkpoint(folder).config, CPU)


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        ({"weight": torch.ones(1, 40)}, r"\(1, 40\).*48 wide"),
        ({"weight": torch.ones(2, 48)}, "must give 1"),
        ({"kernel": torch.ones(1, 48)}, "missing"),
        ({"weight": torch.ones(1, 48), "scale": torch.ones(1)}, "does not hold a linear layer"),
    ],
)
def test_a_layer_of_m3_that_does_not_fit(layer, match, tmp_path):
    folder = write_m3(tmp_path / "model")
    torch.save(layer, folder / "sparse_linear.pt")
    with pytest.raises(WeightMismatchError, match=match):
        weights(folder, TEXTS)


def test_a_layer_of_m3_that_is_damaged_or_code(tmp_path):
    folder = write_m3(tmp_path / "model")
    torch.save({"weight": print}, folder / "sparse_linear.pt")
    with pytest.raises(ModelLoadError, match="damaged"):
        weights(folder, TEXTS)
    (folder / "sparse_linear.pt").write_bytes(b"no tensors")
    with pytest.raises(ModelLoadError, match="damaged"):
        weights(folder, TEXTS)


def test_m3_without_the_ids_of_its_special_tokens(tmp_path):
    folder = write_m3(tmp_path / "model")
    edit_json(folder / "tokenizer.json", added_tokens=[])
    with pytest.raises(ModelLoadError, match="added token"):
        read_checkpoint(folder)
