"""Checkpoints saved by sentence-transformers' CrossEncoder in all its layouts, compared with its ``predict``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.head_oracles import classifier
from tests.parity.rerankers import DOCUMENTS, LONG, PAIRS, QUERIES, difference, load, sigmoid, tokenized
from tests.parity.test_classifiers import TOLERANCE, VISIBLE
from tests.tiny import SENTENCES, edit_json, write_checkpoint
from tests.tiny.checkpoints import token_id
from tests.tiny.heads import write_language_model

pytestmark = pytest.mark.contract  # two engines for each case, one of them a peer's

pytest.importorskip("sentence_transformers")

CHATTY = (
    "{{ bos_token }}{% for m in messages if m.role == 'system' %}Task: {{ m.content }} {% endfor %}"
    "{{ (messages | selectattr('role', 'eq', 'query') | first).content }} ? "
    "{{ (messages | selectattr('role', 'eq', 'document') | first).content }} ! The answer:"
)


def predicted(folder: Path, pairs: Any = PAIRS, **options: Any) -> np.ndarray:
    """One pair at a time, so that no padding is involved."""
    from sentence_transformers.cross_encoder import CrossEncoder

    model = CrossEncoder(str(folder), device="cpu", local_files_only=True)
    predicted: np.ndarray = model.predict([tuple(pair) for pair in pairs], batch_size=1, **options)
    return predicted


def classic(folder: Path, family: str, *, labels: int = 1, **config: Any) -> Path:
    """Only the model, as versions before 6 saved it."""
    return write_checkpoint(
        folder,
        family,
        head="SequenceClassification",
        labels=labels,
        config={"max_position_embeddings": LONG + 2, **config},
        tokenizer_limit=LONG,
    )


@pytest.mark.parametrize("name", [None, "linear.Identity", "activation.Sigmoid"], ids=str)
@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "modernbert", "electra"])
def test_a_classic_one(family, name, tmp_path, record_property):
    """The files are those of any classifier; config.json names the activation."""
    fields = {} if name is None else {"sentence_transformers": {"activation_fn": f"torch.nn.modules.{name}"}}
    folder = classic(tmp_path / "model", family, **fields)
    expected = predicted(folder)
    with load(folder) as engine:
        actual = engine.score(QUERIES, DOCUMENTS).scores
        worst = difference(actual, expected)
        record_property("error", worst)
        assert worst <= TOLERANCE
        raw = engine.score(QUERIES, DOCUMENTS, activation=False).scores
        assert difference(engine.score(DOCUMENTS, QUERIES).scores, expected) > VISIBLE
    assert np.abs(actual - (raw if name == "linear.Identity" else sigmoid(raw))).max() < 1e-6


@pytest.mark.parametrize("key", ["sentence_transformers", "sbert_ce_default_activation_function"])
@pytest.mark.parametrize("name", ["Tanh", "GELU", "ReLU", "Softplus", "SELU", "Tanhshrink"])
def test_any_activation_of_torch(name, key, tmp_path, record_property):
    """Raw logits, for which a caller may ask, are before it."""
    dotted = f"torch.nn.modules.activation.{name}"
    folder = classic(tmp_path / "model", "bert", **{key: {"activation_fn": dotted} if key[1] == "e" else dotted})
    with load(folder) as engine:
        assert engine.spec.activation == name
        actual = engine.score(QUERIES, DOCUMENTS).scores
        raw = engine.score(QUERIES, DOCUMENTS, activation=False).scores
    worst = difference(actual, predicted(folder))
    record_property("error", worst)
    assert worst <= TOLERANCE
    assert all(np.abs(actual - other).max() > VISIBLE for other in (raw, sigmoid(raw)))


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("prompt", [None, "a question: "])
def test_one_that_it_saved(prompt, labels, tmp_path):
    from sentence_transformers.cross_encoder import CrossEncoder

    source = classic(tmp_path / "source", "bert", labels=labels)
    prompts = {} if prompt is None else {"ask": prompt}
    model = CrossEncoder(str(source), prompts=prompts, device="cpu")
    if prompt is not None:
        model.default_prompt_name = "ask"
    model.save_pretrained(str(tmp_path / "saved"))
    expected = predicted(tmp_path / "saved")
    with load(tmp_path / "saved") as engine:
        if labels == 1:
            assert difference(engine.score(QUERIES, DOCUMENTS).scores, expected) <= TOLERANCE
        else:  # one logit per label, and no activation by default
            assert engine.spec.activation == "identity"
            assert engine.tasks == {"classify", "token_classify"}
            texts = [*SENTENCES[:3]]
            raw = engine.classify(texts).probs
            assert difference(raw.ravel(), predicted_texts(tmp_path / "saved", texts).ravel()) <= TOLERANCE
    if prompt is not None:
        assert difference(predicted(tmp_path / "saved", prompt=""), expected) > VISIBLE


def predicted_texts(folder: Path, texts: list[str]) -> np.ndarray:
    """transformers' logits, because CrossEncoder accepts pairs only."""
    reference = classifier(folder)
    rows = [tokenized(folder, text) for text in texts]
    return np.stack([reference(row["input_ids"], row.get("token_type_ids")).numpy() for row in rows])


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("instruction", [None, "Find the pond"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "qwen3.5"])
def test_a_language_model_with_logit_score(family, instruction, both, tmp_path, record_property):
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder import CrossEncoder
    from sentence_transformers.cross_encoder.modules import LogitScore

    config: dict[str, Any] = {"max_position_embeddings": LONG}
    if family == "gemma2":
        config["final_logit_softcapping"] = 2.0
    source = write_language_model(
        tmp_path / "source", family, ("no", "yes"), tokenizer_limit=LONG, config=config, template="$A"
    )
    (source / "chat_template.jinja").write_text(CHATTY, encoding="utf-8")
    module = Transformer(str(source), transformer_task="text-generation")
    ids = {"true_token_id": token_id(source, "yes"), "false_token_id": token_id(source, "no") if both else None}
    model = CrossEncoder(
        modules=[module, LogitScore(**ids)],
        prompts={} if instruction is None else {"ask": instruction},
        activation_fn=torch.nn.Identity(),
        device="cpu",
    )
    if instruction is not None:
        model.default_prompt_name = "ask"
    model.save_pretrained(str(tmp_path / "saved"))
    expected = predicted(tmp_path / "saved")
    with load(tmp_path / "saved") as engine:
        assert engine.spec.score_type == "cross-encoder"
        actual = engine.score(QUERIES, DOCUMENTS).scores
        worst = difference(actual, expected)
        record_property("error", worst)
        assert worst <= TOLERANCE
        other = engine.score(QUERIES, DOCUMENTS, instruction="Find something else").scores
        assert difference(other, expected) > VISIBLE
        again = engine.score(QUERIES, DOCUMENTS, instruction=instruction or "").scores
        assert difference(again, expected) <= TOLERANCE or instruction is None


