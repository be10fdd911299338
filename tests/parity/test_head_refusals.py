"""Heads and tasks that do not fit are refused with a message that names the problem and the way out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.parity.rerankers import FRAME
from tests.parity.test_refusals import refused
from tests.tiny import drop_tensor, edit_json, write_checkpoint
from tests.tiny.checkpoints import save_weights
from tests.tiny.heads import write_language_model, write_reward

from millpond.engine.engine import Engine
from millpond.errors import InvalidRequestError, ModelLoadError, UnsupportedTaskError, WeightMismatchError


def load(folder: Path, **options: object) -> Engine:
    return Engine(folder, dtype="float32", device="cpu", **options)  # type: ignore[arg-type]


def cut_tensor(folder: Path, name: str, *, rows: int | None = None, columns: int | None = None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name][:rows, :columns].contiguous()
    save_weights(tensors, folder)


# --- Tensors --------------------------------------------------------------------------------------------------------

SEQUENCE_HEADS = [
    ("bert", "bert.pooler.dense.weight"),
    ("bert", "classifier.weight"),
    ("bert", "classifier.bias"),
    ("roberta", "classifier.dense.weight"),
    ("roberta", "classifier.out_proj.bias"),
    ("distilbert", "pre_classifier.weight"),
    ("modernbert", "head.dense.weight"),
    ("modernbert", "head.norm.weight"),
    ("modernbert", "classifier.bias"),
    ("albert", "albert.pooler.weight"),
    ("deberta-v2", "pooler.dense.bias"),
    ("eurobert", "dense.weight"),
    ("nomic", "bert.pooler.dense.weight"),
    ("gte", "new.pooler.dense.bias"),
    ("llama", "score.weight"),
    ("gpt2", "score.weight"),
]


def named(tensor: str) -> str:
    """The name without the backbone's prefix, which depends on the class."""
    return re.escape(re.sub(r"^(bert|albert|new)\.", "", tensor))


@pytest.mark.parametrize(("family", "tensor"), SEQUENCE_HEADS)
def test_a_missing_tensor_of_a_sequence_head(family, tensor, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family, head="SequenceClassification")
    drop_tensor(folder, tensor)
    refused(folder, WeightMismatchError, rf"has no tensor {named(tensor)}, which its head needs.*convert=\"embed\"")


@pytest.mark.parametrize(
    ("family", "tensor"),
    [("bert", "classifier.weight"), ("modernbert", "head.dense.weight"), ("qwen3", "score.weight")],
)
def test_a_missing_tensor_of_a_token_head(family, tensor, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family, head="TokenClassification")
    drop_tensor(folder, tensor)
    refused(folder, WeightMismatchError, f"has no tensor {named(tensor)}, which its head needs")


@pytest.mark.parametrize(
    ("architecture", "tensor"),
    [
        ("InternLM2ForRewardModel", "v_head.weight"),
        ("Qwen2ForRewardModel", "score.2.weight"),
        ("Qwen2ForProcessRewardModel", "score.0.bias"),
    ],
)
def test_a_missing_tensor_of_a_reward_head(architecture, tensor, tmp_path):
    folder = write_reward(tmp_path / "model", architecture)
    drop_tensor(folder, tensor)
    refused(folder, WeightMismatchError, f"has no tensor {named(tensor)}, which its head needs")


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification"])
@pytest.mark.parametrize(
    ("family", "tensor"), [("bert", "classifier"), ("modernbert", "classifier"), ("llama", "score")]
)
def test_a_head_of_another_width_than_its_labels(family, tensor, head, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family, head=head, labels=3)
    edit_json(folder / "config.json", id2label={"0": "low", "1": "high"}, label2id={"low": 0, "high": 1})
    refused(folder, WeightMismatchError, r"names 2 labels \(low, high.*the head has 3.*belong together")
    assert f"{tensor}.weight" in load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "tensor"), [("bert", "classifier"), ("llama", "score"), ("modernbert", "head.dense")]
)
def test_a_head_for_other_hidden_states(family, tensor, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family, head="SequenceClassification")
    cut_tensor(folder, f"{tensor}.weight", columns=47)
    refused(folder, WeightMismatchError, rf"{tensor} takes 47 features, and gets 48")


def test_a_process_reward_model_with_one_column(tmp_path):
    folder = write_reward(tmp_path / "model", "Qwen2ForProcessRewardModel")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: tensors[name][:1].contiguous() for name in ("score.2.weight", "score.2.bias")}
    save_weights(tensors, folder)
    refused(folder, WeightMismatchError, r"names 2 labels \(bad, good.*the head has 1")


