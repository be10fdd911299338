"""The same folder through sentence-transformers and through millpond: every module, option and layout it may have."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import (
    FAMILIES,
    MAX_TOKENS,
    SENTENCES,
    TEXTS,
    Dense,
    Dropout,
    LayerNorm,
    Layout,
    Normalize,
    Other,
    Pooling,
    edit_json,
    write_checkpoint,
)
from tests.tiny_layouts import OLD_MODES

from millpond.engine.engine import Engine
from millpond.errors import InvalidDimensionsError, ModelLoadError

SentenceTransformer = pytest.importorskip("sentence_transformers").SentenceTransformer

TOLERANCE = 1e-5  # of the largest value of a vector
VISIBLE = 1e-3
TEXTS = list(TEXTS)
MODES = tuple(OLD_MODES)
CONCATENATIONS = (("mean", "cls"), ("cls", "mean"), ("lasttoken", "max", "weightedmean"), MODES)
PROMPTS = {"query": "Find the passage: ", "document": "Passage about water: ", "other": "the miller's "}

Load = Callable[..., tuple[Engine, Any]]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Write a checkpoint and load it twice: (millpond's engine, sentence-transformers' model)."""
    with ExitStack() as stack:

        def load(
            layout: Layout | None, family: str = "bert", *, change: Any = None, **options: Any
        ) -> tuple[Engine, Any]:
            engine_options = {
                key: options.pop(key) for key in ("hf_overrides", "pooling", "normalize") if key in options
            }
            folder = write_checkpoint(tmp_path / "model", family, sentence_transformers=layout, **options)
            if change is not None:
                change(folder)
            engine = stack.enter_context(Engine(folder, dtype="float32", device="cpu", **engine_options))
            return engine, SentenceTransformer(str(folder), device="cpu", local_files_only=True)

        yield load


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference of any vector, as a share of that vector's largest value."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype == np.float32
    return float((np.abs(found - expected).max(1) / np.abs(expected).max(1)).max())


def assert_equal(found: np.ndarray, expected: np.ndarray) -> None:
    worst = difference(found, expected)
    assert worst <= TOLERANCE


def assert_same_vectors(loaded: tuple[Engine, Any], texts: Sequence[str] = TEXTS) -> None:
    engine, reference = loaded
    expected = reference.encode(list(texts))
    assert_equal(engine.embed(texts).embeddings, expected)
    assert engine.spec.dimensions == expected.shape[1]


# --- Families -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["old", "new"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_its_usual_pipeline(family, style, load):
    loaded = load(Layout(modules=FAMILIES[family].modules, style=style, max_seq_length=MAX_TOKENS), family)
    assert_same_vectors(loaded)
    assert loaded[0].spec.max_length == loaded[1].max_seq_length == MAX_TOKENS


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "qwen2-bidirectional", "gemma2"])
def test_a_plain_repository_pooled_as_sentence_transformers_would(family, load):
    """Without modules.json the defaults differ (millpond follows vLLM), so both are told the same."""
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


@pytest.mark.parametrize("style", ["old", "new"])
@pytest.mark.parametrize("mode", MODES)
def test_every_pooling_mode(mode, style, load):
    assert_same_vectors(load(Layout(modules=(Pooling(modes=(mode,)),), style=style)))


@pytest.mark.parametrize("style", ["old", "new"])
@pytest.mark.parametrize("modes", CONCATENATIONS)
def test_concatenations(modes, style, load):
    """New files concatenate in the order of their list, old ones always in the same."""
    assert_same_vectors(load(Layout(modules=(Pooling(modes=modes),), style=style)))


def test_the_pooling_modes_differ(load):
    """Or the tests above would pass with any one of them."""
    engine, _ = load(Layout(modules=(Pooling(modes=MODES),)))
    parts = np.split(engine.embed(TEXTS[1:]).embeddings, len(MODES), axis=1)
    for i, part in enumerate(parts):
        for other in parts[:i]:
            assert difference(part, other) > VISIBLE


