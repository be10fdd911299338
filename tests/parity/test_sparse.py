"""Sparse weights compared with sentence-transformers' SparseEncoder, and BGE-M3's with a formula in this file."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tests.parity.comparison import TOLERANCE, VISIBLE
from tests.parity.oracles import oracle, without_mask
from tests.tiny import MAX_TOKENS, TEXTS, drop_tensor, edit_json, write_checkpoint
from tests.tiny.heads import write_m3, write_splade
from transformers import AutoModel, AutoTokenizer

from millpond import Engine
from millpond.errors import ModelLoadError, UnsupportedArchitectureError, WeightMismatchError

hub_m3 = partial(write_m3, weights="bin")
FAMILIES = (
    *("bert", "distilbert", "roberta", "xlm-roberta", "camembert", "mpnet", "modernbert", "mmbert"),
    *("ernie", "data2vec", "megatron", "xlm-roberta-xl", "roformer", "rembert", "longformer", "big-bird"),
)
# A text of one token, and one of the maximum length.
EXTREMES = ("", " ".join(["deep"] * 2 * MAX_TOKENS))


def load(folder: Path, **overrides: Any) -> Engine:
    return Engine(folder, dtype="float32", device="cpu", hf_overrides=overrides or None)


def weights(folder: Path, texts: tuple[str, ...], **overrides: Any) -> np.ndarray:
    """Dense weights ``[n, vocabulary]`` of the checkpoint."""
    with load(folder, **overrides) as engine:
        rows = engine.encode(texts, task="sparse_embed").embeddings
    dense = np.zeros((len(texts), json.loads((folder / "config.json").read_text())["vocab_size"]), np.float32)
    for row, found in zip(dense, rows, strict=True):
        assert all(weight > 0 for weight in found.values())
        row[list(found.keys())] = list(found.values())
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


def write_csr(folder: Path, *, normalize: bool, heads: bool, most: int | None = None) -> Path:
    """CSR, saved by sentence-transformers."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder

    transformer = Transformer(str(write_checkpoint(folder.parent / "source", "bert")))
    torch.manual_seed(3)
    code = SparseAutoEncoder(48, hidden_dim=96, k=12, normalize=normalize)
    code.encoder.weight.data.normal_(std=0.5)
    code.pre_bias.data.normal_(std=0.3)
    code.latent_bias.data.normal_(std=0.1)
    modules = [transformer, Pooling(48, pooling_mode="mean"), *([Normalize()] if heads else []), code]
    SparseEncoder(modules=modules, device="cpu", max_active_dims=most).save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(("normalize", "heads", "most"), [(False, False, None), (True, False, None), (False, True, 5)])
def test_a_sparse_autoencoder(normalize, heads, most, backend, tmp_path, record_property):
    folder = write_csr(tmp_path / "model", normalize=normalize, heads=heads, most=most)
    expected = reference(folder, TEXTS)
    with Engine(folder, dtype="float32", device="cpu", backend=backend) as engine:
        assert engine.tasks == {"sparse_embed"}
        found = engine.sparse_embed(TEXTS).embeddings
    assert {len(entries) for entries in found} == {most or 12}
    actual = np.zeros((len(TEXTS), 96), np.float32)
    for row, entries in zip(actual, found, strict=True):
        assert list(entries) == sorted(entries)
        row[list(entries)] = list(entries.values())
    worst = difference(actual, expected)
    record_property("error", worst)
    assert worst <= TOLERANCE
    number = 3 if heads else 2
    edit_json(folder / f"{number}_SparseAutoEncoder" / "config.json", normalize=not normalize)
    assert difference(reference(folder, TEXTS), expected) > VISIBLE
    with Engine(folder, dtype="float32", device="cpu", backend=backend, convert="embed") as engine:
        assert engine.spec.dimensions == 48  # the vectors that the code is of


