"""The native forward of decoders: each family and setting compared with transformers' own class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.native.steps import marks_of
from tests.tiny import write_checkpoint

from millpond.attention.segments import Segments
from millpond.checkpoints import architectures
from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.checkpoints.native_config import translate
from millpond.models.decoder import PackedDecoder
from millpond.models.linear import plain_linears
from millpond.models.load import load_backbone
from millpond.models.native import rotation
from millpond.models.native.decoder import plan
from millpond.models.native.encoder import NativeEncoder, bounds_of
from millpond.models.native.kernels import kernels_of
from millpond.models.native.weight_packer import NotSupported
from millpond.native import library

CPU = torch.device("cpu")
TOLERANCE = 1e-5  # of normalized states
VISIBLE = 1e-3  # a mistake must change them by more than this
LENGTHS = (17, 1, 300, 2, 64, 31, 33)
PRECISIONS = [
    pytest.param(isa, dtype, marks=marks_of(isa))
    for isa, dtype in (("avx2", torch.float32), ("avx512", torch.float32), ("avx512bf16", torch.bfloat16))
]

SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 416,  # more than a chunk of the feed, and no multiple of it
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 3.0}
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 20,
    "layer_types": ["full_attention", "sliding_attention"],
}
# family, and fields of its config.json
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        family: (family, {})
        for family in ("eurobert", "llama", "llama-bidirectional", "internlm2", "mistral", "qwen2", "qwen3")
    },
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-key-head": ("llama", {"num_key_value_heads": 1}),
    "llama-as-many-key-heads": ("llama", {"num_key_value_heads": 4}),
    "llama-llama3": ("llama", {"rope_scaling": LLAMA3}),
    "llama-linear": ("llama", {"rope_scaling": LINEAR}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "eurobert-biases": ("eurobert", {"attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": 33}),
    "mistral-window-of-one": ("mistral", {"sliding_window": 1}),
    "qwen2-yarn": ("qwen2", {"rope_scaling": YARN}),
    "qwen2-bidirectional": ("qwen2-bidirectional", {}),
    "qwen3-eight-heads": ("qwen3", {"num_attention_heads": 8}),
    "qwen3-heads-of-128": ("qwen3", {"head_dim": 128}),
    "qwen3-windows": ("qwen3", WINDOWS),
    "qwen3-bidirectional-windows": ("qwen3", {**WINDOWS, "is_causal": False}),
    "gemma": ("gemma", {"num_key_value_heads": 1, "head_dim": 256}),
    "gemma2": ("gemma2", {"sliding_window": 16}),
    "gemma2-no-softcap": ("gemma2", {"attn_logit_softcapping": None}),
    "gemma3": ("gemma3", {"sliding_window": 65}),
    "gemma3-bidirectional": ("gemma3", {"use_bidirectional_attention": True, "sliding_window": 24}),
}
# Each has the layers of another case.
SLOW = (
    "internlm2",
    "llama-bidirectional",
    "mistral",
    "qwen2",
    "qwen2-bidirectional",
    "llama-linear",
    "gemma2-no-softcap",
)
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("decoders")

    def checkpoint(name: str) -> Path:
        family, config = CASES[name]
        folder: Path = root / name
        return folder if folder.exists() else write_checkpoint(folder, family, config={**SIZES, **config})

    return checkpoint


@pytest.fixture(scope="module")
def expected(checkpoint: Folder) -> Callable[[str], torch.Tensor]:
    """Normalized states of transformers' class in float32, each text on its own."""
    known: dict[str, torch.Tensor] = {}

    def expected(name: str) -> torch.Tensor:
        if name not in known:
            with torch.inference_mode():
                known[name] = normalized(torch.cat([states_of(loaded(checkpoint(name)), text) for text in texts()]))
        return known[name]

    return expected


def loaded(folder: Path, dtype: torch.dtype = torch.float32, *, packed: bool = False) -> Any:
    description = read_checkpoint(folder)
    row = architectures.find(description.config, folder.name)
    description = replace(description, config=translate(row, description.config, folder.name))
    backbone = load_backbone(description, row, device=CPU, dtype=dtype, packed=False)
    if not packed:
        return backbone
    with plain_linears():
        return PackedDecoder(backbone, row)