@pytest.mark.parametrize("family", ["bert", "llama", "qwen3"])
@pytest.mark.parametrize("modes", [*((mode,) for mode in MODES), CONCATENATIONS[-1]])
def test_the_prompt_left_out_of_the_pooling(modes, family, load):
    """Its tokens are read by the others, but not pooled; with a leading and with a trailing special token."""
    layout = Layout(modules=(Pooling(modes=modes, include_prompt=False),), prompts=PROMPTS)
    engine, reference = load(layout, family)
    texts = TEXTS[1:]  # the first becomes one token with the end of a prompt: see the next test
    for prompt in ("the wheel: ", "x"):
        assert_equal(engine.embed(texts, prompt=prompt).embeddings, reference.encode(texts, prompt=prompt))
    assert_equal(engine.embed(texts, role="query").embeddings, reference.encode_query(texts))
    assert_equal(engine.embed(TEXTS).embeddings, reference.encode(TEXTS))


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_that_swallows_the_text_leaves_its_last_token(mode, tmp_path):
    """sentence-transformers divides nothing by nothing there (zeros, or -inf); no neighbour's token may be read."""
    layout = Layout(modules=(Pooling(modes=(mode,), include_prompt=False),))
    folder = write_checkpoint(tmp_path / "model", "llama", sentence_transformers=layout)
    with Engine(folder, dtype="float32", device="cpu") as engine:
        alone, nothing = engine.token_embed(["a", ""], prompt="the ").embeddings
        assert len(alone) == len(nothing)  # the prompt's space goes to the "a"
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

ACTIVATIONS = ("Tanh", "Identity", "GELU", "ReLU", "Sigmoid", "SiLU", "ELU", "LeakyReLU", "Softsign", "Mish")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_dense_activations(activation, load):
    assert_same_vectors(load(Layout(modules=(Pooling(), Dense(out_features=20, activation=activation)))))