def test_the_largest_entries_alone(tmp_path):
    """max_active_dims of config_sentence_transformers.json."""
    folder = write_splade(tmp_path / "model")
    whole = weights(folder, TEXTS)
    edit_json(folder / "config_sentence_transformers.json", max_active_dims=7)
    expected = reference(folder, TEXTS)
    actual = weights(folder, TEXTS)
    assert difference(actual, expected) <= TOLERANCE
    assert (actual > 0).sum(1).max() == 7
    assert difference(whole, expected) > VISIBLE
    edit_json(folder / "config_sentence_transformers.json", max_active_dims=0)
    with pytest.raises(ModelLoadError, match="max_active_dims is 0; it must be a positive int"):
        load(folder)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_gte_s_masked_language_model(backend, tied, tmp_path, record_property):
    """opensearch-neural-sparse-encoding-doc-v3-gte: the head of the original code, ``lm_head.norm`` and all."""
    own = {"AutoModelForMaskedLM": "Alibaba-NLP/new-impl--modeling.NewForMaskedLM"}
    config = {"tie_word_embeddings": tied, "auto_map": own}
    folder = write_splade(tmp_path / "model", "gte", activation="log1p_relu", config=config)
    tensors, states = load_file(folder / "model.safetensors"), oracle(folder)
    decoder = tensors.get("lm_head.decoder.weight", tensors["new.embeddings.word_embeddings.weight"])
    assert tied == ("lm_head.decoder.weight" not in tensors)

    @torch.inference_mode()
    def expected(activation: Callable[[torch.Tensor], torch.Tensor]) -> np.ndarray:
        rows = []
        for text in TEXTS:
            hidden = states(torch.tensor(tokenizer(text, truncation=True)["input_ids"]))
            hidden = activation(F.linear(hidden, tensors["lm_head.dense.weight"], tensors["lm_head.dense.bias"]))
            norm = tensors["lm_head.norm.weight"], tensors["lm_head.norm.bias"]
            hidden = F.layer_norm(hidden, hidden.shape[-1:], *norm, 1e-12)
            logits = F.linear(hidden, decoder, tensors["lm_head.decoder.bias"])
            rows.append(logits.relu().log1p().log1p().amax(0))
        return torch.stack(rows).numpy()

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with Engine(folder, dtype="float32", device="cpu", backend=backend) as engine:
        found = engine.sparse_embed(TEXTS).embeddings
    actual = np.zeros((len(TEXTS), len(decoder)), np.float32)
    for row, entries in zip(actual, found, strict=True):
        row[list(entries)] = list(entries.values())
    worst = difference(actual, expected(F.gelu))
    record_property("error", worst)
    assert worst <= TOLERANCE
    assert difference(actual, expected(torch.tanh)) > VISIBLE


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_language_model_s_head(bidirectional, strategy, backend, tmp_path, record_property):
    """Qwen3: the logits of a head without projection and norm; many texts, some longer than a piece."""
    folder = write_splade(tmp_path / "model", "qwen3", strategy=strategy, config={"tie_word_embeddings": False})
    tensors, (without, causal) = load_file(folder / "model.safetensors"), without_mask(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = (*TEXTS, *EXTREMES[1:])

    @torch.inference_mode()
    def expected(states: Callable[[torch.Tensor], torch.Tensor], head: str) -> np.ndarray:
        rows = []
        for text in texts:
            ids = torch.tensor(tokenizer(text, truncation=True, max_length=MAX_TOKENS)["input_ids"])
            logits = F.linear(states(ids), tensors[head]).relu().log1p()
            rows.append(logits.amax(0) if strategy == "max" else logits.sum(0))
        return torch.stack(rows).numpy()

    overrides = {"is_causal": False} if bidirectional else None
    with Engine(folder, dtype="float32", device="cpu", backend=backend, hf_overrides=overrides) as engine:
        assert engine.tasks == {"sparse_embed"}
        found = engine.sparse_embed(texts).embeddings
    actual = np.zeros((len(texts), len(tensors["lm_head.weight"])), np.float32)
    for row, entries in zip(actual, found, strict=True):
        row[list(entries)] = list(entries.values())
    right, wrong = (without, causal) if bidirectional else (causal, without)
    worst = difference(actual, expected(right, "lm_head.weight"))
    record_property("error", worst)
    assert worst <= TOLERANCE
    assert difference(actual, expected(wrong, "lm_head.weight")) > VISIBLE
    assert difference(actual, expected(right, "model.embed_tokens.weight")) > VISIBLE


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


def test_a_plain_masked_language_model_is_a_splade_with_the_override(tmp_path):
    folder = write_checkpoint(tmp_path / "plain", wrapped=True)
    with load(folder) as engine:
        assert "sparse_embed" not in engine.tasks
    expected = reference(write_splade(tmp_path / "listed"), TEXTS)
    actual = weights(folder, TEXTS, architectures=["BertSpladeSparseEmbeddingModel"])
    assert difference(actual, expected) <= TOLERANCE


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
    folder = hub_m3(tmp_path / "model")
    texts = (*TEXTS, EXTREMES[1])
    expected = m3_reference(folder, texts)[0]
    assert difference(weights(folder, texts), expected) <= TOLERANCE
    layer = torch.load(folder / "sparse_linear.pt", weights_only=True)
    torch.save({**layer, "bias": layer["bias"] + 0.1}, folder / "sparse_linear.pt")
    assert difference(weights(folder, texts), expected) > VISIBLE


def test_m3_gives_special_tokens_no_weight(tmp_path):
    folder = hub_m3(tmp_path / "model")
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
    folder = hub_m3(tmp_path / "model", colbert_width=width)
    expected = m3_reference(folder, TEXTS)[1]
    with load(folder) as engine:
        rows = engine.token_embed(TEXTS, normalize=True).embeddings
    for actual, text in zip(rows, expected, strict=True):  # of every token but the first
        assert np.abs(actual - text).max() <= TOLERANCE


def test_m3_is_recognized_by_its_files(tmp_path):
    folder = hub_m3(tmp_path / "model")
    with load(folder) as engine:
        assert "sparse_embed" in engine.tasks
    (folder / "sparse_linear.pt").unlink()
    with load(folder) as engine:
        assert "sparse_embed" not in engine.tasks


# --- Refusals ---------------------------------------------------------------------------------------------------------


def change(file: str, **fields: Any) -> Callable[[Path], Any]:
    return lambda folder: edit_json(folder / file, **fields)


def module(old: str, new: str) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        modules = (folder / "modules.json").read_text()
        assert f'.{old}"' in modules
        (folder / "modules.json").write_text(modules.replace(f'.{old}"', f'.{new}"'))

    return edit


def layer(content: Any) -> Callable[[Path], Any]:
    return lambda folder: torch.save(content, folder / "sparse_linear.pt")


POOLING = "1_SpladePooling/config.json"
OTHERS = ("Router", "SparseStaticEmbedding")
HEADLESS = "cls.predictions.transform.dense.weight"


@pytest.mark.parametrize(
    ("error", "write", "edit", "match"),
    [
        (ModelLoadError, write_splade, change(POOLING, pooling_strategy="mean"), "pooling_strategy 'mean'.*max, sum"),
        (ModelLoadError, write_splade, change(POOLING, activation_function="gelu"), "activation_function 'gelu'"),
        (
            ModelLoadError,
            write_splade,
            change("sentence_bert_config.json", transformer_task="feature-extraction"),
            "must be 'fill-mask'",
        ),
        *(
            (ModelLoadError, write_splade, module(old, new), rf"{new}\b.*millpond")
            for old in ("Transformer", "SpladePooling")
            for new in OTHERS
        ),
        (WeightMismatchError, write_splade, lambda folder: drop_tensor(folder, HEADLESS), "no masked language"),
        (
            WeightMismatchError,
            write_splade,
            lambda folder: _change(folder, "cls.predictions.bias", lambda tensor: tensor[:-1]),
            "decoder_bias",
        ),
        (WeightMismatchError, hub_m3, layer({"weight": torch.ones(1, 40)}), r"\(1, 40\).*48 wide"),
        (WeightMismatchError, hub_m3, layer({"weight": torch.ones(2, 48)}), "must give 1"),
        (WeightMismatchError, hub_m3, layer({"kernel": torch.ones(1, 48)}), "missing"),
        (
            WeightMismatchError,
            hub_m3,
            layer({"weight": torch.ones(1, 48), "scale": torch.ones(1)}),
            "does not hold a linear layer",
        ),
        (ModelLoadError, hub_m3, layer({"weight": print}), "damaged"),
        (ModelLoadError, hub_m3, lambda folder: (folder / "sparse_linear.pt").write_bytes(b"none"), "damaged"),
        (ModelLoadError, hub_m3, change("tokenizer.json", added_tokens=[]), "added token"),
    ],
)
def test_a_sparse_checkpoint_is_refused(error, write, edit, match, tmp_path):
    folder = write(tmp_path / "model")
    edit(folder)
    with pytest.raises(error, match=match):
        load(folder)


def test_a_family_without_a_known_head(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "llama", wrapped=True)
    with pytest.raises(UnsupportedArchitectureError, match="model_type 'llama'.*bert"):
        load(folder, architectures=["LlamaSpladeSparseEmbeddingModel"])
