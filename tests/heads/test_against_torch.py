"""The native heads give what those in torch give, on the same hidden states, for every output of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import Dense, LayerNorm, Layout, Normalize, Pooling, drop_tensor, edit_json, write_checkpoint
from tests.tiny.heads import (
    headed,
    linears,
    write_cross_encoder,
    write_language_model,
    write_m3,
    write_pylate,
    write_reward,
    write_splade,
    write_stanford,
)
from tests.tiny.layouts import OLD_MODES

from millpond.backends.backend import OutputSpec
from millpond.backends.native.heads import activations
from millpond.backends.native.heads.heads import Reading
from millpond.backends.native.model import build_heads, missing_head
from millpond.backends.native.packing.weight_packer import NotSupported
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.pooling.classifier import build_classifier
from millpond.backends.torch.pooling.pooler import Pooler, PoolerCall
from millpond.backends.torch.pooling.sparse import build_sparse, build_token_vectors
from millpond.checkpoints.build_spec import backbone_width
from millpond.checkpoints.description import ModelDescription
from millpond.engine import loading
from millpond.errors import WeightMismatchError
from millpond.native import library
from millpond.values.config import EngineConfig

pytestmark = [
    pytest.mark.contract,
    pytest.mark.torch,
    pytest.mark.skipif(library.kernel_table() is None, reason="no compiled kernels"),
]

TOLERANCE = 1e-5
VISIBLE = 1e-3  # a mistake must change a result by more than this
CPU = torch.device("cpu")
LENGTHS = (1, 3, 70, 1, 12, 200, 5)
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}
ENTRIES = (7, 3, 11)

Results = Mapping[OutputSpec, list[np.ndarray]]


def described(folder: Path, **options: Any) -> ModelDescription:
    return loading._read(EngineConfig(model=str(folder), **options))[0]


def outputs_of(description: ModelDescription) -> set[OutputSpec]:
    """Every output that the engine may ask for."""
    tasks = loading._outputs(description.detected)
    outputs = {tasks[task] for task in description.spec.tasks}
    if description.detected.classifier is None:  # a ColBERT's score is computed from its vectors
        outputs -= {OutputSpec(kind="logits")}
    if description.has_language_head:
        outputs.add(OutputSpec(kind="head_rows", token_ids=ENTRIES))
    if OutputSpec(kind="token_logits") in outputs and len(description.spec.labels) > 1:
        outputs.add(OutputSpec(kind="token_logits", token_ids=(1,)))
    return outputs


class Batch:
    """Random hidden states of several texts, of which the longest begin with a prompt."""

    def __init__(self, width: int, *, skips: bool = False, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.hidden = random.standard_normal((sum(LENGTHS), width)).astype(np.float32)
        self.ids = random.integers(3, 40, sum(LENGTHS)).astype(np.int32)
        self.bounds = np.concatenate(([0], np.cumsum(LENGTHS))).astype(np.int32)
        self.skip = np.array([min(4, length - 1) for length in LENGTHS], np.int32) if skips else None


def natively(description: ModelDescription, batch: Batch, threads: int = 2) -> Results:
    heads = build_heads(description, "float32")
    reading = Reading(
        heads=heads, hidden=batch.hidden, bounds=batch.bounds, skip=batch.skip, ids=batch.ids, threads=threads
    )
    return {output: list(reading.read(output)) for output in outputs_of(description)}


@torch.inference_mode()
def in_torch(description: ModelDescription, batch: Batch) -> Results:
    layout, config = description.layout, description.checkpoint.config
    head, sparse, vectors = description.detected.classifier, layout.sparse, layout.token_vectors
    width = backbone_width(config)
    pooler = Pooler(
        description.pooling,
        token_heads=layout.token_heads,
        heads=layout.heads,
        device=CPU,
        classifier=None if head is None else build_classifier(head, width=width, device=CPU),
        sparse=None if sparse is None else build_sparse(sparse, config, width=width, device=CPU),
        token_vectors=None if vectors is None else build_token_vectors(vectors, width=width, device=CPU),
        language_head=layout.transformer if description.has_language_head else None,
    )
    call = PoolerCall(
        pooler,
        torch.from_numpy(batch.hidden),
        segments=Segments.of(LENGTHS),
        skip=None if batch.skip is None else torch.from_numpy(batch.skip),
        input_ids=torch.from_numpy(batch.ids).long(),
    )
    return {output: list(call.read(output)) for output in outputs_of(description)}


def difference(found: Results, expected: Results) -> float:
    """The largest difference, relative to the largest number of an output if that is more than 1."""
    assert found.keys() == expected.keys()
    worst = 0.0
    for output, rows in expected.items():
        if output.kind == "sparse":  # a weight near 0 may be in one of them only
            rows, others = _dense(rows), _dense(found[output])
        else:
            others = found[output]
            assert [row.shape for row in others] == [row.shape for row in rows], output
            assert all(row.dtype == np.float32 for row in others)
        scale = max(1.0, max(float(np.abs(row).max(initial=0)) for row in rows))
        apart = [float(np.abs(a - b).max(initial=0)) for a, b in zip(others, rows, strict=True)]
        worst = max(worst, max(apart) / scale)
    return worst


def _dense(rows: list[np.ndarray]) -> list[np.ndarray]:
    dense = [np.zeros(1000, np.float32) for _ in rows]
    for entries, row in zip(rows, dense, strict=True):
        assert (np.diff(entries[:, 0]) > 0).all()
        assert (entries[:, 1] > 0).all()
        row[entries[:, 0].astype(int)] = entries[:, 1]
    assert sum(map(len, rows)) > 0
    return dense


def assert_same(folder: Path, *, skips: bool = False, **options: Any) -> ModelDescription:
    description = described(folder, **options)
    batch = Batch(backbone_width(description.checkpoint.config), skips=skips)
    found, expected = natively(description, batch), in_torch(description, batch)
    assert missing_head(description) is None
    assert difference(found, expected) <= TOLERANCE
    assert difference(natively(description, batch, threads=1), found) == 0
    other = Batch(batch.hidden.shape[1], skips=skips, seed=1)  # negative control
    assert difference(natively(description, other), expected) > VISIBLE
    return description


# --- sentence-transformers' modules ---------------------------------------------------------------------------------


def pipeline(*modules: Any, **options: Any) -> Callable[[Path], Path]:
    return partial(write_checkpoint, sentence_transformers=Layout(modules=modules), **options)


TOKENS: dict[str, Any] = {"stage": "token_embeddings", "activation": "Identity"}
PIPELINES: dict[str, Callable[[Path], Path]] = {
    **{mode: pipeline(Pooling(modes=(mode,))) for mode in OLD_MODES},
    "concatenated": pipeline(Pooling(modes=tuple(OLD_MODES))),
    "dense": pipeline(Pooling(), Dense(out_features=33)),
    "dense-without-bias": pipeline(Pooling(), Dense(out_features=7, bias=False, activation="GELU")),
    "dense-plus-input": pipeline(Pooling(), Dense(out_features=48, residual=True)),
    "dense-plus-projected-input": pipeline(Pooling(), Dense(out_features=20, residual=True)),
    "norm-and-unit": pipeline(Pooling(modes=("cls",)), LayerNorm(), Normalize(), Dense(out_features=24)),
    "token-heads": pipeline(Dense(out_features=40, **TOKENS), Dense(out_features=24, **TOKENS), Pooling()),
}


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("name", PIPELINES)
def test_modules(name, skips, tmp_path):
    assert_same(PIPELINES[name](tmp_path / "model"), skips=skips)


@pytest.mark.filterwarnings("ignore:Implicit dimension")
@pytest.mark.parametrize("name", activations._TORCH)
def test_every_activation_of_a_dense(name, tmp_path):
    assert_same(pipeline(Pooling(), Dense(out_features=24, activation=name))(tmp_path / "model"))


@pytest.mark.parametrize("name", activations._TRANSFORMERS)
def test_every_activation_of_a_config(name):
    from transformers.activations import ACT2FN

    x = np.concatenate((np.linspace(-12, 12, 4001), [-40, 40])).astype(np.float32)[None]
    expected = ACT2FN[name](torch.from_numpy(x)).detach().numpy()
    found = activations.activation_of(name)(x.copy())
    assert (np.abs(found - expected) <= 2e-6 * np.maximum(1, np.abs(expected))).all()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_torch_has_no_other_activation():
    """All modules of torch.nn that need no arguments and give as many columns, but for those with weights."""
    same = set()
    for name in dir(torch.nn):
        module = getattr(torch.nn, name)
        if isinstance(module, type) and issubclass(module, torch.nn.Module) and name != "Sequential":
            try:
                made = module().eval()
                kept = made(torch.ones(3, 4)).shape == (3, 4)
            except (TypeError, ValueError, RuntimeError, NotImplementedError):
                continue
            if kept and not any(True for _ in made.parameters()):
                same.add(name)
    assert same - activations._TORCH.keys() == {"Dropout1d", "Dropout2d", "Dropout3d", "Flatten"}
    assert activations._TORCH.keys() <= same


def test_modules_whose_files_disagree(tmp_path):
    folder = PIPELINES["dense"](tmp_path / "model")
    edit_json(folder / "2_Dense" / "config.json", activation_function="torch.nn.modules.activation.PReLU")
    assert "PReLU" in str(missing_head(described(folder)))
    with pytest.raises(NotSupported, match="PReLU"):
        build_heads(described(folder), "float32")
    edit_json(folder / "2_Dense" / "config.json", activation_function="torch.nn.Tanh", out_features=34)
    with pytest.raises(WeightMismatchError, match=r"linear.weight .* \[33, 48\]"):
        build_heads(described(folder), "float32")
    norm = PIPELINES["norm-and-unit"](tmp_path / "norm")
    edit_json(norm / "2_LayerNorm" / "config.json", dimension=1)
    with pytest.raises(WeightMismatchError, match="norms 1 columns, and gets 48"):
        build_heads(described(norm), "float32")
    edit_json(folder / "2_Dense" / "config.json", out_features=33, bias=False)
    with pytest.raises(WeightMismatchError, match=r"linear.bias"):
        build_heads(described(folder), "float32")


# --- Classifiers, rerankers and rewards -----------------------------------------------------------------------------

SEQUENCE = (
    *("bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert", "electra", "albert", "deberta-v2"),
    *("eurobert", "nomic", "gte", "gte-en", "gte-snowflake", "jina"),
    *("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"),
)
PLAIN_JINA = {"lora_adaptations": None, "matryoshka_dimensions": None}


@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification"])
@pytest.mark.parametrize("family", SEQUENCE)
def test_classifiers(family, kind, tmp_path):
    if (family, kind) == ("gemma3", "TokenClassification"):
        pytest.skip("transformers has no such class")
    config = PLAIN_JINA if family == "jina" else {}
    assert_same(write_checkpoint(tmp_path / "model", family, head=kind, config=config))


@pytest.mark.parametrize("pooling", ["bos", "mean", "late"])
def test_pooled_states_and_pooled_logits(pooling, tmp_path):
    config = {"clf_pooling": pooling}
    description = assert_same(
        write_checkpoint(tmp_path / "model", "eurobert", head="SequenceClassification", config=config)
    )
    head = description.detected.classifier
    assert head is not None and head.pool_logits == (pooling == "late")


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu", "tanh"])
def test_an_activation_that_config_json_names(activation, tmp_path):
    config = {"classifier_activation": activation, "classifier_pooling": "mean"}
    assert_same(write_checkpoint(tmp_path / "model", "modernbert", head="SequenceClassification", config=config))


REWARDS = ("InternLM2ForRewardModel", "Qwen2ForRewardModel", "Qwen2ForProcessRewardModel")
SCORED = headed("llama", {}, "LlamaForSequenceClassification", {"score.weight": (2, 48)}, prefix="model.")
PROBABILITIES = headed(
    "gpt2",
    {},
    "GPT2ForSequenceClassification",
    {"score.weight": (1, 48)},
    prefix="transformer.",
    config={"id2label": {"0": "a"}},
)
HEADED: dict[str, Callable[[Path], Path]] = {
    **{name: partial(write_reward, architecture=name) for name in REWARDS},
    "cross-encoder": write_cross_encoder,
    "score": SCORED,
    "one-score": PROBABILITIES,
    "v-head": headed("llama", {}, "LlamaForRewardModeling", linears(("v_head", 1, 48)), prefix="model."),
    "pooled-logits": pipeline(Pooling(modes=("cls",)), Dense(out_features=1, activation="Identity")),
}


@pytest.mark.parametrize("name", HEADED)
def test_rewards_and_scores(name, tmp_path):
    assert_same(HEADED[name](tmp_path / "model"))


@pytest.mark.parametrize("method", ["from_2_way_softmax", "no_post_processing"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_language_model_scores_by_some_of_its_vocabulary(family, method, tmp_path):
    """Gemma 2 caps its logits."""
    folder = write_language_model(tmp_path / "model", family, ("<no>", "<yes>"))
    overrides = {"classifier_from_token": ["<no>", "<yes>"], "method": method}
    description = assert_same(folder, hf_overrides=overrides)
    assert {output.kind for output in outputs_of(description)} >= {"logits", "head_rows"}


def test_an_untied_head_is_read_and_not_the_embeddings(tmp_path):
    folder = write_language_model(tmp_path / "model", "llama", (), config={"tie_word_embeddings": False})
    names = load_file(folder / "model.safetensors")
    assert not torch.equal(names["lm_head.weight"], names["model.embed_tokens.weight"])
    assert_same(folder)
    drop_tensor(folder, "lm_head.weight")
    description = described(folder)
    with pytest.raises(WeightMismatchError, match="no language-model head"):
        build_heads(description, "float32").vocabulary_rows(ENTRIES)


def test_rows_of_the_vocabulary_are_read_once_and_bounded(tmp_path):
    heads = build_heads(described(write_language_model(tmp_path / "model", "llama", ())), "float32")
    assert heads.vocabulary_rows(ENTRIES) is heads.vocabulary_rows(ENTRIES)
    with pytest.raises(WeightMismatchError, match="token 99999 is past"):
        heads.vocabulary_rows((99999,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["cross-encoder", "pooled-logits", "Qwen2ForRewardModel"])
def test_weights_stored_in_another_precision(name, dtype, tmp_path):
    folder = HEADED[name](tmp_path / "model")
    for path in folder.rglob("*.safetensors"):
        tensors = {key: tensor.to(dtype) for key, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    assert_same(folder)


def test_classifiers_whose_files_disagree(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "bert", head="SequenceClassification")
    edit_json(folder / "config.json", id2label={"0": "a", "1": "b"})
    with pytest.raises(WeightMismatchError, match="names 2 labels .* has 3"):
        build_heads(described(folder), "float32")
    tensors = load_file(folder / "model.safetensors")
    tensors["classifier.weight"] = tensors["classifier.weight"][:2, :40].contiguous()
    tensors["classifier.bias"] = tensors["classifier.bias"][:2].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightMismatchError, match="classifier takes 40 features, and gets 48"):
        build_heads(described(folder), "float32")
    drop_tensor(folder, "classifier.bias")
    with pytest.raises(WeightMismatchError, match=r"no tensor classifier.bias"):
        build_heads(described(folder), "float32")


# --- Late interaction and sparse weights ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [write_stanford, write_pylate, partial(write_pylate, widths=(40, 48), residual=True), write_m3],
    ids=["stanford", "pylate", "several-projections", "bge-m3"],
)
def test_token_vectors(write, tmp_path):
    kinds = {output.kind for output in outputs_of(assert_same(write(tmp_path / "model")))}
    assert "tokens" in kinds


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "xlm-roberta", "mpnet", "modernbert"])
def test_splade(family, strategy, activation, tmp_path):
    """Of 48 columns, and of a multiple of 32."""
    names = {"dim": 64, "n_heads": 2, "hidden_dim": 96} if family == "distilbert" else WIDE
    for config in ({}, names):
        folder = tmp_path / str(len(config))
        assert_same(write_splade(folder, family, strategy=strategy, activation=activation, config=config))


def test_splade_in_groups_of_texts(tmp_path, monkeypatch):
    """Few pooled rows are in memory at once."""
    from millpond.backends.native.heads import splade

    monkeypatch.setattr(splade, "_MOST_POOLED", 4 * 1000)
    assert_same(write_splade(tmp_path / "model", config=WIDE))


def test_splade_of_an_untied_decoder_and_older_names(tmp_path):
    folder = write_splade(tmp_path / "model", config=WIDE | {"tie_word_embeddings": False})
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    assert_same(folder)
    drop_tensor(folder, "cls.predictions.transform.dense.weight")
    with pytest.raises(WeightMismatchError, match="no masked language model"):
        build_heads(described(folder), "float32")


def test_a_splade_that_the_kernels_do_not_compute(tmp_path):
    description = described(write_splade(tmp_path / "model", config={"hidden_act": "mish"}))
    assert "mish" in str(missing_head(description))
    with pytest.raises(NotSupported, match="mish"):
        build_heads(description, "float32")


def test_splade_in_bfloat16(tmp_path):
    if not getattr(library.kernel_table(), "vocabulary_bfloat16", None):
        pytest.skip("no bfloat16")
    description = described(write_splade(tmp_path / "model", config=WIDE))
    batch = Batch(64)
    heads = build_heads(description, "bfloat16")
    reading = Reading(heads=heads, hidden=batch.hidden, bounds=batch.bounds, skip=None, ids=batch.ids, threads=2)
    found, expected = (
        {output: list(reading.read(output)) for output in outputs_of(description)},
        in_torch(description, batch),
    )
    assert TOLERANCE < difference(found, expected) < 0.03