# --- Configs --------------------------------------------------------------------------------------------------------


def test_labels_with_a_gap(tmp_path):
    folder = write_checkpoint(tmp_path / "model", head="SequenceClassification", labels=2)
    edit_json(folder / "config.json", id2label={"0": "low", "2": "high"})
    refused(folder, ModelLoadError, r"indices \[0, 2\].*without a gap")
    edit_json(folder / "config.json", id2label={"zero": "low", "one": "high"})
    refused(folder, ModelLoadError, "zero")


@pytest.mark.parametrize(
    ("family", "key", "known"),
    [
        ("eurobert", "classifier_pooling", "bos, mean, late"),
        ("eurobert", "clf_pooling", "bos, mean, late"),
        ("llama-bidirectional", "pooling", "avg, mean, cls, last"),
    ],
)
def test_an_unknown_pooling(family, key, known, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family, head="SequenceClassification")
    edit_json(folder / "config.json", **{key: "median"})
    refused(folder, ModelLoadError, f"pooling 'median' of config.json is unknown; {known} are")


def test_a_pooling_of_null_is_unknown_to_llama(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "llama-bidirectional", head="SequenceClassification")
    edit_json(folder / "config.json", pooling=None)
    refused(folder, ModelLoadError, "pooling None of config.json is unknown")


@pytest.mark.parametrize(
    ("fields", "match"),
    [({"classifier_pooling": "median"}, "classifier_pooling"), ({"hidden_size": "wide"}, "hidden_size")],
)
def test_a_value_that_the_class_does_not_know(fields, match, tmp_path):
    """transformers raises while it loads the tokenizer or the backbone."""
    folder = write_checkpoint(tmp_path / "model", "modernbert", head="SequenceClassification")
    edit_json(folder / "config.json", **fields)
    refused(folder, ModelLoadError, f"config.json does not fit .*(?s:.)*{match}")
    with pytest.raises(ModelLoadError, match=match):
        load(write_checkpoint(tmp_path / "other", "modernbert", head="SequenceClassification"), hf_overrides=fields)


def test_an_unknown_activation_inside_a_head(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "modernbert", head="SequenceClassification")
    edit_json(folder / "config.json", classifier_activation="splash")
    refused(folder, ModelLoadError, "activation 'splash' of its head is unknown")


def test_several_poolings_at_once(tmp_path):
    folder = write_checkpoint(tmp_path / "model", head="SequenceClassification")
    with pytest.raises(ModelLoadError, match=r"pooling='cls\+mean'.*pools one way"):
        load(folder, pooling="cls+mean")


# --- Conversions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "wrapped"), [("bert", False), ("bert", True), ("qwen3", False), ("qwen3", True)])
def test_converting_a_model_without_a_head(family, wrapped, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family, wrapped=wrapped)
    with pytest.raises(WeightMismatchError, match=r"is it a classifier\?.*convert=\"embed\".*classifier_from_token"):
        load(folder, convert="classify")


def test_a_token_that_the_vocabulary_does_not_have(tmp_path):
    folder = write_language_model(tmp_path / "Qwen3-Reranker-0.6B", "qwen3", ("no",), template="$A")
    match = r"scores by the token 'yes', which its vocabulary does not have.*hf_overrides=\{\"classifier_from_token\""
    refused(folder, ModelLoadError, match)
    with pytest.raises(ModelLoadError, match="scores by the token 'perhaps'"):
        load(folder, hf_overrides={"classifier_from_token": ["no", "perhaps"]})
    with load(folder, hf_overrides={"classifier_from_token": ["no"]}) as engine:
        assert "score" in engine.tasks


def test_answers_of_a_model_without_its_head(tmp_path):
    """Its input embeddings have the same shape, but with untied weights they are not the head."""
    folder = write_language_model(tmp_path / "Qwen3-Reranker-4B", "qwen3", ("no", "yes"), template="$A")
    edit_json(folder / "config.json", tie_word_embeddings=False)
    refused(folder, WeightMismatchError, "no language-model head")


