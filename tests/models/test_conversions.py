"""The tasks of a checkpoint by its architecture's name and by ``convert``: vLLM's table of conversions, and ours.

Each is loaded and run: the tasks that it lists must be exactly those that answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import SENTENCES, write_checkpoint
from tests.tiny.heads import headed, linears

from millpond import LLM, Engine, UnsupportedTaskError
from millpond.errors import InvalidRequestError, ModelLoadError, UnsupportedArchitectureError, WeightMismatchError

WIDTH = 48
VECTORS = {"embed", "token_embed"}
CLASSES = {"classify", "token_classify"}
ONE_CLASS = CLASSES | {"score", "reward"}
REWARDS = VECTORS | {"reward", "token_classify"}
THREE = {"id2label": {"0": "low", "1": "high", "2": "flood"}, "label2id": {"low": 0, "high": 1, "flood": 2}}
ONE = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
_BERT_POOLER = ("bert.pooler.dense", WIDTH, WIDTH)
_PREFIX = {"bert": "bert.", "gpt2": "transformer."}

Heads = dict[str, tuple[int, ...]]


def called(architecture: str, family: str, heads: Heads | None = None, **options: Any) -> Callable[[Path], Path]:
    """Writes a checkpoint whose config.json names ``architecture``, with or without a head beside the backbone."""
    prefix = options.pop("prefix", _PREFIX.get(family, "model."))
    return headed(family, {}, architecture, heads or {}, prefix=prefix, **options)


def score(rows: int) -> Heads:
    return {"score.weight": (rows, WIDTH)}


def serves(engine: Engine) -> set[str]:
    """The tasks that answer a call."""
    answered = set()
    for task in ("embed", "token_embed", "sparse_embed", "classify", "token_classify", "score", "reward"):
        item: Any = (SENTENCES[0], SENTENCES[1]) if task == "score" else SENTENCES[0]
        try:
            engine.encode([item], task=task)
        except UnsupportedTaskError:
            continue
        answered.add(task)
    return answered


def row(name: str, write: Callable[[Path], Path], tasks: set[str], **options: Any) -> Any:
    return pytest.param(write, options, tasks, id=name)


PLAIN = (
    ("BertModel", "bert", False),
    ("BertEmbeddingModel", "bert", False),
    ("LlamaModel", "llama", False),
    ("Qwen2EmbeddingModel", "qwen2", False),
    ("Qwen3ForTextEncoding", "qwen3", False),
    ("LlamaForCausalLM", "llama", True),
    ("Qwen3ForCausalLM", "qwen3", True),
    ("GPT2LMHeadModel", "gpt2", True),
)
CLASSIFIERS = (
    ("Qwen2ForSequenceClassification", 3, THREE, CLASSES),
    ("Qwen2ForSequenceClassification", 1, ONE, ONE_CLASS),
    ("Qwen2ClassificationModel", 3, THREE, CLASSES),
    ("Qwen2ClassificationModel", 1, ONE, ONE_CLASS),
)
CAUSAL = called("LlamaForCausalLM", "llama", wrapped=True)
SCORED = called("LlamaForCausalLM", "llama", score(1), wrapped=True, config=ONE)
COUNTED = called("LlamaForCausalLM", "llama", linears(("score", 3, WIDTH)), wrapped=True)
YES_NO = called("Qwen3ForCausalLM", "qwen3", wrapped=True, tokens=("no", "yes"), template="$A")
ABC = {"classifier_from_token": ["a", "b", "c"], "method": "no_post_processing"}
BERT1, BERT3 = (linears(_BERT_POOLER, ("classifier", rows, WIDTH)) for rows in (1, 3))
BARE3 = linears(("pooler.dense", WIDTH, WIDTH), ("classifier", 3, WIDTH))
TOKENS3 = linears(("classifier", 3, WIDTH))
QWEN1, QWEN2 = (linears(("score.0", WIDTH, WIDTH), ("score.2", rows, WIDTH)) for rows in (1, 2))
V_HEAD = {"v_head.weight": (1, WIDTH)}
CONVERSIONS = (
    # Bare backbones and language models embed by default.
    *(
        row(f"{name}-{convert}", called(name, family, wrapped=wrapped), VECTORS, convert=convert)
        for (name, family, wrapped), convert in itertools.product(PLAIN, ["auto", "embed"])
    ),
    # Reward models embed too; in millpond they also reward, if there is a head.
    row("reward-without-a-head", called("LlamaRewardModel", "llama"), VECTORS),
    row("reward-score", called("LlamaRewardModel", "llama", score(1)), REWARDS),
    row("reward-modeling", called("LlamaForRewardModeling", "llama", score(1)), REWARDS),
    row("reward-v-head", called("MistralRewardModel", "mistral", V_HEAD), REWARDS),
    row("reward-embed", called("LlamaRewardModel", "llama", score(1)), VECTORS, convert="embed"),
    row("internlm2", called("InternLM2ForRewardModel", "internlm2", V_HEAD), REWARDS),
    row("internlm2-embed", called("InternLM2ForRewardModel", "internlm2", V_HEAD), VECTORS, convert="embed"),
    row("qwen2-reward", called("Qwen2ForRewardModel", "qwen2", QWEN1), REWARDS),
    row("qwen2-process-reward", called("Qwen2ForProcessRewardModel", "qwen2", QWEN2), REWARDS),
    # Classifiers; with one label they score.
    *(
        row(f"{name}-{rows}-{convert}", called(name, "qwen2", score(rows), config=config), tasks, convert=convert)
        for (name, rows, config, tasks), convert in itertools.product(CLASSIFIERS, ["auto", "classify"])
    ),
    row("bert", called("BertForSequenceClassification", "bert", BERT3, config=THREE), CLASSES),
    row("bert-classification-model", called("BertClassificationModel", "bert", BERT1, config=ONE), ONE_CLASS),
    row("bert-tokens", called("BertForTokenClassification", "bert", TOKENS3, config=THREE), {"token_classify"}),
    # A classifier's backbone embeds.
    row("bert-embed", called("BertForSequenceClassification", "bert", BERT3), VECTORS, convert="embed"),
    row("qwen2-embed", called("Qwen2ForSequenceClassification", "qwen2", score(3)), VECTORS, convert="embed"),
    # A head beside a backbone of another class classifies on request.
    row("causal-score-auto", SCORED, VECTORS),
    row("causal-score", SCORED, ONE_CLASS, convert="classify"),
    row("causal-score-counted", COUNTED, CLASSES, convert="classify"),
    row("backbone-with-its-familys-head", called("BertModel", "bert", BARE3, prefix=""), CLASSES, convert="classify"),
    row("backbone-with-a-plain-head", called("BertModel", "bert", score(3), prefix=""), CLASSES, convert="classify"),
    # So do the logits of a few tokens.
    row("two-tokens", YES_NO, ONE_CLASS, convert="classify", hf_overrides={"classifier_from_token": ["no", "yes"]}),
    row("three-tokens", CAUSAL, CLASSES, convert="classify", hf_overrides=ABC),
)


@pytest.mark.parametrize(("write", "options", "tasks"), CONVERSIONS)
def test_exactly_these_tasks(write, options, tasks, tmp_path):
    with Engine(write(tmp_path / "model"), dtype="float32", device="cpu", **options) as engine:
        assert engine.tasks == tasks
        # A model that embeds scores a pair by its vectors.
        assert serves(engine) == tasks | ({"score"} if engine.spec.score_type is not None else set())


def test_without_a_conversion_a_checkpoint_has_its_own_tasks(tmp_path):
    classifier = called("Qwen2ForSequenceClassification", "qwen2", score(3), config=THREE)(tmp_path / "classifier")
    backbone = called("Qwen2Model", "qwen2")(tmp_path / "backbone")
    with LLM(classifier, convert="none") as one, LLM(backbone, convert="none") as other:
        assert (one.engine.tasks, other.engine.tasks) == (CLASSES, VECTORS)


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        ({"task": "embed"}, VECTORS),
        ({"task": "embedding"}, VECTORS),
        ({"task": "classify"}, CLASSES),
        ({"task": "classify", "convert": "embed"}, VECTORS),
        ({"task": "reward"}, CLASSES),
        ({"convert": "reward"}, CLASSES),
        ({"convert": "classify"}, CLASSES),
        ({"runner": "pooling"}, CLASSES),
    ],
)
def test_vllms_older_names_of_a_conversion(options, tasks, tmp_path):
    folder = called("Qwen2ForSequenceClassification", "qwen2", score(3), config=THREE)(tmp_path / "model")
    with LLM(folder, **options) as llm:
        assert llm.engine.tasks == tasks


def test_a_classifier_converted_to_an_embedder_gives_its_backbones_vectors(tmp_path):
    plain = write_checkpoint(tmp_path / "plain", "bert")
    heads = linears(_BERT_POOLER, ("classifier", 3, WIDTH))
    folder = called("BertForSequenceClassification", "bert", heads, config=THREE)(tmp_path / "classifier")
    with (
        Engine(plain, dtype="float32", device="cpu") as one,
        Engine(folder, dtype="float32", device="cpu", convert="embed") as other,
    ):
        vectors, expected = (engine.embed(SENTENCES).embeddings for engine in (other, one))
        np.testing.assert_allclose(vectors, expected, atol=1e-6)


def test_a_plain_heads_logits_are_its_linear_at_the_pooled_row(tmp_path):
    from safetensors.torch import load_file

    folder = COUNTED(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    weight, bias = tensors["score.weight"].numpy(), tensors["score.bias"].numpy()
    with Engine(folder, dtype="float32", device="cpu", convert="classify") as engine:
        logits = engine.classify(SENTENCES, activation=False).probs
    with Engine(folder, dtype="float32", device="cpu", normalize=False) as engine:
        rows = [matrix[-1] for matrix in engine.token_embed(SENTENCES).embeddings]
        first = [matrix[0] for matrix in engine.token_embed(SENTENCES).embeddings]
    np.testing.assert_allclose(logits, np.stack(rows) @ weight.T + bias, rtol=1e-4, atol=1e-5)
    assert not np.allclose(logits, np.stack(first) @ weight.T + bias, atol=1e-2)


@pytest.mark.parametrize(
    ("write", "options", "error", "message"),
    [
        (called("BertModel", "bert", prefix=""), {"convert": "classify"}, WeightMismatchError, "classifier_from_token"),
        (
            CAUSAL,
            {"convert": "classify"},
            WeightMismatchError,
            "score.weight",
        ),
        (called("BertClassificationModel", "bert"), {}, WeightMismatchError, "needs"),
        (called("InternLM2ForRewardModel", "internlm2"), {}, WeightMismatchError, "v_head.weight"),
        (called("LlamaForQuestionAnswering", "llama"), {}, UnsupportedArchitectureError, "LlamaForQuestionAnswering"),
        (called("LlamaModel", "llama"), {"convert": "reward"}, InvalidRequestError, "choose auto, embed or classify"),
        (
            CAUSAL,
            {"hf_overrides": {"classifier_from_token": ["no such token", "yes"]}},
            ModelLoadError,
            "no such token",
        ),
    ],
)
def test_impossible_conversions_are_refused(write, options, error, message, tmp_path):
    with pytest.raises(error, match=message) as raised:
        Engine(write(tmp_path / "model"), dtype="float32", device="cpu", **options)
    assert type(raised.value) is error
