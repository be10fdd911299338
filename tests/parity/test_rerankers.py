"""Rerankers against transformers: encoders that read pairs, and language models whose answer is one token's logit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.parity.head_oracles import classifier
from tests.parity.oracles import oracle
from tests.parity.rerankers import (
    DOCUMENTS,
    FRAME,
    GEMMA,
    LONG,
    MODELS,
    MXBAI,
    PAIRS,
    QUERIES,
    QWEN3,
    Row,
    answers,
    difference,
    expected_of,
    framed,
    load,
    nemotron,
    qwen3,
    qwen3_asked,
    scores,
    sigmoid,
    together,
    tokenized,
    vocabulary,
    write,
)
from tests.parity.test_classifiers import TOLERANCE, VISIBLE
from tests.tiny import SENTENCES, edit_json, write_checkpoint
from tests.tiny_rewards import token_id, write_language_model

from millpond.inputs import Pair
from millpond.params import PoolingParams

# --- Encoders -------------------------------------------------------------------------------------------------------

IDENTITY = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
ENCODERS = ("bert", "roberta", "xlm-roberta", "mpnet", "modernbert", "electra", "albert", "deberta-v2", "distilbert")


@pytest.mark.parametrize("family", [*ENCODERS, "gte", "jina"])
def test_an_encoder_reads_pairs(family, tmp_path, record_property):
    plain = {"lora_adaptations": None, "matryoshka_dimensions": None} if family == "jina" else {}
    config = {**plain, **IDENTITY, "max_position_embeddings": LONG + 2}
    folder = write_checkpoint(
        tmp_path / "model", family, head="SequenceClassification", labels=1, config=config, tokenizer_limit=LONG
    )
    reference = classifier(folder)
    rows = [tokenized(folder, *pair) for pair in PAIRS]
    expected = np.array([float(reference(row["input_ids"], row.get("token_type_ids"))[0]) for row in rows])
    with load(folder) as engine:
        assert engine.spec.score_type == "cross-encoder"
        assert engine.spec.activation == "identity"
        assert {"classify", "score", "reward"} <= engine.tasks
        found = scores(engine, activation=None)
        worst = difference(found, expected.astype(np.float32))
        record_property("error", worst)
        assert worst <= TOLERANCE
        alone = np.array([engine.score(*pair).scores[0] for pair in PAIRS])
        assert difference(found, alone) <= TOLERANCE
        other = engine.score(DOCUMENTS, QUERIES).scores
        assert np.abs(scores(engine, activation="sigmoid") - sigmoid(found)).max() < 1e-6
    assert difference(found, other) > VISIBLE  # the two texts the other way round


@pytest.mark.parametrize("family", ["bert", "electra", "deberta-v2"])
def test_notices_missing_token_types(family, tmp_path):
    """But of deberta's v3 checkpoints, which have none."""
    config = {**IDENTITY, "max_position_embeddings": LONG}
    folder = write_checkpoint(
        tmp_path / "model", family, head="SequenceClassification", labels=1, config=config, tokenizer_limit=LONG
    )
    reference = classifier(folder)
    rows = [tokenized(folder, *pair) for pair in PAIRS]
    bare = np.array([float(reference(row["input_ids"], torch.zeros_like(row["input_ids"]))[0]) for row in rows])
    with load(folder) as engine:
        moved = difference(scores(engine), bare.astype(np.float32))
    assert moved > VISIBLE if family != "deberta-v2" else moved <= TOLERANCE


def test_rerank_sorts_what_score_gives(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "bert", head="SequenceClassification", labels=1, config=IDENTITY)
    documents = list(SENTENCES[:7])
    with load(folder) as engine:
        given = engine.score("How deep is it?", documents).scores
        best = engine.rerank("How deep is it?", documents, top_n=3)
        everything = engine.rerank("How deep is it?", documents)
    order = np.argsort(-given).tolist()
    assert [result.index for result in everything] == order
    assert [result.index for result in best] == order[:3]
    assert [result.document for result in best] == [documents[i] for i in order[:3]]
    assert [result.relevance_score for result in best] == pytest.approx([given[i] for i in order[:3]], abs=1e-6)
    assert order != sorted(order)


# --- Language models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row.called)
def test_a_language_model_s_answer(row, tmp_path, record_property):
    """By its name alone: the template, the tokens, and what becomes of their logits."""
    folder = write(tmp_path / row.called, row)
    expected = expected_of(folder, row, row.text)
    with load(folder) as engine:
        assert engine.spec.score_type == "cross-encoder"
        assert {"score", "classify"} <= engine.tasks
        assert "embed" not in engine.tasks
        found = scores(engine)
        worst = difference(found, expected)
        record_property("error", worst)
        assert worst <= TOLERANCE
        alone = np.array([engine.score(*pair, activation=False).scores[0] for pair in PAIRS])
        assert difference(found, alone) <= TOLERANCE
        habit = engine.score(QUERIES, DOCUMENTS).scores
        assert np.abs(habit - (expected if row.raw else sigmoid(expected))).max() <= 1e-5 * max(1, np.abs(habit).max())
    # Without its template, and with one blank more, it is another number.
    assert difference(found, expected_of(folder, row, together)) > VISIBLE
    assert difference(found, expected_of(folder, row, lambda q, d: row.text(q, d) + " ")) > VISIBLE