@pytest.mark.parametrize("side", ["query", "document"])
def test_a_template_without_a_slot(side, tmp_path):
    folder = write_checkpoint(tmp_path / "model", head="SequenceClassification", labels=1)
    other = {"query": "document", "document": "query"}[side]
    template = f"{{{{ (messages | selectattr('role', 'eq', '{other}') | first).content }}}}"
    with pytest.raises(InvalidRequestError, match=f"has no slot for the {side}"):
        load(folder, score_template=template)
    with pytest.raises(InvalidRequestError, match="is no Jinja|cannot be rendered"):
        load(folder, score_template="{{ messages ")


def test_a_template_for_a_model_that_reads_no_pairs(tmp_path):
    with pytest.raises(InvalidRequestError, match="score_template means nothing to .*; leave it out"):
        load(write_checkpoint(tmp_path / "model"), score_template=FRAME)


# --- Tasks ----------------------------------------------------------------------------------------------------------


def embedder(folder: Path) -> Path:
    return write_checkpoint(folder)


def classifier(folder: Path) -> Path:
    return write_checkpoint(folder, head="SequenceClassification")


def one_label(folder: Path) -> Path:
    return write_checkpoint(folder, head="SequenceClassification", labels=1)


def token_classifier(folder: Path) -> Path:
    return write_checkpoint(folder, head="TokenClassification")


def reward_model(folder: Path) -> Path:
    return write_reward(folder, "Qwen2ForRewardModel")


def language_model(folder: Path) -> Path:
    return write_checkpoint(folder, "qwen3", wrapped=True)


EMBEDS = "serves embed, token_embed, not"
CLASSIFIES = "serves classify, token_classify, not"
WRONG = [
    (embedder, "classify", rf"{EMBEDS} classify; load another model, or this one with convert=\"classify\""),
    (embedder, "token_classify", f"{EMBEDS} token_classify; load another model"),
    (embedder, "reward", f"{EMBEDS} reward; load another model"),
    (embedder, "sparse_embed", f"{EMBEDS} sparse_embed; load another model"),
    (classifier, "embed", rf"{CLASSIFIES} embed; .*or this one with convert=\"embed\""),
    (classifier, "token_embed", rf"{CLASSIFIES} token_embed; .*or this one with convert=\"embed\""),
    (
        classifier,
        "score",
        rf"{CLASSIFIES} score; .*\(a score is one number, and this head has 3: level_0, level_1, .*\)",
    ),
    (classifier, "reward", f"{CLASSIFIES} reward; load another model"),
    (one_label, "embed", r"serves classify, reward, score, token_classify, not embed; .*convert=\"embed\""),
    (token_classifier, "classify", "serves token_classify, not classify; load another model"),
    (token_classifier, "score", "serves token_classify, not score"),
    (reward_model, "classify", "serves embed, reward, token_classify, token_embed, not classify"),
    (language_model, "reward", f"{EMBEDS} reward; load another model, or pass returned_token_ids"),
    (language_model, "token_classify", f"{EMBEDS} token_classify; load another model"),
]


@pytest.mark.parametrize(("write", "task", "match"), WRONG, ids=lambda value: getattr(value, "__name__", None))
def test_a_task_of_another_model(write, task, match, tmp_path):
    """The message lists the checkpoint's tasks and the way out."""
    with load(write(tmp_path / "model")) as engine:
        with pytest.raises(UnsupportedTaskError, match=match):
            engine.score("a", "b") if task == "score" else getattr(engine, task)(["a"])
        assert task not in engine.tasks


def test_the_suggested_option_works(tmp_path):
    """With ``convert="embed"`` a classifier's backbone embeds; without it, the checkpoint is a classifier again."""
    folder = classifier(tmp_path / "model")
    with load(folder, convert="embed") as engine:
        assert engine.tasks == {"embed", "token_embed"}
        assert engine.embed(["a"]).embeddings.shape == (1, 48)
    edit_json(folder / "config.json", architectures=["BertModel"])
    with load(folder) as engine:
        assert engine.tasks == {"embed", "token_embed"}
    with load(folder, convert="classify") as engine:
        assert engine.tasks == {"classify", "token_classify"}


@pytest.mark.parametrize(
    ("write", "call", "match"),
    [
        (reward_model, {"step_tag_id": 5}, "which rewards whole texts"),
        (reward_model, {"returned_token_ids": [3]}, "returned_token_ids holds 3; the columns of .* run from 0 to 0"),
        (one_label, {"step_tag_id": 5}, "which rewards whole texts"),
    ],
)
def test_steps_of_a_model_that_has_none(write, call, match, tmp_path):
    with load(write(tmp_path / "model")) as engine, pytest.raises(InvalidRequestError, match=match):
        engine.reward(["a"], **call)
