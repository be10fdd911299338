"""The same folder loaded by sentence-transformers and by millpond: every pipeline and every option."""

from __future__ import annotations

import numpy as np
import pytest
from tests.pairwise import pairwise
from tests.parity.comparison import VISIBLE, assert_equal, assert_same_vectors, difference
from tests.tiny import (
    FAMILIES,
    MAX_TOKENS,
    Dense,
    Dropout,
    LayerNorm,
    Layout,
    Normalize,
    Pooling,
    edit_json,
    write_checkpoint,
)
from tests.tiny import TEXTS as SAMPLES
from tests.tiny.families import FAST
from tests.tiny.layouts import OLD_MODES

from millpond import Engine
from millpond.errors import InvalidDimensionsError, ModelLoadError

TEXTS = list(SAMPLES)
MODES = tuple(OLD_MODES)
CONCATENATIONS = (("mean", "cls"), ("cls", "mean"), ("lasttoken", "max", "weightedmean"), MODES)
PROMPTS = {"query": "Find the passage: ", "document": "Passage about water: ", "other": "the miller's "}


# Families that sentence-transformers loads without running a checkpoint's code, or a processor of images and sound.
NATIVE = tuple(
    family for family, row in FAMILIES.items() if not row.native_prefix and "vision_config" not in row.config
)

# --- Families -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "style"),
    [
        pytest.param(family, ("old", "new")[i % 2], marks=() if family in FAST else pytest.mark.slow)
        for i, family in enumerate(NATIVE)
    ],
)
def test_every_family_in_its_usual_pipeline(family, style, load):
    loaded = load(Layout(modules=FAMILIES[family].modules, style=style, max_seq_length=MAX_TOKENS), family)
    assert_same_vectors(loaded)
    assert loaded[0].spec.max_length == loaded[1].max_seq_length == MAX_TOKENS


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "qwen2-bidirectional", "gemma2"])
def test_a_plain_repository_pooled_as_sentence_transformers_would(family, load):
    """Without modules.json the defaults differ (millpond follows vLLM), so both get the same options."""
    engine, reference = load(None, family, pooling="mean", normalize=False)
    assert_equal(engine.embed(TEXTS).embeddings, reference.encode(TEXTS))


@pytest.mark.parametrize(("family", "mode"), [("bert", "cls"), ("distilbert", "mean"), ("qwen3", "lasttoken")])
def test_a_plain_repository_by_its_familys_default(family, mode, load):
    engine, reference = load(None, family)
    assert engine.spec.pooling == (mode,)
    states = reference.encode(TEXTS, output_value="token_embeddings", convert_to_numpy=False)
    pick = {"cls": lambda rows: rows[0], "mean": lambda rows: rows.mean(0), "lasttoken": lambda rows: rows[-1]}[mode]
    expected = np.stack([pick(rows.numpy()) for rows in states])
    assert_equal(engine.embed(TEXTS).embeddings, expected / np.linalg.norm(expected, axis=1, keepdims=True))


# --- Pooling --------------------------------------------------------------------------------------------------------


@pairwise(mode=MODES, style=["old", "new"])
def test_every_pooling_mode(mode, style, load):
    assert_same_vectors(load(Layout(modules=(Pooling(modes=(mode,)),), style=style)))


@pytest.mark.contract
@pytest.mark.parametrize("style", ["old", "new"])
@pytest.mark.parametrize("modes", CONCATENATIONS)
def test_concatenations(modes, style, load):
    """New files concatenate in the order of their list, old files always in the same order."""
    assert_same_vectors(load(Layout(modules=(Pooling(modes=modes),), style=style)))


def test_the_pooling_modes_differ(load):
    """Otherwise the tests above would pass with any mode."""
    engine, _ = load(Layout(modules=(Pooling(modes=MODES),)))
    parts = np.split(engine.embed(TEXTS[1:]).embeddings, len(MODES), axis=1)
    for i, part in enumerate(parts):
        for other in parts[:i]:
            assert difference(part, other) > VISIBLE


@pytest.mark.parametrize("family", ["bert", "llama", "qwen3"])
def test_the_prompt_left_out_of_the_pooling(family, load):
    """Other tokens attend to the prompt, but it is not pooled; with a leading and with a trailing special token."""
    layout = Layout(modules=(Pooling(modes=MODES, include_prompt=False),), prompts=PROMPTS)
    engine, reference = load(layout, family)
    texts = TEXTS[1:]  # the first text merges with the prompt's last token: see the next test
    for prompt in ("the wheel: ", "x"):
        assert_equal(engine.embed(texts, prompt=prompt).embeddings, reference.encode(texts, prompt=prompt))
    assert_equal(engine.embed(texts, role="query").embeddings, reference.encode_query(texts))
    assert_equal(engine.embed(TEXTS).embeddings, reference.encode(TEXTS))