@pytest.mark.parametrize("row", [QWEN3, MXBAI], ids=lambda row: row.called)
def test_no_vocabulary_is_computed(row, tmp_path):
    """One row stands for both tokens' rows."""
    from millpond.engine.loading import load as read

    with load(write(tmp_path / row.called, row)) as engine:
        head = read(engine.config).runner.pooler.classifier
    assert head is not None
    assert [tuple(parameter.shape) for parameter in head.parameters()] == [(1, 48)]


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_model_that_caps_its_logits(family, tmp_path, record_property):
    """Each token's logit is capped before one is taken off the other."""
    config = {"max_position_embeddings": LONG, "final_logit_softcapping": 2.0}
    folder = write_language_model(tmp_path / "model", family, ("no", "yes"), tokenizer_limit=LONG, config=config)
    row = Row(called="", family=family, text=together, tokens=("no", "yes"))
    asked = {"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}
    expected = expected_of(folder, row, together)
    with load(folder, hf_overrides=asked, convert="classify") as engine:
        worst = difference(scores(engine), expected)
        record_property("error", worst)
        assert worst <= TOLERANCE
    edit_json(folder / "config.json", final_logit_softcapping=None)
    assert difference(expected, expected_of(folder, row, together)) > VISIBLE


def test_an_instruction_fills_the_template_s_slot(tmp_path):
    folder = write(tmp_path / QWEN3.called, QWEN3)
    asked = "Find the passage about water"
    expected = expected_of(folder, QWEN3, lambda q, d: qwen3_asked(asked, q, d))
    with load(folder) as engine:
        assert difference(scores(engine, instruction=asked), expected) <= TOLERANCE
        assert difference(scores(engine), expected) > VISIBLE
        best = engine.rerank(QUERIES[1], DOCUMENTS, instruction=asked)
        assert len(best) == len(DOCUMENTS)


def test_a_converted_reranker_keeps_its_template(tmp_path, record_property):
    """``*-seq-cls``: one row of a score head, under the same text."""
    config = {"max_position_embeddings": LONG}
    folder = write_checkpoint(
        tmp_path / "Qwen3-Reranker-0.6B-seq-cls",
        "qwen3",
        head="SequenceClassification",
        labels=1,
        config=config,
        tokenizer_limit=LONG,
        template="$A",
    )
    reference = classifier(folder)

    def expected(text: Callable[[str, str], str]) -> np.ndarray:
        return np.array([float(reference(tokenized(folder, text(*pair))["input_ids"])[0]) for pair in PAIRS], "f")

    with load(folder) as engine:
        found = scores(engine)
        worst = difference(found, expected(qwen3))
        record_property("error", worst)
        assert worst <= TOLERANCE
        assert difference(found, expected(together)) > VISIBLE
        assert np.abs(engine.score(QUERIES, DOCUMENTS).scores - sigmoid(found)).max() < 1e-6


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", ["avg", "cls", "last"])
def test_a_bidirectional_llama(kind, temperature, tmp_path, record_property):
    """nemotron: pooled as its config says, divided by its temperature, under its template."""
    config = {"max_position_embeddings": LONG, "pooling": kind, "temperature": temperature}
    folder = write_checkpoint(
        tmp_path / "model",
        "llama-bidirectional",
        head="SequenceClassification",
        labels=1,
        config=config,
        tokenizer_limit=LONG,
    )
    states, weight = oracle(folder), load_file(folder / "model.safetensors")["score.weight"]
    pool = {"avg": lambda x: x.mean(0), "cls": lambda x: x[0], "last": lambda x: x[-1]}

    @torch.inference_mode()
    def expected(kind: str) -> np.ndarray:
        rows = [pool[kind](states(tokenized(folder, nemotron(*pair))["input_ids"])) for pair in PAIRS]
        return (torch.stack(rows) @ weight[0] / temperature).numpy()

    with load(folder) as engine:
        found = scores(engine)
        worst = difference(found, expected(kind))
        record_property("error", worst)
        assert worst <= TOLERANCE
        assert np.abs(engine.score(QUERIES, DOCUMENTS).scores - sigmoid(found)).max() < 1e-6
        assert difference(scores(engine) * temperature, found) > VISIBLE or temperature == 1
    assert all(difference(found, expected(other)) > VISIBLE for other in pool if other != kind)


# --- What the user says ---------------------------------------------------------------------------------------------

ORIGINAL = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}


