"""Packed rows compared with transformers' classes, one text at a time; and mistakes that the comparison must detect."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.oracles import oracle
from tests.tiny import FAMILIES, MAX_TOKENS, TEXTS, write_checkpoint
from tests.tiny.families import some

from millpond import Engine
from millpond.attention import dense, matmul_attention, sdpa
from millpond.attention.segments import Segments
from millpond.checkpoints import architectures
from millpond.checkpoints.architectures import ARCHITECTURES, find
from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.engine.execute.batch import DeviceBatch
from millpond.engine.execute.runner import Runner
from millpond.models import encoder, load

TOLERANCE = 1e-5  # relative to the largest value of a text's states
VISIBLE = 1e-3  # a mistake must change the states by more than this
SHORT = tuple(text for text in TEXTS if len(text) < 130)

ROBERTA_LIKE = ("roberta", "xlm-roberta", "mpnet")
COUNTED = ("bert", "distilbert", "electra", "albert", "gpt2")  # positions in a learned table, from 0
DISTANCES = ("deberta-v2",)  # own attention over distances, no absolute positions
NO_POSITIONS = ("jamba",)
ROTARY = tuple(family for family in FAMILIES if family not in (*ROBERTA_LIKE, *COUNTED, *DISTANCES, *NO_POSITIONS))
SHARED = tuple(
    family for family in FAMILIES if family not in DISTANCES
)  # families that use the shared attention kernels
DECODERS = tuple(family for family, row in FAMILIES.items() if row.head == "ForCausalLM")
WINDOWED = ("modernbert", "mistral-sliding", "qwen2-sliding", "gemma2", "gemma3", "gemma3-bidirectional")
GROUPED = tuple(family for family in DECODERS if family != "gemma")  # gemma has one key and value head

UNREAD = ("position_ids", "attn.bias")  # buffers of older files

Matrices = Sequence[np.ndarray]


@pytest.fixture(scope="module")
def alone(plain: Callable[[str], Path]) -> Callable[..., Matrices]:
    """transformers' states of each text alone: eager attention, float32, no packing, no padding."""
    models: dict[str, Any] = {}
    states: dict[tuple[str, str], np.ndarray] = {}

    @torch.inference_mode()
    def state(family: str, text: str) -> np.ndarray:
        if family not in models:
            models[family] = oracle(plain(family))
        return models[family](_ids(plain(family), [text])[0]).numpy()

    def alone(family: str, texts: Sequence[str]) -> Matrices:
        for text in texts:
            if (family, text) not in states:
                states[family, text] = state(family, text)
        return [states[family, text] for text in texts]

    return alone


def difference(matrices: Matrices, expected: Matrices) -> float:
    """The largest difference over all texts, relative to the largest value of the text's expected states."""
    assert [matrix.shape for matrix in matrices] == [matrix.shape for matrix in expected]
    return max(
        float(np.abs(matrix - other).max() / np.abs(other).max())
        for matrix, other in zip(matrices, expected, strict=True)
    )


def states(engine: Engine, texts: Sequence[str]) -> list[np.ndarray]:
    return list(engine.token_embed(texts, normalize=False).embeddings)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_equals_transformers_one_text_at_a_time(family, engine_of, alone, record_property):
    expected = alone(family, TEXTS)
    lengths = [len(matrix) for matrix in expected]
    assert min(lengths) <= 3
    assert lengths.count(MAX_TOKENS) >= 2
    worst = difference(states(engine_of(family), TEXTS), expected)
    record_property("error", worst)
    assert worst <= TOLERANCE