def native(folder: Path, isa: str, dtype: torch.dtype) -> NativeEncoder:
    if library.isa() is None or library.ISAS.index(isa) > library.ISAS.index(library.isa()):
        pytest.skip(f"this processor has no {isa}")
    kernels = kernels_of(dtype, isa)
    assert kernels is not None
    return NativeEncoder(plan(loaded(folder, dtype, packed=True), kernels, dtype))


def texts(lengths: Sequence[int] = LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.integers(5, 60, length).astype(np.int32) for length in lengths]


def states_of(backbone: Any, text: np.ndarray) -> torch.Tensor:  # [tokens, hidden]
    ids = torch.from_numpy(text.astype(np.int64))[None]
    positions = torch.arange(len(text))[None]
    out = backbone(input_ids=ids, position_ids=positions, segments=Segments.of([len(text)]))
    hidden: torch.Tensor = out.last_hidden_state[0]
    return hidden


def encoded(encoder: NativeEncoder, pieces: Sequence[np.ndarray], **options: Any) -> torch.Tensor:
    return encoder.encode(np.concatenate(pieces), bounds_of([len(piece) for piece in pieces]), **options)


def normalized(states: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(states.float(), dim=-1)


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max())


@pytest.mark.parametrize("isa", [pytest.param(isa, marks=marks_of(isa)) for isa in ("avx2", "avx512")])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_float32_equals_transformers(name, isa, checkpoint, expected):
    encoder = native(checkpoint(name), isa, torch.float32)
    assert difference(normalized(encoded(encoder, texts())), expected(name)) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama-biases", "qwen3-windows", "gemma2", "gemma3", "eurobert"])
def test_bfloat16_points_where_float32_does(name, checkpoint, expected):
    encoder = native(checkpoint(name), "avx512bf16", torch.bfloat16)
    cosine = torch.nn.functional.cosine_similarity(encoded(encoder, texts()), expected(name), dim=-1)
    assert cosine.mean() >= 0.999
    assert cosine.min() >= 0.99


@pytest.mark.parametrize(("isa", "dtype"), PRECISIONS)
@pytest.mark.parametrize("name", ["qwen3-windows", "gemma2", "gemma3"])
def test_a_text_has_the_same_states_in_every_batch(name, isa, dtype, checkpoint):
    encoder = native(checkpoint(name), isa, dtype)
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
def test_a_text_continues_another_one(name, isa, dtype, checkpoint):
    encoder = native(checkpoint(name), isa, dtype)
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
def test_slices_of_a_long_text_change_nothing(name, isa, dtype, block, checkpoint):
    encoder = native(checkpoint(name), isa, dtype)
    text = texts([block * 3 + 1])
    for threads in (1, 2):
        for rows in ("all", "mean", "last"):
            encoder.block = 512
            whole = encoded(encoder, text, rows=rows)
            encoder.block = block
            assert torch.equal(encoded(encoder, text, rows=rows, threads=threads), whole)


# --- Rotary angles. ---------------------------------------------------------------------------------------------------


def test_tables_grow_to_the_longest_text(checkpoint, monkeypatch):
    folder = checkpoint("llama-llama3")
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
def test_angles_that_depend_on_the_batch_are_unfit(kind, checkpoint):
    kernels = kernels_of(torch.float32)
    if kernels is None:
        pytest.skip("this processor has no kernels")
    packed = loaded(checkpoint("llama"), packed=True)
    packed.rotary.rope_type = kind
    with pytest.raises(NotSupported, match=kind):
        plan(packed, kernels, torch.float32)
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
    folder = write_checkpoint(tmp_path / "model", "llama", config={**SIZES, **sizes})
    kernels = kernels_of(torch.float32)
    if kernels is None:
        pytest.skip("this processor has no kernels")
    packed = loaded(folder, packed=True)
    text = texts([9])[0]
    with torch.inference_mode():
        before = states_of(packed, text)
        with pytest.raises(NotSupported, match=reason):
            plan(packed, kernels, torch.float32)
        assert torch.equal(states_of(packed, text), before)
