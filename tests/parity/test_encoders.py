"""Relatives of BERT in both backends against transformers' classes on a padded batch; likely mistakes must show."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.head_oracles import classifier
from tests.parity.test_backbones import SHORT, TOLERANCE, VISIBLE, difference, ids_of, states
from tests.tiny import MAX_TOKENS, TEXTS, edit_json, write_checkpoint
from tokenizers import Tokenizer
from transformers import AutoModel

from millpond import Engine
from millpond.errors import ModelLoadError, UnsupportedArchitectureError

BACKENDS = ("native", "torch")


def padded(
    folder: Path, texts: Sequence[str], change: Callable[[Any], Any] = lambda model: None, *, limit: int = MAX_TOKENS
) -> list[np.ndarray]:
    """The states of transformers' class, from all texts in one padded batch.

    ``change`` may change the loaded model, and returns more arguments of a call, if any.
    """
    model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        given = change(model) or {}
        ids = ids_of(folder, texts, limit)
        batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=model.config.pad_token_id)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        hidden = model(input_ids=batch, attention_mask=mask, **given).last_hidden_state
    return [rows[: len(row)].numpy() for rows, row in zip(hidden, ids, strict=True)]


def _from_zero(model: Any) -> dict[str, torch.Tensor]:
    return {"position_ids": torch.arange(MAX_TOKENS)[None]}


def _without_task(model: Any) -> None:
    model.embeddings.task_type_embeddings.weight.zero_()


def _without_last_norm(name: str) -> Callable[[Any], None]:
    return lambda model: setattr(model.encoder, name, torch.nn.Identity())


def _halves(model: Any) -> None:
    """As if the first half of a head's columns and the second were pairs."""
    heads = model.config.num_attention_heads
    for layer in model.encoder.layer:
        for part in (layer.attention.self.query, layer.attention.self.key):
            for tensor in (part.weight, part.bias):
                halves = tensor.view(heads, 2, -1, *tensor.shape[1:])
                tensor.copy_(halves.transpose(1, 2).reshape(tensor.shape).clone())


def _split_in_three(model: Any) -> None:
    """As if all queries came first, then all keys, then all values."""
    heads = model.config.num_attention_heads
    for layer in model.encoder.layer:
        weight = layer.attention.self.in_proj.weight
        weight.copy_(weight.view(3, heads, -1, weight.shape[1]).transpose(0, 1).reshape(weight.shape).clone())


def _without_projection_bias(model: Any) -> None:
    model.encoder.embedding_hidden_mapping_in.bias.zero_()


def _modernberts_angles(model: Any) -> None:
    """As if its windows had the base of ModernBERT's."""
    rotary = model.rotary_emb
    rotary.sliding_attention_inv_freq = 1 / 10_000.0 ** (torch.arange(0, 12, 2) / 12)


def _whole_windows(model: Any) -> None:
    """As if the window were on each side, not half of it."""
    for i, layer in enumerate(model.encoder.layer):
        layer.attention.self.one_sided_attn_window_size = model.config.attention_window[i]
    model.config.attention_window = [2 * window for window in model.config.attention_window]


def _other_activation(model: Any) -> None:
    for layer in model.encoder.layer:
        layer.intermediate.intermediate_act_fn = torch.nn.ReLU()


def _unordered_trigrams(model: Any) -> None:
    """As if the word before came first."""
    weight = model.embeddings.embedding_transformation.weight
    weight.copy_(torch.cat(weight.chunk(3, 1)[::-1], 1).clone())


# The likely mistake of each family.
MISTAKES: dict[str, Callable[[Any], Any]] = {
    "ernie": _without_task,
    "camembert": _from_zero,
    "data2vec": _from_zero,
    "megatron": _without_last_norm("ln"),
    "xlm-roberta-xl": _without_last_norm("LayerNorm"),
    "mmbert": _modernberts_angles,
    "deberta": _split_in_three,
    "roformer": _halves,
    "longformer": _whole_windows,
    "big-bird": _other_activation,
    "mobilebert": _unordered_trigrams,
    "rembert": _without_projection_bias,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", MISTAKES)
def test_a_family_equals_transformers(family, backend, plain, record_property):
    folder = plain(family)
    with Engine(folder, dtype="float32", device="cpu", backend=backend) as engine:
        found = states(engine, TEXTS)
    # To MobileBERT a padding token is the last token's neighbour, so transformers' result depends on the batch.
    batches = [[text] for text in TEXTS] if family == "mobilebert" else [TEXTS]
    worst = difference(found, [rows for texts in batches for rows in padded(folder, texts)])
    record_property("error", worst)
    assert worst <= TOLERANCE
    texts = [max(TEXTS, key=len)]  # of MAX_TOKENS tokens
    with Engine(folder, dtype="float32", device="cpu", backend=backend) as engine:
        assert difference(states(engine, texts), padded(folder, texts, MISTAKES[family])) > VISIBLE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["megatron", "xlm-roberta-xl", "roformer"])
