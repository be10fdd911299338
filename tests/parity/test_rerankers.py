"""Rerankers compared with transformers: encoders of pairs, and language models that answer by a token's logit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.parity.head_oracles import classifier
from tests.parity.oracles import oracle
from tests.parity.rerankers import (
    CTXL,
    DOCUMENTS,
    FRAME,
    GEMMA,
    LONG,
    MODELS,
    MXBAI,
    PAIRS,
    QUERIES,
    QWEN3,
    ZERANK,
    Row,
    answers,
    ctxl,
    difference,
    expected_of,
    framed,
    load,
    nemotron,
    qwen3,
    qwen3_prompt,
    scores,
    sigmoid,
    together,
    tokenized,
    vocabulary,
    write,
    zerank,
)
from tests.parity.test_classifiers import TOLERANCE, VISIBLE
from tests.tiny import SENTENCES, edit_json, write_checkpoint
from tests.tiny.checkpoints import token_id
from tests.tiny.heads import write_language_model

from millpond import Pair, PoolingParams
from millpond.errors import UnsupportedArchitectureError

pytestmark = pytest.mark.contract  # two engines for each case, one of them a peer's

# --- Encoders -------------------------------------------------------------------------------------------------------

IDENTITY = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
ENCODERS = ("bert", "roberta", "xlm-roberta", "mpnet", "modernbert", "electra", "albert", "deberta-v2", "distilbert")


@pytest.mark.parametrize("family", [*ENCODERS, "gte", "jina"])
def test_an_encoder_reads_pairs(family, tmp_path, record_property):
    plain = {"lora_adaptations": None, "matryoshka_dimensions": None} if family == "jina" else {}
    if family == "gte":  # gte-multilingual-reranker-base
        plain = {"auto_map": {"AutoModelForSequenceClassification": "new-impl--modeling.NewForSequenceClassification"}}
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
        actual = scores(engine, activation=None)
        worst = difference(actual, expected.astype(np.float32))
        record_property("error", worst)
        assert worst <= TOLERANCE
        alone = np.array([engine.score(*pair).scores[0] for pair in PAIRS])
        assert difference(actual, alone) <= TOLERANCE
        other = engine.score(DOCUMENTS, QUERIES).scores
        assert np.abs(scores(engine, activation="sigmoid") - sigmoid(actual)).max() < 1e-6
    assert difference(actual, other) > VISIBLE  # the two texts the other way round


@pytest.mark.parametrize("family", ["bert", "electra", "deberta-v2"])
def test_notices_missing_token_types(family, tmp_path):
    """Except for DeBERTa v3 checkpoints, which have none."""
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
        scored = engine.score("How deep is it?", documents).scores
        best = engine.rerank("How deep is it?", documents, top_n=3)
        everything = engine.rerank("How deep is it?", documents)
    order = np.argsort(-scored).tolist()
    assert [result.index for result in everything] == order
    assert [result.index for result in best] == order[:3]
    assert [result.document for result in best] == [documents[i] for i in order[:3]]
    assert [result.relevance_score for result in best] == pytest.approx([scored[i] for i in order[:3]], abs=1e-6)
    assert order != sorted(order)


# --- Language models ------------------------------------------------------------------------------------------------

INSTRUCTION = "Find the passage about water"


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row.called)
def test_a_language_model_s_answer(row, tmp_path, record_property):
    """The model's name selects the template, the tokens and the formula of the score."""
    folder = write(tmp_path / row.called, row)
    expected = expected_of(folder, row, row.text)
    with load(folder) as engine:
        assert engine.spec.score_type == "cross-encoder"
        assert {"score", "classify"} <= engine.tasks
        assert "embed" not in engine.tasks
        actual = scores(engine)
        worst = difference(actual, expected)
        record_property("error", worst)
        assert worst <= TOLERANCE
        alone = np.array([engine.score(*pair, activation=False).scores[0] for pair in PAIRS])
        assert difference(actual, alone) <= TOLERANCE
        habit = engine.score(QUERIES, DOCUMENTS).scores
        assert np.abs(habit - (expected if row.raw else sigmoid(expected))).max() <= 1e-5 * max(1, np.abs(habit).max())
        assert difference(actual * row.divisor, expected) > VISIBLE or row.divisor == 1
    with load(folder, backend="torch") as engine:
        worst = difference(scores(engine), expected)
        record_property("error in torch", worst)
        assert worst <= TOLERANCE
    # Without the template, or with one more space, the score differs.
    assert difference(actual, expected_of(folder, row, together)) > VISIBLE
    assert difference(actual, expected_of(folder, row, lambda q, d: row.text(q, d) + " ")) > VISIBLE


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_model_that_caps_its_logits(family, tmp_path, record_property):
    """Each token's logit is capped before the difference is taken."""
    config = {"max_position_embeddings": LONG, "final_logit_softcapping": 2.0}
    folder = write_language_model(tmp_path / "model", family, ("no", "yes"), tokenizer_limit=LONG, config=config)
    row = Row(called="", family=family, text=together, tokens=("no", "yes"))
    overrides = {"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}
    expected = expected_of(folder, row, together)
    with load(folder, hf_overrides=overrides, convert="classify") as engine:
        worst = difference(scores(engine), expected)
        record_property("error", worst)
        assert worst <= TOLERANCE
    edit_json(folder / "config.json", final_logit_softcapping=None)
    assert difference(expected, expected_of(folder, row, together)) > VISIBLE


def test_a_language_model_that_reranks_in_a_way_not_known_is_refused(tmp_path):
    """It would become an embedder without a word; the options that the message names serve it."""
    folder = write(tmp_path / "model", QWEN3)
    (folder / "README.md").write_text("---\npipeline_tag: text-ranking\n---\n# A model\n", encoding="utf-8")
    with pytest.raises(UnsupportedArchitectureError, match=r"text-ranking.*score_template.*classifier_from_token"):
        load(folder)
    overrides = {"classifier_from_token": ["no", "yes"]}
    with load(folder, hf_overrides=overrides, score_template=FRAME) as engine:
        assert difference(scores(engine), expected_of(folder, QWEN3, framed)) <= TOLERANCE
    with load(folder, convert="embed") as engine:
        assert "embed" in engine.tasks


@pytest.mark.parametrize(
    ("model_type", "architecture", "message"),
    [
        ("t5gemma", "T5GemmaForConditionalGeneration", "an encoder with a decoder that writes"),
        ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "layers of linear attention and experts"),
        ("qwen3_vl", "Qwen3VLForConditionalGeneration", "a language model that reads images"),
    ],
)
def test_rerankers_of_families_that_are_not_run(model_type, architecture, message, tmp_path):
    folder = write(tmp_path / "model", QWEN3)
    edit_json(folder / "config.json", model_type=model_type, architectures=[architecture])
    with pytest.raises(UnsupportedArchitectureError, match=f"{message}.*does not run; .*for scores of pairs"):
        load(folder)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (QWEN3, lambda query, document: qwen3_prompt(INSTRUCTION, query, document)),
        (
            ZERANK,
            lambda query, document: zerank(
                f"<query>{query}</query>\n<instruction>{INSTRUCTION}</instruction>", document
            ),
        ),
        (CTXL, lambda query, document: ctxl(f"{query} {INSTRUCTION}", document)),
    ],
    ids=["qwen3", "zerank", "ctxl"],
)
def test_an_instruction_fills_the_template_s_slot(row, text, tmp_path):
    folder = write(tmp_path / row.called, row)
    expected = expected_of(folder, row, text)
    with load(folder) as engine:
        assert difference(scores(engine, instruction=INSTRUCTION), expected) <= TOLERANCE
        assert difference(scores(engine), expected) > VISIBLE
        best = engine.rerank(QUERIES[1], DOCUMENTS, instruction=INSTRUCTION)
        assert len(best) == len(DOCUMENTS)


