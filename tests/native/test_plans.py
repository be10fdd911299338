"""Native plans: texts in batches, shared prefixes, growing tables and adapters, beside transformers' classes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.native.models import (
    ADAPTED,
    CAUSAL,
    ENCODERS,
    JINA,
    LENGTHS,
    SIZE,
    TARGETS,
    TOLERANCE,
    VISIBLE,
    apart,
    assert_same_direction,
    backbone,
    compiled,
    expected_states,
    loaded,
    marks_of,
    native_states,
    plain,
    plan_of,
    some_ids,
    states,
    two_bases,
)
from tests.parity.rotary_oracles import jina as described_jina
from tests.tiny import write_checkpoint
from tests.tiny.families import JINA_TASKS

from millpond import Engine
from millpond.backends.torch import load as loading
from millpond.backends.torch.forwards.int8 import Int8Linear
from millpond.backends.torch.forwards.jina import JinaEncoder
from millpond.backends.torch.forwards.linear import PlainLinear, ReorderedLinear, linear
from millpond.backends.torch.native import rotation
from millpond.backends.torch.native.encoder import NativeEncoder, bounds_of
from millpond.backends.torch.native.kernels import kernels_of
from millpond.backends.torch.native.rotation import Rotation
from millpond.backends.torch.native.weight_packer import NotSupported

# --- The native forward of decoders: each family and setting compared with transformers' own class --------------------


SOME = (17, 1, 300, 2, 64, 31, 33)
EACH_PRECISION = [
    pytest.param(isa, dtype, marks=marks_of(isa))
    for isa, dtype in (("avx2", torch.float32), ("avx512", torch.float32), ("avx512bf16", torch.bfloat16))
]


def native(folder: Path, isa: str, dtype: torch.dtype) -> NativeEncoder:
    if kernels_of(dtype, isa) is None:
        pytest.skip(f"no kernels of {isa}")
    return plan_of(plain(folder, dtype), isa, dtype)


def texts(lengths: Sequence[int] = SOME) -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.integers(5, 60, length).astype(np.int32) for length in lengths]


def encoded(encoder: NativeEncoder, pieces: Sequence[np.ndarray], **options: Any) -> torch.Tensor:
    return encoder.encode(np.concatenate(pieces), bounds_of([len(piece) for piece in pieces]), **options)


@pytest.mark.parametrize(("isa", "dtype"), EACH_PRECISION)
@pytest.mark.parametrize("name", ["qwen3-windows", "gemma2", "gemma3"])
def test_a_text_has_the_same_states_in_every_batch(name, isa, dtype, folder_of):
    encoder = native(folder_of(name), isa, dtype)
    together = encoded(encoder, texts())
    alone = torch.cat([encoded(encoder, [text]) for text in texts()])
    assert torch.equal(together, alone)
    encoder.block = 64
    for threads in (1, 2, 3):
        assert torch.equal(encoded(encoder, texts(), threads=threads), together)
    last = encoded(encoder, texts(), rows="last")
    assert torch.equal(last, together[np.cumsum(SOME) - 1])


# --- Texts that continue another one. ---------------------------------------------------------------------------------


LEADS = (-1, 0, 0, -1, -1, 4, 0, 4, 4)
SHARED = (70, 1, 9, 40, 17, 33, 130, 2, 64)  # tokens of each, those of its lead left out


def shared() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Texts as a call with leads takes them, and whole."""
    pieces = texts(SHARED)
    whole = [
        piece if lead < 0 else np.concatenate((pieces[lead], piece)) for piece, lead in zip(pieces, LEADS, strict=True)
    ]
    return pieces, whole


@pytest.mark.parametrize(("isa", "dtype"), EACH_PRECISION)
@pytest.mark.parametrize("name", ["qwen3-windows", "gemma2", "llama-one-key-head"])
def test_a_text_continues_another_one(name, isa, dtype, folder_of):
    encoder = native(folder_of(name), isa, dtype)
    pieces, whole = shared()
    rows = [encoded(encoder, [text])[-len(piece) :] for piece, text in zip(pieces, whole, strict=True)]
    leads = np.array(LEADS, dtype=np.int32)
    for encoder.block in (64, 100, 512):
        for threads in (1, 2):
            assert torch.equal(encoded(encoder, pieces, leads=leads, threads=threads), torch.cat(rows))
            last = encoded(encoder, pieces, leads=leads, threads=threads, rows="last")
            assert torch.equal(last, torch.stack([own[-1] for own in rows]))


