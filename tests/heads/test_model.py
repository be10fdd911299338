"""NativeModel against the model in torch: the same batches of packed texts, every output, alone and together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.heads.test_against_torch import WIDE, described, difference, outputs_of
from tests.tiny import Dense, Layout, Normalize, Pooling, write_checkpoint
from tests.tiny.heads import write_splade

from millpond.backends.backend import OutputSpec, PackedBatch
from millpond.backends.native.model import NativeModel, build_model
from millpond.checkpoints.description import ModelDescription
from millpond.native import library
from millpond.values.config import EngineConfig

pytestmark = [
    pytest.mark.contract,
    pytest.mark.torch,
    pytest.mark.skipif(library.kernel_table() is None, reason="no compiled kernels"),
]

LENGTHS = (1, 1, 4, 17, 40, 64, 64)
POOLED, TOKENS = OutputSpec(kind="pooled"), OutputSpec(kind="tokens")


def batch_of(offset: int = 0, *, skips: bool = False, types: bool = False, keys: bool = False) -> PackedBatch:
    """``offset``: position of a text's first token."""
    random = np.random.default_rng(3)
    bounds = np.concatenate(([0], np.cumsum(LENGTHS))).astype(np.int32)
    return PackedBatch(
        bounds=bounds,
        ids=random.integers(5, 60, bounds[-1]).astype(np.int32),
        positions=np.concatenate([np.arange(offset, offset + length) for length in LENGTHS]).astype(np.int32),
        types=random.integers(0, 2, bounds[-1]).astype(np.int32) if types else None,
        adapters=None,
        skip=np.array([min(3, length - 1) for length in LENGTHS], np.int32) if skips else None,
        keys=[max(1, length - 5) for length in LENGTHS] if keys else None,
        prefixes=None,
    )


def torch_model(description: ModelDescription, folder: Path) -> Any:
    from millpond.backends.torch import backend as torch_backend

    config = EngineConfig(model=str(folder), device="cpu", dtype="float32")
    return torch_backend.load(description, config, check=False).models[0]


def written(*modules: Any, family: str = "bert", **options: Any) -> Callable[[Path], Path]:
    layout = Layout(modules=modules) if modules else None
    return partial(write_checkpoint, family=family, sentence_transformers=layout, config=WIDE, **options)


CASES: dict[str, Callable[[Path], Path]] = {
    "mean": written(Pooling()),
    "cls": written(Pooling(modes=("cls",)), Normalize()),
    "last": written(Pooling(modes=("lasttoken",))),
    "max": written(Pooling(modes=("max",))),
    "concatenated": written(Pooling(modes=("mean", "cls"))),
    "mean-and-dense": written(Pooling(), Dense(out_features=20)),
    "classifier": written(head="SequenceClassification"),
    "tokens": written(head="TokenClassification"),
    "splade": partial(write_splade, config=WIDE),
    "roberta": written(family="roberta", head="SequenceClassification"),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_every_output_alone_and_together(name, tmp_path):
    folder = CASES[name](tmp_path / "model")
    description = described(folder)
    model, reference = build_model(description, dtype="float32"), torch_model(description, folder)
    outputs, batches = outputs_of(description), partial(batch_of, description.position_offset)
    for batch in (batches(), batches(skips=True), batches(types=name != "roberta", keys=True)):
        for asked in ({next(iter(outputs))}, outputs):
            found, expected = (m.run(batch, asked, **t) for m, t in ((model, {"threads": 2}), (reference, {})))
            assert difference(found, expected) <= 1e-5
    assert difference(model.run(batches(), outputs, threads=1), reference.run(batches(keys=True), outputs)) > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
def test_one_row_of_each_text_is_asked_of_the_encoder(mode, dtype, tmp_path):
    if not getattr(library.kernel_table(), f"encode_{dtype}", None):
        pytest.skip(f"no {dtype}")
    description = described(written(Pooling(modes=(mode,)))(tmp_path / "model"))
    model, batch = build_model(description, dtype=dtype), batch_of()
    rows = model.run(batch, {POOLED}, threads=1)[POOLED]
    states = model.encoder.encode(batch.ids, batch.bounds, offset=model.position_offset)
    asked = spy_on_rows(model)
    with_tokens = model.run(batch, {POOLED, TOKENS}, threads=1)[POOLED]
    model.run(batch, {POOLED}, threads=1)
    assert asked == ["all", {"mean": "mean", "cls": "first", "lasttoken": "last"}[mode]]
    for i, (begin, end) in enumerate(zip(batch.bounds, batch.bounds[1:], strict=False)):
        text = states[begin:end]
        expected = {"mean": text.mean(0), "cls": text[0], "lasttoken": text[-1]}[mode]
        assert np.array_equal(with_tokens[i], expected)  # to the bit
        # The last layer is computed for fewer rows, and each row as in any block.
        assert np.array_equal(rows[i], expected)


def spy_on_rows(model: NativeModel) -> list[str]:
    asked: list[str] = []
    encode = model.encoder.encode

    def encoding(*arguments: Any, **options: Any) -> Any:
        asked.append(options["rows"])
        return encode(*arguments, **options)

    model.encoder.encode = encoding  # type: ignore[method-assign]
    return asked


@pytest.mark.torch
def test_the_real_minilm_gives_the_vectors_of_torch(minilm_folder):
    description = described(minilm_folder)
    model, reference = build_model(description, dtype="float32"), torch_model(description, minilm_folder)
    batch = batch_of()
    assert difference(model.run(batch, {POOLED}, threads=2), reference.run(batch, {POOLED})) <= 1e-5


def test_the_vocabulary_of_a_splade_counts_as_work_of_each_token(tmp_path):
    model = build_model(described(CASES["splade"](tmp_path / "model")), dtype="float32")
    model.threads.most = 8
    vocabulary = 64 * 64 + model.heads.sparse.vocabulary * 64
    of_two = int(1e8 / 2 / (model.encoder.plan.weights + vocabulary)) + 1  # tokens for which a second thread pays
    assert (model.threads.count(of_two - 2), model.threads.count(of_two)) == (1, 2)