@pytest.mark.parametrize("weights", ["safetensors", "bin"])
@pytest.mark.parametrize("style", ["old", "new"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("width", [48, 20])
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


@pytest.mark.parametrize("weights", ["safetensors", "bin"])
@pytest.mark.parametrize("style", ["old", "new"])
@pytest.mark.parametrize("chain", CHAINS)
def test_chains_of_modules(chain, style, weights, load):
    assert_same_vectors(load(Layout(modules=CHAINS[chain], style=style, weights=weights)))


@pytest.mark.parametrize("activation", ["Identity", "Tanh"])
def test_a_dense_on_token_rows(activation, load):
    dense = Dense(out_features=20, activation=activation, stage="token_embeddings")
    engine, reference = load(Layout(modules=(dense, Pooling(modes=("mean", "max")), Normalize())))
    assert_same_vectors((engine, reference))
    states = reference.encode(TEXTS, output_value="token_embeddings", convert_to_numpy=False)
    for found, expected in zip(engine.token_embed(TEXTS, normalize=False).embeddings, states, strict=True):
        assert_equal(found, expected.numpy())


@pytest.mark.parametrize("skipped", [1, 2, 3])
def test_every_module_of_a_chain_matters(skipped, load, tmp_path):
    """A module left out is noticed."""
    modules = (Pooling(), Normalize(), LayerNorm(), Dense(out_features=48, activation="Identity"))
    engine, _ = load(Layout(modules=modules))
    rest = tuple(module for i, module in enumerate(modules) if i != skipped)
    folder = write_checkpoint(tmp_path / "less", sentence_transformers=Layout(modules=rest))
    with Engine(folder, dtype="float32", device="cpu") as less:
        moved = difference(less.embed(TEXTS).embeddings, engine.embed(TEXTS).embeddings)
    assert moved > VISIBLE


# --- Normalization, Matryoshka, output dtypes -----------------------------------------------------------------------


@pytest.mark.parametrize("modules", [(Pooling(),), (Pooling(), Normalize()), (Pooling(), DENSE)])
def test_normalize_on_request(modules, load):
    engine, reference = load(Layout(modules=modules))
    assert_equal(engine.embed(TEXTS, normalize=True).embeddings, reference.encode(TEXTS, normalize_embeddings=True))


@pytest.mark.parametrize("modules", [(Pooling(),), (Pooling(), Normalize()), (Pooling(), DENSE, Normalize())])
@pytest.mark.parametrize("width", [8, 17])
def test_matryoshka_cuts(width, modules, load):
    """Cut, then normalize: what ``truncate_dim`` with ``normalize_embeddings`` gives."""
    engine, reference = load(Layout(modules=modules), hf_overrides={"is_matryoshka": True})
    expected = reference.encode(TEXTS, truncate_dim=width, normalize_embeddings=True)
    assert_equal(engine.embed(TEXTS, dimensions=width, normalize=True).embeddings, expected)
    if not engine.spec.normalize:
        plain = reference.encode(TEXTS, truncate_dim=width)
        assert_equal(engine.embed(TEXTS, dimensions=width).embeddings, plain)


def test_truncate_dim_in_the_files_says_that_the_checkpoint_may_be_cut(load):
    """sentence-transformers cuts by default then (and does not normalize again); millpond cuts when asked to."""
    engine, reference = load(Layout(modules=(Pooling(), Normalize()), truncate_dim=16))
    assert engine.spec.matryoshka
    assert reference.truncate_dim == 16
    expected = reference.encode(TEXTS, normalize_embeddings=True)
    assert_equal(engine.embed(TEXTS, dimensions=16).embeddings, expected)


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
@pytest.mark.parametrize("modules", [(Pooling(), Normalize()), (Pooling(), Dense(out_features=21))])
def test_output_dtypes(modules, dtype, load):
    """Equal codes for the same rows; from the engine's own rows a code may fall to its neighbour."""
    from sentence_transformers.util import quantize_embeddings

    engine, reference = load(Layout(modules=modules))
    rows, found = engine.embed(TEXTS).embeddings, engine.embed(TEXTS, output_dtype=dtype).embeddings
    expected = quantize_embeddings(rows, precision=dtype)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found, expected)
    theirs = reference.encode(TEXTS, precision=dtype)
    if dtype.endswith("int8"):
        assert np.abs(found.astype(int) - theirs.astype(int)).max() <= 1
    else:
        assert (found == theirs).mean() > 0.99


# --- Prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["old", "new"])
def test_prompts_by_role_name_and_text(style, load):
    engine, reference = load(Layout(prompts=PROMPTS, style=style))
    pairs = [
        (engine.embed(TEXTS), reference.encode(TEXTS)),
        (engine.embed(TEXTS, role="query"), reference.encode_query(TEXTS)),
        (engine.embed(TEXTS, role="document"), reference.encode_document(TEXTS)),
        (engine.embed(TEXTS, prompt_name="other"), reference.encode(TEXTS, prompt_name="other")),
        (engine.embed(TEXTS, prompt="Reeds: "), reference.encode(TEXTS, prompt="Reeds: ")),
        (engine.embed(TEXTS, role="query", prompt=""), reference.encode_query(TEXTS, prompt="")),
    ]
    for found, expected in pairs:
        assert_equal(found.embeddings, expected)
    for i, (_, expected) in enumerate(pairs[:-1]):
        for _, other in pairs[:i]:
            assert difference(expected, other) > VISIBLE  # the last has no prompt, like the first


def test_a_default_prompt_and_how_to_switch_it_off(load):
    engine, reference = load(Layout(prompts=PROMPTS, default_prompt_name="other"))
    assert_equal(engine.embed(TEXTS).embeddings, reference.encode(TEXTS))
    assert_equal(engine.embed(TEXTS).embeddings, reference.encode(TEXTS, prompt_name="other"))
    assert_equal(engine.embed(TEXTS, prompt="").embeddings, reference.encode(TEXTS, prompt=""))
    assert_equal(engine.embed(TEXTS, role="query").embeddings, reference.encode_query(TEXTS))
    assert difference(engine.embed(TEXTS).embeddings, engine.embed(TEXTS, prompt="").embeddings) > VISIBLE


def test_a_role_without_a_prompt_of_its_own(load):
    engine, reference = load(Layout(prompts={"query": "Find: "}))
    assert_equal(engine.embed(TEXTS, role="document").embeddings, reference.encode_document(TEXTS))
    assert_equal(engine.embed(TEXTS, role="query").embeddings, reference.encode_query(TEXTS))


def test_a_role_without_a_prompt_of_its_own_does_not_get_the_default(load):
    engine, reference = load(Layout(prompts={"other": "the miller's "}, default_prompt_name="other"))
    for found, expected in (
        (engine.embed(TEXTS), reference.encode(TEXTS)),
        (engine.embed(TEXTS, role="query"), reference.encode_query(TEXTS)),
        (engine.embed(TEXTS, role="document"), reference.encode_document(TEXTS)),
    ):
        assert_equal(found.embeddings, expected)


@pytest.mark.parametrize("name", ["passage", "corpus"])
def test_a_documents_prompt_by_its_older_names(name, load):
    """What encode_document promises; but sentence-transformers 6.2 finds its own empty "document" prompt first."""
    engine, reference = load(Layout(prompts={"query": "query: ", name: "passage: "}))
    found = engine.embed(TEXTS, role="document").embeddings
    assert_equal(found, reference.encode(TEXTS, prompt_name=name))
    assert difference(found, engine.embed(TEXTS).embeddings) > VISIBLE


def test_token_states_with_a_prompt(load):
    engine, reference = load(Layout(prompts=PROMPTS))
    expected = reference.encode_query(TEXTS, output_value="token_embeddings", convert_to_numpy=False)
    found = engine.token_embed(TEXTS, role="query").embeddings
    for matrix, other in zip(found, expected, strict=True):
        assert_equal(matrix, other.numpy())


# --- Tokenization ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["old", "new"])
@pytest.mark.parametrize("length", [5, 16, 40])
def test_max_seq_length(length, style, load):
    engine, reference = load(Layout(style=style, max_seq_length=length, prompts=PROMPTS))
    assert engine.spec.max_length == reference.max_seq_length == length
    output = engine.embed(TEXTS)
    assert_equal(output.embeddings, reference.encode(TEXTS))
    assert output.truncated.tolist() == [len(reference.tokenizer(text)["input_ids"]) > length for text in TEXTS]
    assert output.usage.prompt_tokens == sum(min(length, len(reference.tokenizer(text)["input_ids"])) for text in TEXTS)
    if length > 16:
        assert_equal(engine.embed(TEXTS, role="query").embeddings, reference.encode_query(TEXTS))


@pytest.mark.parametrize("family", ["bert", "roberta", "mistral"])
def test_a_length_from_the_tokenizer_or_the_positions(family, load):
    """No max_seq_length anywhere: the position table is the limit, RoBERTa's without its padding rows."""
    engine, reference = load(Layout(style="new"), family, tokenizer_limit=None)
    assert engine.spec.max_length == MAX_TOKENS
    reference.max_seq_length = MAX_TOKENS  # sentence-transformers would run RoBERTa past its table
    assert_same_vectors((engine, reference))


@pytest.mark.parametrize("style", ["old", "new"])
def test_do_lower_case(style, load):
    texts = [text.upper() for text in TEXTS] + ["ÉTANG Ärger ΣΊΣΥΦΟΣ"]
    engine, reference = load(Layout(style=style, do_lower_case=True, prompts={"query": "FIND: "}))
    assert_same_vectors((engine, reference), texts)
    assert_equal(engine.embed(texts, role="query").embeddings, reference.encode_query(texts))
    lower = engine.embed([text.lower() for text in texts]).embeddings
    assert_equal(engine.embed(texts).embeddings, lower)


def test_case_matters_without_do_lower_case(load):
    engine, reference = load(Layout())
    upper = [text.upper() for text in TEXTS]
    assert_same_vectors((engine, reference), upper)
    assert difference(engine.embed(upper).embeddings, engine.embed(TEXTS).embeddings) > VISIBLE


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_do_lower_case_beyond_ascii(family, load):
    """Where folding is more than one character for another: a final sigma, a dotted capital I, a capital sharp s."""
    engine, reference = load(Layout(style="old", do_lower_case=True), family)
    assert_same_vectors((engine, reference), ["ΣΊΣΥΦΟΣ ΟΔΟΣ", "İstanbul", "STRAẞE", "ÉTANG"])


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_tokenizer_without_special_tokens(family, load):
    engine, reference = load(Layout(modules=FAMILIES[family].modules), family, template="$A")
    assert_same_vectors((engine, reference))
    found = engine.embed(["", *TEXTS]).embeddings
    assert_equal(found[1:], engine.embed(TEXTS).embeddings)
    assert_equal(found[:1], engine.embed([""]).embeddings)  # a stand-in: sentence-transformers fails here
    assert np.isfinite(found).all()


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "llama", "qwen3"])
def test_odd_texts(family, load):
    """Empty and blank ones, line breaks, emoji, a text that looks like a special token."""
    specials = json.dumps(["[SEP]", "</s>", "<|endoftext|>", "[CLS] a"])
    texts = ["", " ", "\n\t", "a\nb", "🙂 pond", specials, "x" * 300, "a" * 20 + " b", SENTENCES[0] * 4]
    assert_same_vectors(load(Layout(modules=FAMILIES[family].modules), family), texts)