@pytest.mark.contract
@pytest.mark.parametrize("mode", ["mean", "lasttoken"])
def test_a_text_that_merges_with_the_prompt_keeps_its_last_token(mode, tmp_path):
    """sentence-transformers pools no tokens there (zeros or -inf); no token of another text may be read."""
    layout = Layout(modules=(Pooling(modes=(mode,), include_prompt=False),))
    folder = write_checkpoint(tmp_path / "model", "llama", sentence_transformers=layout)
    with Engine(folder, dtype="float32", device="cpu") as engine:
        alone, nothing = engine.token_embed(["a", ""], prompt="the ").embeddings
        assert len(alone) == len(nothing)  # the prompt's space and the "a" are one token
        scattered = engine.embed(["a", "", *TEXTS], prompt="the ").embeddings
        assert_equal(scattered[:1], alone[-1:])
        assert_equal(scattered[1:2], nothing[-1:])
        assert_equal(engine.embed(["a"], prompt="the ").embeddings, alone[-1:])


def test_leaving_the_prompt_out_matters(load, tmp_path):
    engine, _ = load(Layout(modules=(Pooling(include_prompt=False),), prompts=PROMPTS))
    folder = write_checkpoint(tmp_path / "with", sentence_transformers=Layout(prompts=PROMPTS))
    with Engine(folder, dtype="float32", device="cpu") as including:
        with_prompt = including.embed(TEXTS, role="query").embeddings
    assert difference(engine.embed(TEXTS, role="query").embeddings, with_prompt) > VISIBLE


# --- Heads ----------------------------------------------------------------------------------------------------------

ACTIVATIONS = ("Tanh", "Identity", "GELU", "Mish")


@pytest.mark.contract
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_dense_activations(activation, load):
    assert_same_vectors(load(Layout(modules=(Pooling(), Dense(out_features=20, activation=activation)))))


@pairwise(
    width=[48, 20], residual=[True, False], bias=[True, False], style=["old", "new"], weights=["safetensors", "bin"]
)
def test_dense_forms(width, residual, bias, style, weights, load):
    dense = Dense(out_features=width, bias=bias, residual=residual)
    assert_same_vectors(load(Layout(modules=(Pooling(), dense), style=style, weights=weights)))


