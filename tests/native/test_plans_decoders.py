"""The native forward of decoders: each family and setting compared with transformers' own class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.native.forwards import CAUSAL, backbone, plain, plan_of, states
from tests.native.steps import marks_of
from tests.tiny import write_checkpoint

from millpond.models.native import rotation
from millpond.models.native.encoder import NativeEncoder, bounds_of
from millpond.models.native.kernels import kernels_of
from millpond.models.native.weight_packer import NotSupported

LENGTHS = (17, 1, 300, 2, 64, 31, 33)
PRECISIONS = [
    pytest.param(isa, dtype, marks=marks_of(isa))
    for isa, dtype in (("avx2", torch.float32), ("avx512", torch.float32), ("avx512bf16", torch.bfloat16))
]


def native(folder: Path, isa: str, dtype: torch.dtype) -> NativeEncoder:
    if kernels_of(dtype, isa) is None:
        pytest.skip(f"no kernels of {isa}")
    return plan_of(plain(folder, dtype), isa, dtype)


def texts(lengths: Sequence[int] = LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.integers(5, 60, length).astype(np.int32) for length in lengths]


def encoded(encoder: NativeEncoder, pieces: Sequence[np.ndarray], **options: Any) -> torch.Tensor:
    return encoder.encode(np.concatenate(pieces), bounds_of([len(piece) for piece in pieces]), **options)


@pytest.mark.parametrize(("isa", "dtype"), PRECISIONS)
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
    assert torch.equal(last, together[np.cumsum(LENGTHS) - 1])


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


@pytest.mark.parametrize(("isa", "dtype"), PRECISIONS)
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


@pytest.mark.parametrize(("isa", "dtype"), PRECISIONS)
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
    for text, rows in sorted(zip(texts(), expected.split(LENGTHS), strict=True), key=lambda pair: len(pair[0])):
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