# --- Where the files lie --------------------------------------------------------------------------------------------


def test_the_backbone_in_a_folder_of_its_own(load):
    modules = (Pooling(), DENSE, Normalize())
    assert_same_vectors(load(Layout(modules=modules, style="old", weights="bin", transformer_folder="0_Transformer")))


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_backbone_weights_in_pytorch_model_bin(family, load):
    assert_same_vectors(load(Layout(modules=FAMILIES[family].modules), family, weights="bin"))


@pytest.mark.parametrize("family", ["roberta", "mpnet", "llama", "gemma"])
def test_a_language_models_weights(family, load):
    assert_same_vectors(load(Layout(modules=FAMILIES[family].modules), family, wrapped=True))


@pytest.mark.parametrize("name", ["sentence_roberta_config.json", "sentence_distilbert_config.json"])
def test_older_names_of_the_transformer_settings(name, load):
    def rename(folder):
        (folder / "sentence_bert_config.json").rename(folder / name)

    engine, reference = load(Layout(style="old", max_seq_length=9), change=rename)
    assert engine.spec.max_length == 9
    assert_same_vectors((engine, reference))


@pytest.mark.parametrize("without", ["config_sentence_transformers.json", "sentence_bert_config.json"])
def test_files_that_the_first_versions_did_not_have(without, load):
    assert_same_vectors(load(Layout(style="old"), change=lambda folder: (folder / without).unlink()))