def test_bfloat16_points_the_same_way(family, backend, plain):
    folder = plain(family)
    with Engine(folder, dtype="bfloat16", device="cpu", backend=backend) as engine:
        found = np.concatenate(states(engine, TEXTS))
    expected = np.concatenate(padded(folder, TEXTS))
    cosine = (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosine.mean() >= 0.999
    assert cosine.min() >= 0.99


@pytest.mark.parametrize("backend", BACKENDS)
def test_ernie_without_tasks(backend, tmp_path):
    """ERNIE 1 has no table of them."""
    folder = write_checkpoint(tmp_path / "model", "ernie", config={"use_task_id": False})
    with Engine(folder, dtype="float32", device="cpu", backend=backend) as engine:
        assert difference(states(engine, SHORT), padded(folder, SHORT)) <= TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
def test_far_positions_of_roformer(backend, tmp_path):
    """Its angles are not rounded, which shows where they are large."""
    texts = [" ".join(TEXTS) * 4, "a"]
    config = {"max_position_embeddings": 1536}
    folder = write_checkpoint(tmp_path / "model", "roformer", config=config, tokenizer_limit=1536)
    expected = padded(folder, texts, limit=1536)
    assert len(expected[0]) > 1000
    with Engine(folder, dtype="float32", device="cpu", backend=backend) as engine:
        assert difference(states(engine, texts), expected) <= TOLERANCE


DEBERTA: dict[str, dict[str, Any]] = {
    "content to position": {"pos_att_type": ["c2p"]},
    "position to content": {"pos_att_type": "p2c"},
    "distances cut": {"max_relative_positions": 20},
    "positions in the input too": {"position_biased_input": True, "type_vocab_size": 2},
    "no distances": {"relative_attention": False, "position_biased_input": True},
}


@pytest.mark.parametrize("form", DEBERTA)
def test_forms_of_deberta(form, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "deberta", config=DEBERTA[form])
    expected = padded(folder, SHORT)
    for backend in BACKENDS:
        with Engine(folder, dtype="float32", device="cpu", backend=backend) as engine:
            assert difference(states(engine, SHORT), expected) <= TOLERANCE


def test_deberta_has_no_longest_text(tmp_path):
    """It has distances only, and all beyond the table's are the same."""
    texts = [" ".join(TEXTS), "a"]
    folder = write_checkpoint(tmp_path / "model", "deberta", tokenizer_limit=None)
    expected = padded(folder, texts, limit=1024)
    assert len(expected[0]) > 200
    for backend in BACKENDS:
        with Engine(folder, dtype="float32", device="cpu", backend=backend, max_length=1024) as engine:
            assert difference(states(engine, texts), expected) <= TOLERANCE


@pytest.mark.parametrize("field", [{"talking_head": True}, {"pos_att_type": "c2p|p2p"}])
def test_an_unknown_form_of_deberta_is_refused(field, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "deberta", config=field)
    with pytest.raises(UnsupportedArchitectureError, match=f"{next(iter(field))} .* does not run for DeBERTa v1"):
        Engine(folder, device="cpu")


def test_global_attention_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "longformer", head="SequenceClassification")
    with pytest.raises(UnsupportedArchitectureError, match="LongformerForSequenceClassification, whose first token .*"):
        Engine(folder, device="cpu")


def test_windows_of_longformer(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "longformer")
    edit_json(folder / "config.json", attention_window=[8, 7])
    with pytest.raises(ModelLoadError, match="attention_window is .* must be an even number"):
        Engine(folder, device="cpu")


BIG_BIRDS: dict[str, dict[str, Any]] = {
    "scaled": {"rescale_embeddings": True},
    "unbiased": {"use_bias": False},
    "whole": {"attention_type": "original_full", "block_size": 1},
    "blocks": {"block_size": 2, "num_random_blocks": 1},
}


@pytest.mark.parametrize("form", BIG_BIRDS)
def test_forms_of_big_bird(form, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "big-bird", config=BIG_BIRDS[form])
    longest = 14 if form == "blocks" else MAX_TOKENS
    expected = padded(folder, TEXTS, lambda model: model.set_attention_type("original_full"), limit=longest)
    for backend in BACKENDS:
        with Engine(folder, dtype="float32", device="cpu", backend=backend) as engine:
            assert engine.spec.max_length == longest
            assert difference(states(engine, TEXTS), expected) <= TOLERANCE


def test_a_text_that_big_bird_does_not_attend_to_as_a_whole(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "big-bird", config=BIG_BIRDS["blocks"])
    with pytest.raises(ModelLoadError, match=r"max_length=15 is more than .* attends to as a whole.* choose 1 to 14"):
        Engine(folder, device="cpu", max_length=15)