@pytest.mark.parametrize(("isa", "dtype"), EACH_PRECISION)
@pytest.mark.parametrize(("name", "block"), [("llama-biases", 64), ("gemma2", 96), ("eurobert", 128)])
def test_slices_of_a_long_text_change_nothing(name, isa, dtype, block, folder_of):
    encoder = native(folder_of(name), isa, dtype)
    text = texts([block * 3 + 1])
    for threads in (1, 2):
        for rows in ("all", "mean", "last"):
            encoder.block = 512
            whole = encoded(encoder, text, rows=rows)
            encoder.block = block
            assert torch.equal(encoded(encoder, text, rows=rows, threads=threads), whole)


# --- Rotary angles. ---------------------------------------------------------------------------------------------------


def test_tables_grow_to_the_longest_text(folder_of, monkeypatch):
    folder = folder_of("llama-llama3")
    expected = encoded(native(folder, "avx2", torch.float32), texts())
    monkeypatch.setattr(rotation, "_FIRST", 2)
    encoder = native(folder, "avx2", torch.float32)
    (table,) = encoder.plan.rotations
    sizes = []
    for text, rows in sorted(zip(texts(), expected.split(SOME), strict=True), key=lambda pair: len(pair[0])):
        assert torch.equal(encoded(encoder, [text]), rows)
        sizes.append(table.positions)
    assert sizes == [2, 2, 17, 34, 34, 68, 300]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_depend_on_the_batch_are_unfit(kind, folder_of):
    if kernels_of(torch.float32) is None:
        pytest.skip("this processor has no kernels")
    packed = backbone(folder_of("llama"))
    packed.rotary.rope_type = kind
    with pytest.raises(NotSupported, match=kind):
        plan_of(packed)
    assert len(packed.layers) == 2  # it runs in torch


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"head_dim": 20}, "20 columns"),
        ({"hidden_size": 80}, "80 columns"),
        ({"intermediate_size": 100}, "100 columns"),
        ({"hidden_act": "gelu_fast"}, "gelu_fast"),
    ],
)
def test_sizes_without_kernels_are_unfit(sizes, reason, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "llama", config=CAUSAL | sizes)
    if kernels_of(torch.float32) is None:
        pytest.skip("this processor has no kernels")
    packed = backbone(folder)
    before = states(packed, (9,))
    with pytest.raises(NotSupported, match=reason):
        plan_of(packed)
    assert torch.equal(states(packed, (9,)), before)


# --- Native plans of ModernBERT, NomicBert, GTE and jina-embeddings-v3: many lengths, against transformers' classes ---


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 64,
}


@compiled
@pytest.mark.parametrize("variant", ["modernbert", "modernbert-window-128", "modernbert-biases", "nomic", "gte"])
@pytest.mark.parametrize("threads", [2])
def test_a_text_alone_has_the_same_states_to_the_bit(variant, threads, folder_of):
    encoder = plan_of(loaded(folder_of(variant)))
    ids, bounds = some_ids(LENGTHS).int().numpy(), bounds_of(LENGTHS)
    together = encoder.encode(ids, bounds, threads=threads)
    for first, end in pairwise(bounds):
        alone = encoder.encode(ids[first:end].copy(), bounds_of([end - first]))
        assert torch.equal(alone, together[first:end])


@compiled
@pytest.mark.parametrize("variant", ["nomic", "gte"])
def test_token_types(variant, folder_of, tmp_path):
    family, config = ENCODERS[variant]
    folder = write_checkpoint(tmp_path / "model", family, config=config | {"type_vocab_size": 2})
    types = torch.randint(0, 2, (sum(LENGTHS),), generator=torch.Generator().manual_seed(6))
    own = native_states(plan_of(loaded(folder)), types=types.int().numpy())
    assert apart(own, expected_states(folder, types=types)) <= TOLERANCE
    assert apart(own, expected_states(folder)) > VISIBLE


@compiled
@pytest.mark.parametrize("variant", ["modernbert", "gte"])
def test_tables_of_rotary_positions_grow_with_the_longest_text(variant, folder_of):
    folder = folder_of(variant)
    encoder = plan_of(loaded(folder))
    lengths = (3, 2000, 600, 5)  # beyond max_position_embeddings, which a caller's max_length may be
    first = native_states(encoder, (3,))
    assert all(rotation.positions < 1000 for rotation in encoder.plan.rotations)
    own = native_states(encoder, lengths)
    assert apart(own, expected_states(folder, lengths)) <= 2 * TOLERANCE
    assert torch.equal(native_states(encoder, (3,)), first)