@pytest.mark.parametrize("family", some())
def test_a_text_does_not_depend_on_its_batch(family, engine_of):
    engine = engine_of(family)
    vectors = engine.embed(TEXTS).embeddings
    assert np.abs(vectors - np.concatenate([engine.embed([text]).embeddings for text in TEXTS])).max() <= 1e-6
    batch = states(engine, TEXTS)
    one_by_one = [states(engine, [text])[0] for text in TEXTS]
    worst = difference(batch, one_by_one)
    assert worst <= TOLERANCE
    order = random.Random(3).sample(range(len(TEXTS)), len(TEXTS))
    for budget in (1, 90):  # every text by itself, and two or three together
        again = states(engine_of(family, max_batch_tokens=budget), [TEXTS[i] for i in order])
        worst = difference([again[order.index(i)] for i in range(len(TEXTS))], batch)
        assert worst <= TOLERANCE


@pytest.mark.parametrize("family", some())
def test_half_precision_points_the_same_way(family, engine_of, alone):
    """These large random weights amplify rounding more than trained ones; a mistake changes the direction far more."""
    actual = np.concatenate(states(engine_of(family, dtype="bfloat16"), TEXTS))
    expected = np.concatenate(alone(family, TEXTS))
    cosine = (actual * expected).sum(1) / np.linalg.norm(actual, axis=1) / np.linalg.norm(expected, axis=1)
    jamba = (
        family == "jamba"
    )  # whose scan adds up in bfloat16, and whose router may choose otherwise, in transformers too
    assert cosine.mean() >= (0.995 if jamba else 0.999)
    assert cosine.min() >= (0.95 if jamba else 0.99)


# MPNet's own class takes no attention function: it adds its relative bias to the scores itself, and knows no segments.
@pytest.mark.parametrize(
    "family", some(row.model_type for row in ARCHITECTURES if row.encoder and row.model_type != "mpnet")
)
def test_transformers_own_class_on_packed_rows_is_equal(family, plain, alone):
    """Families without a forward in millpond run this way, and it is the reference of millpond's forwards."""
    checkpoint = read_checkpoint(plain(family))
    row = find(checkpoint.config, family)
    device = torch.device("cpu")
    backbone = load.load_backbone(checkpoint, row, device=device, dtype=torch.float32, packed=False)
    assert not isinstance(backbone, encoder.PackedEncoder)
    expected = alone(family, SHORT)
    ids = _ids(plain(family), SHORT)
    lengths = [len(one) for one in ids]
    positions = torch.cat([torch.arange(length) for length in lengths])[None] + row.position_offset(checkpoint.config)
    with torch.inference_mode():
        packed = backbone(
            input_ids=torch.cat(ids)[None], position_ids=positions, segments=Segments.of(lengths)
        ).last_hidden_state[0]
    worst = difference([part.numpy() for part in packed.split(lengths)], expected)
    assert worst <= TOLERANCE