def test_a_language_model_without_modules_is_asked_for_yes_and_no(tmp_path):
    """sentence-transformers loads it as text-generation and looks up these two words."""
    folder = write_language_model(
        tmp_path / "model",
        "qwen3",
        ("no", "yes"),
        tokenizer_limit=LONG,
        config={"max_position_embeddings": LONG},
        template="$A",
    )
    (folder / "chat_template.jinja").write_text(CHATTY, encoding="utf-8")
    (folder / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}', encoding="utf-8")
    expected = predicted(folder)
    with load(folder) as engine:
        actual = engine.score(QUERIES, DOCUMENTS).scores
        assert difference(actual, expected) <= TOLERANCE
        assert difference(1 - actual, expected) > VISIBLE


@pytest.mark.parametrize(("family", "mode"), [("modernbert", "cls"), ("bert", "mean"), ("xlm-roberta", "max")])
@pytest.mark.parametrize("labels", [1, 3])
def test_an_encoder_with_pooling_and_dense(labels, family, mode, tmp_path, record_property):
    from sentence_transformers.base.modules import Dense, Transformer
    from sentence_transformers.cross_encoder import CrossEncoder
    from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling

    config = {"max_position_embeddings": LONG + 2}
    source = write_checkpoint(tmp_path / "source", family, config=config, tokenizer_limit=LONG)
    torch.manual_seed(3)
    modules = [
        Transformer(str(source)),
        Pooling(48, pooling_mode=mode),
        Dense(48, 24, bias=False, activation_function=torch.nn.SiLU()),
        LayerNorm(24),
        Dense(24, labels, activation_function=torch.nn.Identity(), module_output_name="scores"),
    ]
    CrossEncoder(modules=modules, device="cpu").save_pretrained(str(tmp_path / "saved"))
    expected = predicted(tmp_path / "saved")
    with load(tmp_path / "saved") as engine:
        if labels == 1:
            assert engine.tasks == {"classify", "score", "reward"}
            actual = engine.score(QUERIES, DOCUMENTS).scores
            assert difference(engine.score(DOCUMENTS, QUERIES).scores, expected) > VISIBLE
        else:
            assert engine.tasks == {"classify"}
            assert expected.shape == (len(PAIRS), 3)
            assert engine.classify(["a"]).probs.shape == (1, 3)
            return
    worst = difference(actual, expected)
    record_property("error", worst)
    assert worst <= TOLERANCE


def test_a_limit_of_its_own(tmp_path):
    """max_length in sentence-transformers' file: over-long pairs lose the same tokens."""
    from sentence_transformers.cross_encoder import CrossEncoder

    CrossEncoder(str(classic(tmp_path / "source", "bert")), max_length=24, device="cpu").save_pretrained(
        str(tmp_path / "saved")
    )
    with load(tmp_path / "saved") as engine:
        assert engine.spec.max_length == 24
        output = engine.score(QUERIES, DOCUMENTS)
        assert output.truncated.any()
        assert not output.truncated.all()
        assert difference(output.scores, predicted(tmp_path / "saved")) <= TOLERANCE
    edit_json(tmp_path / "saved" / "tokenizer_config.json", model_max_length=LONG)
    with load(tmp_path / "saved") as engine:
        assert difference(engine.score(QUERIES, DOCUMENTS).scores, output.scores) > VISIBLE