DENSE = Dense(out_features=24)
CHAINS = {
    "two dense": (Pooling(), DENSE, Dense(out_features=64, activation="GELU", bias=False)),
    "dense behind a concatenation": (Pooling(modes=("cls", "mean")), DENSE, Normalize()),
    "layer norm": (Pooling(), LayerNorm()),
    "layer norm between": (Pooling(), DENSE, LayerNorm(), Normalize()),
    "normalize first": (Pooling(), Normalize(), DENSE),
    "normalize first and last": (Pooling(), Normalize(), DENSE, Normalize()),
    "normalize twice": (Pooling(), Normalize(), Normalize()),
    "dropout": (Pooling(), Dropout(), DENSE, Dropout(), Normalize()),
    "everything": (
        Pooling(modes=("max", "mean")),
        LayerNorm(),
        DENSE,
        Normalize(),
        Dense(out_features=12),
        Normalize(),
    ),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_chains_of_modules(chain, load):
    assert_same_vectors(load(Layout(modules=CHAINS[chain])))


@pytest.mark.parametrize("activation", ["Identity", "Tanh"])
def test_a_dense_on_token_rows(activation, load):
    dense = Dense(out_features=20, activation=activation, stage="token_embeddings")
    engine, reference = load(Layout(modules=(dense, Pooling(modes=("mean", "max")), Normalize())))
    assert_same_vectors((engine, reference))
    states = reference.encode(TEXTS, output_value="token_embeddings", convert_to_numpy=False)
    for actual, expected in zip(engine.token_embed(TEXTS, normalize=False).embeddings, states, strict=True):
        assert_equal(actual, expected.numpy())


@pytest.mark.contract
@pytest.mark.parametrize("skipped", [1, 2, 3])
def test_every_module_of_a_chain_matters(skipped, load, tmp_path):
    """Leaving a module out changes the vectors."""
    modules = (Pooling(), Normalize(), LayerNorm(), Dense(out_features=48, activation="Identity"))
    engine, _ = load(Layout(modules=modules))
    rest = tuple(module for i, module in enumerate(modules) if i != skipped)
    folder = write_checkpoint(tmp_path / "less", sentence_transformers=Layout(modules=rest))
    with Engine(folder, dtype="float32", device="cpu") as less:
        moved = difference(less.embed(TEXTS).embeddings, engine.embed(TEXTS).embeddings)
    assert moved > VISIBLE


# --- Normalization, Matryoshka, output dtypes -----------------------------------------------------------------------


@pytest.mark.contract
@pytest.mark.parametrize("modules", [(Pooling(),), (Pooling(), Normalize()), (Pooling(), DENSE)])
def test_normalize_on_request(modules, load):
    engine, reference = load(Layout(modules=modules))
    assert_equal(engine.embed(TEXTS, normalize=True).embeddings, reference.encode(TEXTS, normalize_embeddings=True))


@pytest.mark.contract
@pytest.mark.parametrize(
    ("modules", "width"), [((Pooling(),), 8), ((Pooling(), Normalize()), 17), ((Pooling(), DENSE, Normalize()), 8)]
)
def test_matryoshka_cuts(width, modules, load):
    """Cut, then normalize, as with ``truncate_dim`` and ``normalize_embeddings``."""
    engine, reference = load(Layout(modules=modules), hf_overrides={"is_matryoshka": True})
    expected = reference.encode(TEXTS, truncate_dim=width, normalize_embeddings=True)
    assert_equal(engine.embed(TEXTS, dimensions=width, normalize=True).embeddings, expected)
    if not engine.spec.normalize:
        plain = reference.encode(TEXTS, truncate_dim=width)
        assert_equal(engine.embed(TEXTS, dimensions=width).embeddings, plain)


@pytest.mark.parametrize("modules", [(Pooling(),), (Pooling(), Normalize()), (Pooling(), DENSE)])
def test_truncate_dim_in_the_files_is_the_width_unless_another_is_asked_for(modules, load):
    """As in sentence-transformers, which however normalizes a cut vector only with ``normalize_embeddings``."""
    engine, reference = load(Layout(modules=modules, truncate_dim=16))
    assert reference.truncate_dim == engine.spec.default_dimensions == 16 and engine.spec.matryoshka
    expected = reference.encode(TEXTS, normalize_embeddings=engine.spec.normalize)
    assert expected.shape[1] == 16
    assert_equal(engine.embed(TEXTS).embeddings, expected)
    assert_equal(engine.embed(TEXTS, dimensions=16).embeddings, expected)
    assert_equal(np.stack(list(engine.embed_iter(TEXTS))), expected)
    whole = engine.embed(TEXTS, dimensions=engine.spec.dimensions).embeddings
    assert_equal(whole, reference.encode(TEXTS, truncate_dim=engine.spec.dimensions))
    other = engine.embed(TEXTS, dimensions=8, normalize=True).embeddings
    assert_equal(other, reference.encode(TEXTS, truncate_dim=8, normalize_embeddings=True))


@pytest.mark.parametrize(("width", "options"), [(48, {}), (1000, {}), (16, {"hf_overrides": {"is_matryoshka": False}})])
def test_a_truncate_dim_that_cuts_nothing(width, options, load):
    engine, _ = load(Layout(truncate_dim=width), **options)
    assert engine.spec.default_dimensions is None and engine.embed(TEXTS).embeddings.shape[1] == 48


@pytest.mark.parametrize("width", [0, "16", True])
def test_a_truncate_dim_that_is_no_width(width, load):
    with pytest.raises(ModelLoadError, match="truncate_dim .* is no width"):
        load(Layout(truncate_dim=width))


def test_declared_dimensions_and_no_others(load):
    engine, _ = load(Layout(), config={"matryoshka_dimensions": [32, 8, 16]})
    assert engine.spec.matryoshka_dimensions == (8, 16, 32)
    assert engine.embed(TEXTS, dimensions=16).embeddings.shape == (len(TEXTS), 16)
    with pytest.raises(InvalidDimensionsError, match=r"choose one of 8, 16, 32, 48"):
        engine.embed(TEXTS, dimensions=17)


def test_an_untrained_checkpoint_is_not_cut(load):
    engine, _ = load(Layout())
    with pytest.raises(InvalidDimensionsError, match="is_matryoshka"):
        engine.embed(TEXTS, dimensions=16)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "binary", "ubinary"])
def test_output_dtypes(dtype, load):
    """Equal codes for the same rows; between the two engines' rows, a code may differ by one."""
    from sentence_transformers.util import quantize_embeddings

    engine, reference = load(Layout(modules=(Pooling(), Dense(out_features=21))))
    rows, actual = engine.embed(TEXTS).embeddings, engine.embed(TEXTS, output_dtype=dtype).embeddings
    expected = quantize_embeddings(rows, precision=dtype)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(actual, expected)
    theirs = reference.encode(TEXTS, precision=dtype)
    if dtype.endswith("int8"):
        assert np.abs(actual.astype(int) - theirs.astype(int)).max() <= 1
    else:
        assert (actual == theirs).mean() > 0.99


@pytest.mark.parametrize("key", ["config_args", "config_kwargs"])
def test_fields_of_config_json_that_the_transformer_module_replaces(key, tmp_path):
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout(style="old"))
    with Engine(folder, dtype="float32") as engine:
        plain = engine.embed(TEXTS).embeddings
    edit_json(folder / "sentence_bert_config.json", **{key: {"hidden_act": "relu", "trust_remote_code": True}})
    expected = pytest.importorskip("sentence_transformers").SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    with Engine(folder, dtype="float32") as engine:
        found = engine.embed(TEXTS).embeddings
    assert_equal(found, expected)
    assert difference(found, plain) > VISIBLE