def test_mpnets_relative_bias_at_distances_of_every_bucket(tmp_path):
    """Its buckets reach distances of 128 tokens, more than the other texts here have."""
    from transformers import AutoModel, AutoTokenizer

    texts = [" ".join(TEXTS), "a", " ".join(TEXTS[1:3])]
    folder = write_checkpoint(tmp_path / "mpnet", "mpnet", config={"max_position_embeddings": 402}, tokenizer_limit=400)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reference = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = [reference(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy() for text in texts]
    assert max(map(len, expected)) > 256
    with Engine(folder, dtype="float32", device="cpu") as engine:
        worst = difference(states(engine, texts), expected)
    assert worst <= TOLERANCE


@pytest.mark.parametrize("family", some())
def test_a_language_model_gives_its_backbone(family, engine_of, tmp_path):
    """``*ForCausalLM`` and ``*ForMaskedLM`` repositories: prefixed tensor names, and a head that is not loaded."""
    texts = SHORT[:3]
    folder = write_checkpoint(tmp_path / family, family, wrapped=True, seed=1)
    reference = oracle(folder)
    with torch.inference_mode():
        expected = [reference(ids).numpy() for ids in _ids(folder, texts)]
    with Engine(folder, dtype="float32", device="cpu") as engine:
        actual = states(engine, texts)
    worst, other = difference(actual, expected), difference(actual, states(engine_of(family), texts))
    assert worst <= TOLERANCE
    assert other > VISIBLE  # other weights, so this checkpoint's backbone was read


# --- Mistakes: each must change the states, or the tests above could not detect it. ----------------------------------


def _ids(folder: Path, texts: Sequence[str]) -> list[torch.Tensor]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return [torch.tensor(tokenizer(text, truncation=True, max_length=MAX_TOKENS)["input_ids"]) for text in texts]


def masking_mistake(monkeypatch: pytest.MonkeyPatch, change: Callable[..., dict[str, Any]]) -> None:
    """Replace fields of the kernel's Masking by those that ``change(masking, query)`` returns."""
    for kernel in (sdpa, matmul_attention):
        right = kernel.attend

        def wrong(query, key, value, segments, masking, *, right=right):
            return right(query, key, value, segments, replace(masking, **change(masking, query)))

        monkeypatch.setattr(kernel, "attend", wrong)


def batch_mistake(monkeypatch: pytest.MonkeyPatch, change: Callable[[DeviceBatch], dict[str, Any]]) -> None:
    """Replace fields of the forward's DeviceBatch by those that ``change(batch)`` returns."""
    right = Runner.states

    def wrong(runner: Runner, batch: DeviceBatch, rows: torch.Tensor | None = None) -> torch.Tensor:
        return right(runner, replace(batch, **change(batch)), rows)

    monkeypatch.setattr(Runner, "states", wrong)


def assert_noticed(engine: Engine, family: str, alone: Callable[..., Matrices]) -> None:
    moved = difference(states(engine, SHORT), alone(family, SHORT))
    assert moved > VISIBLE


@pytest.mark.parametrize("family", some())
def test_notices_one_segment_for_the_whole_row(family, engine_of, alone, monkeypatch):
    batch_mistake(monkeypatch, lambda batch: {"segments": Segments.of([batch.segments.total])})
    assert_noticed(engine_of(family), family, alone)


@pytest.mark.parametrize("family", some())
def test_notices_segments_shifted_by_one(family, engine_of, alone, monkeypatch):
    def shifted(batch):
        first, *middle, last = batch.segments.lengths
        return {"segments": Segments.of([first + 1, *middle, last - 1])}

    batch_mistake(monkeypatch, shifted)
    assert_noticed(engine_of(family), family, alone)


@pytest.mark.parametrize("family", some(SHARED))
def test_notices_the_wrong_direction(family, engine_of, alone, monkeypatch):
    """Causal attention in encoders and the reverse; for qwen2-bidirectional: the module's setting, not the argument."""
    monkeypatch.setattr(dense, "is_plain", lambda masking: False)  # the fused kernel takes MPNet's bias for its mask
    masking_mistake(monkeypatch, lambda masking, query: {"causal": not masking.causal})
    assert_noticed(engine_of(family), family, alone)


@pytest.mark.parametrize("family", some(SHARED))
def test_notices_that_scaling_is_ignored(family, engine_of, alone, monkeypatch):
    own = family.startswith(("gemma2", "gemma3"))  # the usual scale is the mistake, because theirs differs
    masking_mistake(monkeypatch, lambda masking, q: {"scale": q.shape[-1] ** -0.5 if own else 1.0})
    assert_noticed(engine_of(family), family, alone)


@pytest.mark.parametrize("step", [-1, 1, 1000])
@pytest.mark.parametrize("family", some(WINDOWED))
def test_notices_a_window_off_by_one_or_ignored(family, step, engine_of, alone, monkeypatch):
    masking_mistake(monkeypatch, lambda masking, q: {"window": masking.window and masking.window + step})
    assert_noticed(engine_of(family), family, alone)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gemma2", lambda masking, q: {"softcap": None}),
        ("mpnet", lambda masking, q: {"bias": None}),
        ("mpnet", lambda masking, q: {"bias": masking.bias.transpose(1, 2)}),
    ],
    ids=["no softcap", "no bias", "a mirrored bias"],
)
def test_notices_a_wrong_change_of_the_scores(family, change, engine_of, alone, monkeypatch):
    masking_mistake(monkeypatch, change)
    assert_noticed(engine_of(family), family, alone)