@pytest.mark.parametrize(
    ("row", "overrides", "text", "habit"),
    [
        (QWEN3, ORIGINAL, qwen3, sigmoid),
        (QWEN3, {"is_original_qwen3_reranker": True}, qwen3, sigmoid),
        (
            MXBAI,
            {
                "architectures": ["Qwen2ForSequenceClassification"],
                "classifier_from_token": ["0", "1"],
                "method": "from_2_way_softmax",
            },
            together,
            sigmoid,
        ),
        (
            GEMMA,
            {
                "architectures": ["GemmaForSequenceClassification"],
                "classifier_from_token": ["Yes"],
                "method": "no_post_processing",
            },
            together,
            sigmoid,
        ),
    ],
    ids=["qwen3", "qwen3-flag", "mxbai", "gemma"],
)
def test_overrides_in_vllm_s_keys(row, overrides, text, habit, tmp_path):
    """Under a name that says nothing; a template only where the flag names the family, as there."""
    folder = write(tmp_path / "model", row)
    expected = expected_of(folder, row, text)
    with load(folder, hf_overrides=overrides) as engine:
        assert difference(scores(engine), expected) <= TOLERANCE
        assert np.abs(engine.score(QUERIES, DOCUMENTS).scores - habit(expected)).max() <= 1e-5
    if len(row.tokens) == 2 and "classifier_from_token" in overrides:
        turned = {**overrides, "classifier_from_token": overrides["classifier_from_token"][::-1]}
        with load(folder, hf_overrides=turned) as engine:
            assert difference(-scores(engine), expected) <= TOLERANCE


def test_several_tokens_are_several_classes(tmp_path):
    folder = write(tmp_path / "model", QWEN3)
    overrides = {"classifier_from_token": ["no", "yes"], "method": "no_post_processing"}
    ids = [tokenized(folder, text)["input_ids"] for text in SENTENCES[:4]]
    expected = vocabulary(folder, ids)[:, [token_id(folder, token) for token in ("no", "yes")]].softmax(-1).numpy()
    with load(folder, hf_overrides=overrides, convert="classify") as engine:
        found = engine.classify(SENTENCES[:4]).probs
        assert np.abs(found - expected).max() <= 1e-5
        assert np.abs(found - expected[:, ::-1]).max() > VISIBLE
        assert "score" not in engine.tasks


@pytest.mark.parametrize("as_file", [False, True])
def test_a_template_of_the_user_s(as_file, tmp_path):
    folder = write(tmp_path / QWEN3.called, QWEN3)
    template = FRAME
    if as_file:
        (tmp_path / "frame.jinja").write_text(FRAME, encoding="utf-8")
        template = str(tmp_path / "frame.jinja")
    expected = expected_of(folder, QWEN3, framed)
    with load(folder, score_template=template) as engine:
        assert difference(scores(engine), expected) <= TOLERANCE
    with load(folder) as engine:
        assert difference(scores(engine), expected) > VISIBLE
        pairs = [Pair(*pair) for pair in PAIRS]
        params = PoolingParams(activation=False)
        once = engine.submit_score(pairs, params, template=template).result().scores
        assert difference(once, expected) <= TOLERANCE


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row.called)
def test_the_suffix_survives_truncation(row, tmp_path):
    """What is cut is the document's end: the answer is read behind the template's own last token."""
    folder = write(tmp_path / row.called, row)
    pair = Pair("How deep is it?", " ".join(SENTENCES))
    whole = tokenized(folder, row.text(*pair))["input_ids"].tolist()
    limit = len(tokenized(folder, row.text(pair.query, ""))["input_ids"]) + 9
    suffix = row.text(pair.query, "\ue000").rpartition("\ue000")[2]
    tail = tokenized(folder, suffix)["input_ids"].tolist()[-5:]
    with load(folder, max_length=limit) as engine:
        ids = engine.token_ids("score", pair, PoolingParams())
        output = engine.score(*pair, activation=False)
    assert len(ids) <= limit < len(whole)
    assert ids[-5:] == whole[-5:] == tail
    assert output.truncated.tolist() == [True]
    expected = answers(folder, row, [torch.tensor(ids), torch.tensor(whole[:limit])])
    assert abs(output.scores[0] - expected[0]) <= TOLERANCE * np.abs(expected).max()
    assert abs(output.scores[0] - expected[1]) > VISIBLE * np.abs(expected).max()


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row.called)
def test_the_same_files_under_another_name_are_an_embedder(row, tmp_path):
    with load(write(tmp_path / "model", row)) as engine:
        assert engine.tasks == {"embed", "token_embed"}
        assert engine.spec.score_type == "bi-encoder"
        vectors = engine.embed(["a", "b"], normalize=True).embeddings
        assert engine.score("a", "b").scores[0] == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-6)
    with load(write(tmp_path / row.called, row), convert="embed") as engine:
        assert engine.tasks == {"embed", "token_embed"}