def test_a_pooling_file_without_the_newer_modes(load):
    """As all-MiniLM-L6-v2 has it: four booleans."""

    def shorten(folder):
        path = folder / "1_Pooling" / "config.json"
        content = json.loads(path.read_text())
        kept = [key for key in content if not key.endswith(("weightedmean_tokens", "lasttoken", "include_prompt"))]
        path.write_text(json.dumps({key: content[key] for key in kept}))

    assert_same_vectors(load(Layout(modules=(Pooling(modes=("mean", "max")),), style="old"), change=shorten))


@pytest.mark.parametrize("flags", [{}, {"pooling_mode_cls_token": True}, {"pooling_mode_mean_tokens": False}])
def test_a_pooling_file_that_leaves_booleans_out(flags, load):
    def rewrite(folder):
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **flags}))

    assert_same_vectors(load(Layout(style="old"), change=rewrite))


# --- Refusals: never skipped, and named -----------------------------------------------------------------------------

UNKNOWN = (
    "WordEmbeddings",
    "CNN",
    "LSTM",
    "BoW",
    "WordWeights",
    "WeightedLayerPooling",
    "StaticEmbedding",
    "Router",
    "Asym",
    "CLIPModel",
)


@pytest.mark.parametrize("place", ["first", "before", "after"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_other_modules_are_refused_by_name(name, place, tmp_path):
    other = Other(dotted=f"sentence_transformers.models.{name}")
    modules = (Pooling(), other) if place == "after" else (other, Pooling())
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout(modules=modules, style="old"))
    if place == "first":
        path = folder / "modules.json"
        path.write_text(json.dumps([{**entry, "idx": i} for i, entry in enumerate(json.loads(path.read_text())[1:])]))
    with pytest.raises(ModelLoadError, match=rf"{name}\b.*millpond does not run"):
        Engine(folder, device="cpu")


@pytest.mark.parametrize("dotted", ["custom_st.Transformer", "jinaai/code--custom_st.Pooling", "modeling.MyHead"])
def test_code_of_the_checkpoints_own_is_refused(dotted, tmp_path):
    folder = write_checkpoint(
        tmp_path / "model", sentence_transformers=Layout(modules=(Pooling(), Other(dotted=dotted)))
    )
    with pytest.raises(ModelLoadError, match=dotted):
        Engine(folder, device="cpu")


def test_a_second_pooling_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout(modules=(Pooling(), Pooling())))
    with pytest.raises(ModelLoadError, match="Pooling"):
        Engine(folder, device="cpu")