@pytest.mark.parametrize("family", some(GROUPED))
def test_notices_query_heads_at_the_wrong_key(family, engine_of, alone, monkeypatch):
    for kernel in (sdpa, matmul_attention):
        right = kernel.attend

        def tiled(query, key, value, segments, masking, *, right=right):
            groups = query.shape[1] // key.shape[1]
            return right(query, key.repeat(1, groups, 1), value.repeat(1, groups, 1), segments, masking)

        monkeypatch.setattr(kernel, "attend", tiled)
    assert_noticed(engine_of(family), family, alone)


@pytest.mark.parametrize("family", some([*ROBERTA_LIKE, *COUNTED, *ROTARY]))
def test_notices_wrong_positions(family, engine_of, alone, monkeypatch):
    """RoBERTa's positions without the offset, BERT's off by one; for rotary models, which see distances, all equal."""
    wrong = {
        **dict.fromkeys(ROBERTA_LIKE, lambda positions: positions - 2),
        **dict.fromkeys(COUNTED, lambda positions: (positions + 1).clamp(max=MAX_TOKENS - 1)),
        **dict.fromkeys(ROTARY, torch.zeros_like),
    }[family]
    batch_mistake(monkeypatch, lambda batch: {"position_ids": wrong(batch.position_ids)})
    assert_noticed(engine_of(family), family, alone)


def test_notices_the_other_token_type(engine_of, alone, monkeypatch):
    right = encoder.PackedEncoder.forward

    def forward(self, *, token_type_ids, **rest):
        return right(self, token_type_ids=torch.ones_like(token_type_ids), **rest)

    monkeypatch.setattr(encoder.PackedEncoder, "forward", forward)
    assert_noticed(engine_of("bert"), "bert", alone)


def test_notices_query_key_and_value_in_another_order(plain, alone, monkeypatch):
    row = architectures.row_of("bert")
    names = row.encoder
    swapped = replace(names, query=names.key, key=names.value, value=names.query)
    monkeypatch.setattr(architectures, "ARCHITECTURES", (replace(row, encoder=swapped),))
    with Engine(plain("bert"), dtype="float32", device="cpu") as engine:
        assert_noticed(engine, "bert", alone)


# --- Assumptions of the tests above. ---------------------------------------------------------------------------------


def test_the_difference_sees_a_single_value():
    matrices = [np.ones((3, 4), np.float32), np.full((2, 4), 10, np.float32)]
    moved = [matrix.copy() for matrix in matrices]
    moved[1][1, 2] += 1e-3
    assert difference(matrices, matrices) == 0
    assert difference(moved, matrices) == pytest.approx(1e-4, rel=1e-2)


@pytest.mark.contract
@pytest.mark.parametrize("family", some())
def test_every_tensor_of_a_tiny_checkpoint_moves_its_states(family, engine_of, tmp_path):
    """A mistake in a tensor without effect would not be detected."""
    from safetensors.torch import load_file, save_file

    folder = write_checkpoint(tmp_path / family, family)
    tensors = load_file(folder / "model.safetensors")
    names = [name for name in tensors if "pooler." not in name and not name.endswith(UNREAD)]
    right = states(engine_of(family), SHORT)
    # A key's bias adds the same number to all scores of a row, which softmax cancels.
    unseen = ("key.bias", "k_lin.bias", "attn.k.bias", "pos_key_proj.bias")
    for name in random.Random(0).sample(names, 5):
        moved = {**tensors, name: torch.flip(tensors[name], dims=(-1,)) + 0.1}
        save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
        with Engine(folder, dtype="float32", device="cpu") as engine:
            difference_made = difference(states(engine, SHORT), right)
        assert (difference_made > VISIBLE) != name.endswith(unseen), name