PAIRS = (
    *("ernie", "camembert", "data2vec", "deberta", "megatron", "xlm-roberta-xl", "roformer", "rembert", "mobilebert"),
    *("big-bird", "mmbert"),
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", PAIRS)
def test_scores_of_pairs(family, backend, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family, head="SequenceClassification", labels=1)
    reference, tokenizer = classifier(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    pairs = [tokenizer.encode(text, SHORT[-1]) for text in SHORT[:3]]
    typed = family in ("ernie", "megatron", "roformer", "mobilebert")  # the tokenizers of others return no types
    types = [torch.tensor(pair.type_ids) if typed else None for pair in pairs]
    rows = [torch.tensor(pair.ids) for pair in pairs]
    expected = np.array([reference(ids, kinds).item() for ids, kinds in zip(rows, types, strict=True)])
    with Engine(folder, dtype="float32", device="cpu", backend=backend) as engine:
        found = engine.score(SHORT[:3], [SHORT[-1]] * 3, activation="identity").scores
    assert np.abs(np.array(found) - expected).max() <= TOLERANCE * np.abs(expected).max()
    if typed:  # the types of a pair count
        other = np.array([reference(ids).item() for ids in rows])
        assert np.abs(other - expected).max() > VISIBLE


@pytest.mark.parametrize("active", [True, False])
def test_mobilebert_classifies_with_or_without_its_pooler(active, tmp_path):
    folder = write_checkpoint(
        tmp_path / "model", "mobilebert", head="SequenceClassification", config={"classifier_activation": active}
    )
    reference = classifier(folder)
    expected = np.stack([reference(ids).numpy() for ids in ids_of(folder, SHORT)])
    for backend in BACKENDS:
        with Engine(folder, dtype="float32", device="cpu", backend=backend) as engine:
            found = np.stack(engine.classify(SHORT, activation="identity").probs)
        assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_other_forms_of_mobilebert_are_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "mobilebert")
    edit_json(folder / "config.json", normalization_type="layer_norm")
    with pytest.raises(UnsupportedArchitectureError, match="normalization_type 'layer_norm', .*only 'no_norm'"):
        Engine(folder, device="cpu")


def with_distances(folder: Path, texts: Sequence[str], *, kinds: str, swapped: bool = False) -> list[np.ndarray]:
    """BERT with embeddings of distances (arXiv:2009.13658, methods 3 and 4), which transformers 5 no longer has.

    ``swapped``: as if the distance were the key's place less the query's.
    """
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    weights, heads = load_file(folder / "model.safetensors"), config["num_attention_heads"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.layer_norm(
            x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], config["layer_norm_eps"]
        )

    def states_of(ids: torch.Tensor) -> np.ndarray:
        tables = (weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "token_type"))
        x = norm(sum(table[rows] for table, rows in zip(tables, (ids, ids * 0), strict=True)), "embeddings.LayerNorm")
        place = torch.arange(len(ids))
        apart = (place[:, None] - place) * (-1 if swapped else 1) + config["max_position_embeddings"] - 1
        for i in range(config["num_hidden_layers"]):
            layer = f"encoder.layer.{i}"
            q, k, v = (
                linear(x, f"{layer}.attention.self.{part}").unflatten(1, (heads, -1)).transpose(0, 1)
                for part in ("query", "key", "value")
            )
            by_distance = weights[f"{layer}.attention.self.distance_embedding.weight"][apart]  # [query, key, dim]
            scores = q @ k.transpose(1, 2) + torch.einsum("hqd,qkd->hqk", q, by_distance)
            if kinds == "relative_key_query":
                scores = scores + torch.einsum("hkd,qkd->hqk", k, by_distance)
            mixed = (scores / q.shape[-1] ** 0.5).softmax(-1) @ v
            mixed = mixed.transpose(0, 1).flatten(1)
            x = norm(x + linear(mixed, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
            inner = torch.nn.functional.gelu(linear(x, f"{layer}.intermediate.dense"))
            x = norm(x + linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        return x.numpy()

    return [states_of(ids) for ids in ids_of(folder, texts)]


def write_with_distances(folder: Path, family: str, kinds: str) -> Path:
    """A checkpoint of transformers 4, which has a table of absolute positions all the same."""
    from safetensors.numpy import load_file
    from tests.tiny.layouts import save_weights
    from tests.tiny.noise import Noise

    write_checkpoint(folder, family, config={"position_embedding_type": kinds})
    tensors, noise = load_file(folder / "model.safetensors"), Noise(5)
    for i in range(2):
        tensors[f"encoder.layer.{i}.attention.self.distance_embedding.weight"] = noise.normal(2 * 64 - 1, 12)
    save_weights(tensors, folder)
    return folder


@pytest.mark.parametrize("kinds", ["relative_key", "relative_key_query"])
def test_embeddings_of_distances(kinds, tmp_path):
    folder = write_with_distances(tmp_path / "model", "bert", kinds)
    expected = with_distances(folder, TEXTS, kinds=kinds)
    other = "relative_key" if kinds != "relative_key" else "relative_key_query"
    for backend in BACKENDS:
        with Engine(folder, dtype="float32", device="cpu", backend=backend) as engine:
            found = states(engine, TEXTS)
        assert difference(found, expected) <= TOLERANCE
        assert difference(found, with_distances(folder, TEXTS, kinds=kinds, swapped=True)) > VISIBLE
        assert difference(found, with_distances(folder, TEXTS, kinds=other)) > VISIBLE


def test_rotated_values_are_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "roformer", config={"rotary_value": True})
    with pytest.raises(UnsupportedArchitectureError, match="rotary_value true .* does not run for RoFormer"):
        Engine(folder, device="cpu")