@pytest.mark.parametrize("variant", ["modernbert", "nomic", "gte", "jina"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_loading_chooses_the_native_forward(variant, dtype, folder_of):
    if kernels_of(dtype) is None:
        pytest.skip("this processor has no kernels for it, or there was no compiler")
    folder = folder_of(variant)
    module = backbone(folder, dtype, native=True)
    assert isinstance(module, NativeEncoder)
    if dtype is torch.float32:
        expected = states(backbone(folder)) if variant == "jina" else expected_states(folder)
        assert apart(states(module), expected) <= TOLERANCE


@pytest.mark.skipif(kernels_of(torch.bfloat16) is None, reason="no kernels for bfloat16")
def test_what_is_unfit_has_its_layers_in_onednns_order(folder_of, tmp_path):
    jina_folder = write_checkpoint(tmp_path / "model", "jina", config=JINA | {"lora_rank": 40})
    for folder in (folder_of("modernbert-of-48-columns"), jina_folder):
        module = backbone(folder, torch.bfloat16, native=True)
        kinds = {type(layer) for layer in module.modules() if isinstance(layer, PlainLinear | ReorderedLinear)}
        assert kinds == {type(linear(torch.zeros(32, 32, dtype=torch.bfloat16), None))}


@pytest.mark.parametrize("scaling", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_positions_that_depend_on_the_longest_text_are_unfit(scaling):
    """Loading refuses such a config before; here its rotary module is built by itself."""
    pytest.importorskip("transformers.models.gte", reason="GTE needs transformers 5.19")
    from transformers import GteConfig, ModernBertConfig
    from transformers.models.gte.modeling_gte import GteRotaryEmbedding
    from transformers.models.modernbert.modeling_modernbert import ModernBertRotaryEmbedding

    two = ModernBertRotaryEmbedding(ModernBertConfig(**SIZE | two_bases(scaling)))
    assert Rotation(two, "sliding_attention").positions
    for rotary, kind in (
        (two, ("full_attention",)),
        (GteRotaryEmbedding(GteConfig(**SIZE | {"rope_parameters": scaling})), ()),
    ):
        with pytest.raises(NotSupported):
            Rotation(rotary, *kind)


# --- jina-embeddings-v3: an adapter for each text. -------------------------------------------------------------------


def adapters_of(count: int) -> np.ndarray:  # [texts]
    """Every adapter and none, so that neighbours differ."""
    return (np.arange(len(LENGTHS)) % (count + 1) - 1).astype(np.int32)


@lru_cache(maxsize=64)
@torch.inference_mode()
def described_states(folder: Path) -> torch.Tensor:
    """Those of the description, with each text's adapter merged into the weights; types are 0."""
    config = json.loads((folder / "config.json").read_text())
    tasks = config["lora_adaptations"]
    references = [described_jina(folder, config, task) for task in (*tasks, None)]  # the last one: index -1
    texts = some_ids(LENGTHS).split(LENGTHS)
    return torch.cat([references[index](text) for index, text in zip(adapters_of(len(tasks)), texts, strict=True)])


@pytest.mark.parametrize("variant", ADAPTED)
@pytest.mark.parametrize(("highest", "dtype"), TARGETS)
@pytest.mark.parametrize("threads", [2])
def test_each_text_has_its_adapter(variant, highest, dtype, threads, folder_of, record_property):
    folder = folder_of(variant)
    encoder = plan_of(loaded(folder, dtype), highest, dtype)
    own = native_states(encoder, adapters=adapters_of(encoder.plan.adapters), threads=threads)
    expected = described_states(folder)
    if dtype is torch.float32:
        worst = apart(own, expected)
        record_property("error", worst)
        assert worst <= TOLERANCE
    else:
        assert_same_direction(own, expected)


@compiled
@pytest.mark.parametrize("variant", ["jina", "jina-rank-16", "jina-wide-feed"])
@pytest.mark.parametrize("threads", [2])
def test_neighbours_with_other_adapters_change_no_bit(variant, threads, folder_of):
    encoder = plan_of(loaded(folder_of(variant)))
    chosen = adapters_of(encoder.plan.adapters)
    ids, bounds = some_ids(LENGTHS).int().numpy(), bounds_of(LENGTHS)
    together = encoder.encode(ids, bounds, adapters=chosen, threads=threads)
    for i, (first, end) in enumerate(pairwise(bounds)):
        for adapters in (chosen[i : i + 1], None) if chosen[i] < 0 else (chosen[i : i + 1],):
            alone = encoder.encode(ids[first:end].copy(), bounds_of([end - first]), adapters=adapters)
            assert torch.equal(alone, together[first:end])


@compiled
@pytest.mark.parametrize("variant", ["jina", "jina-rank-16", "jina-wide-feed"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_text_longer_than_a_block_keeps_its_adapter(variant, threads, folder_of):
    """Such a text runs in slices, which add its adapter's products row by row."""
    encoder = plan_of(loaded(folder_of(variant)))
    lengths = [33, 3 * 64 + 1, 1, 2 * 64, 5 * 64 + 40]
    chosen = np.array([1, 0, -1, 2, 1], dtype=np.int32) % encoder.plan.adapters
    chosen[2] = -1
    ids, bounds = some_ids(lengths).int().numpy(), bounds_of(lengths)
    for rows in ("all", "first", "last", "mean"):
        encoder.block = 512
        whole = encoder.encode(ids, bounds, adapters=chosen, rows=rows)
        encoder.block = 64
        assert torch.equal(encoder.encode(ids, bounds, adapters=chosen, rows=rows, threads=threads), whole)
    assert not torch.equal(whole, encoder.encode(ids, bounds, rows="mean"))  # without any adapter


@compiled
def test_types_of_each_adapter(folder_of):
    """The types are merged with the adapters; torch's operators add both to each token."""
    module = loaded(folder_of("jina-types"))
    encoder = plan_of(module)
    chosen = adapters_of(encoder.plan.adapters)
    types = torch.randint(0, 2, (sum(LENGTHS),), generator=torch.Generator().manual_seed(6))
    own = native_states(encoder, types=types.int().numpy(), adapters=chosen)
    each = torch.from_numpy(np.repeat(chosen, LENGTHS)).long()[None]
    assert apart(own, states(module, types=types, adapter_ids=each)) <= TOLERANCE
    assert apart(own, states(module, types=1 - types, adapter_ids=each)) > VISIBLE


@compiled
def test_jina_without_adapters(tmp_path):
    """As jina-colbert-v2."""
    folder = write_checkpoint(tmp_path / "model", "jina", config=JINA | {"lora_adaptations": []})
    module = backbone(folder, native=True)
    assert isinstance(module, NativeEncoder)
    assert module.plan.adapters == 0
    assert apart(states(module), states(backbone(folder))) <= TOLERANCE


@compiled
def test_the_engine_gives_each_text_its_adapter(folder_of):
    folder = folder_of("jina")
    texts = ["The pond is deep.", "a", " ".join(["How deep is it?"] * 20)]
    with Engine(str(folder), dtype="float32") as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "native_forward", lambda *_: None)
        with Engine(str(folder), dtype="float32") as reference:
            for adapter in (None, *JINA_TASKS):
                own, theirs = (one.embed(texts, adapter=adapter).embeddings for one in (engine, reference))
                assert abs(own - theirs).max() <= TOLERANCE


@compiled
def test_more_adapters_than_columns_run_in_torchs_operators(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "jina", config=JINA | {"lora_rank": 40})
    assert type(backbone(folder, native=True)) is JinaEncoder


@pytest.mark.skipif(kernels_of(torch.bfloat16) is None, reason="no kernels for bfloat16")
def test_int8_beside_adapters_runs_in_torchs_operators(folder_of):
    module = backbone(folder_of("jina"), torch.bfloat16, native=True, quantization="int8")
    assert type(module) is JinaEncoder
    assert any(isinstance(layer, Int8Linear) for layer in module.modules())


@compiled
@pytest.mark.parametrize("adapter", [5, -2])
def test_an_adapter_that_there_is_not(adapter, folder_of):
    encoder = plan_of(loaded(folder_of("jina")))
    with pytest.raises(IndexError, match="outside of the model's 5"):
        native_states(encoder, (3, 2), adapters=np.array([0, adapter], dtype=np.int32))


@pytest.mark.contract
@compiled
def test_calls_of_several_threads_while_the_tables_grow(folder_of):
    from concurrent.futures import ThreadPoolExecutor

    module = loaded(folder_of("modernbert"))
    lengths = [(5, 40), (700, 3), (9,), (1500,), (64, 64), (3000, 1)] * 2
    expected = [native_states(plan_of(module), one) for one in lengths]
    encoder = plan_of(module)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda one: native_states(encoder, one), lengths))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(encoder.plan.rotations) == 2
    assert np.diff([rotation.positions for rotation in encoder.plan.rotations]) == [0]