def test_a_converted_reranker_keeps_its_template(tmp_path, record_property):
    """``*-seq-cls`` checkpoints: a score head with one row, and the same template."""
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
        actual = scores(engine)
        worst = difference(actual, expected(qwen3))
        record_property("error", worst)
        assert worst <= TOLERANCE
        assert difference(actual, expected(together)) > VISIBLE
        assert np.abs(engine.score(QUERIES, DOCUMENTS).scores - sigmoid(actual)).max() < 1e-6


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", ["avg", "cls", "last"])
def test_a_bidirectional_llama(kind, temperature, tmp_path, record_property):
    """nemotron: its config sets pooling and temperature, its name the template."""
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
        actual = scores(engine)
        worst = difference(actual, expected(kind))
        record_property("error", worst)
        assert worst <= TOLERANCE
        assert np.abs(engine.score(QUERIES, DOCUMENTS).scores - sigmoid(actual)).max() < 1e-6
        assert difference(scores(engine) * temperature, actual) > VISIBLE or temperature == 1
    assert all(difference(actual, expected(other)) > VISIBLE for other in pool if other != kind)


# --- The user's options ---------------------------------------------------------------------------------------------

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
    """The model's name is unknown; as in vLLM, only a flag that names the family selects a template."""
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
        actual = engine.classify(SENTENCES[:4]).probs
        assert np.abs(actual - expected).max() <= 1e-5
        assert np.abs(actual - expected[:, ::-1]).max() > VISIBLE
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
        once = engine.submit("score", pairs, params, template=template).result().scores
        assert difference(once, expected) <= TOLERANCE


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row.called)
def test_the_suffix_survives_truncation(row, tmp_path):
    """Truncation removes the document's end, because the answer is read after the template's last token."""
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