@pytest.mark.parametrize(
    "activation",
    ["my_package.Swish", "torch.nn.functional.gelu", "torch.nn.modules.activation.MultiheadAttention", "os.system"],
)
def test_an_activation_that_is_no_plain_torch_module_is_refused(activation, tmp_path):
    modules = (Pooling(), Dense(out_features=8, activation=activation))
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout(modules=modules))
    with pytest.raises(ModelLoadError, match=activation.rsplit(".", 1)[-1]):
        Engine(folder, device="cpu")


@pytest.mark.parametrize("style", ["old", "new"])
def test_an_unknown_pooling_mode_is_refused(style, tmp_path):
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout(style=style))
    mode = {"pooling_mode": "median"} if style == "new" else {"pooling_mode_median_tokens": True}
    edit_json(folder / "1_Pooling" / "config.json", **mode)
    with pytest.raises(ModelLoadError, match="median"):
        Engine(folder, device="cpu")


def test_no_pooling_mode_at_all_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout())
    edit_json(folder / "1_Pooling" / "config.json", pooling_mode=[])
    with pytest.raises(ModelLoadError, match="switches every pooling mode off"):
        Engine(folder, device="cpu")


@pytest.mark.parametrize(("place", "name"), [(2, "Dense"), (3, "Normalize")])
def test_a_module_on_rows_of_another_kind_is_refused(place, name, tmp_path):
    """Behind the pooling, a module that reads token rows would have no effect on the vector: not what it says."""
    modules = (Pooling(), Dense(out_features=48), Normalize())
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout(modules=modules))
    rows = dict.fromkeys(("module_input_name", "module_output_name"), "token_embeddings")
    edit_json(folder / f"{place}_{name}" / "config.json", **rows)
    with pytest.raises(ModelLoadError, match=f"{name}.*token_embeddings"):
        Engine(folder, device="cpu")


@pytest.mark.parametrize("kind", ["CrossEncoder", "SparseEncoder", "MultiVectorEncoder"])
def test_other_kinds_of_checkpoints_are_refused(kind, tmp_path):
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout())
    edit_json(folder / "config_sentence_transformers.json", model_type=kind)
    with pytest.raises(ModelLoadError, match=kind):
        Engine(folder, device="cpu")


def test_widths_that_do_not_fit_are_refused(tmp_path):
    layout = replace(Layout(), modules=(Pooling(), Dense(out_features=8)))
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=layout)
    edit_json(folder / "2_Dense" / "config.json", in_features=47)
    with pytest.raises(ModelLoadError, match=r"47 features, and gets 48"):
        Engine(folder, device="cpu")
