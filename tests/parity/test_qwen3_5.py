"""Qwen3.5: a gated delta rule in most layers, and a tower for images beside the text in the hub's layout."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.parity.rerankers import DOCUMENTS, FRAME, PAIRS, QUERIES, difference, framed, load, scores, tokenized
from tests.parity.test_backbones import SHORT, TOLERANCE, VISIBLE, states
from tests.parity.test_backbones import difference as apart
from tests.tiny import edit_json, write_checkpoint
from tests.tiny.checkpoints import token_id
from tests.tiny.families import FAMILIES
from tests.tiny.heads import write_language_model
from tests.tiny.tokenizers import write_tokenizer

from millpond.errors import UnsupportedArchitectureError

pytestmark = pytest.mark.contract  # two engines for each case, one of them a peer's

LONG = 256
VISION = {
    "model_type": "qwen3_5_vision",
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": 4,
    "num_position_embeddings": 16,
}


def write_hub(folder: Path) -> Path:
    """A checkpoint as transformers saves LightOn-rerank's class, which reads images: its text has a config inside."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    folder.mkdir()
    vocabulary = write_tokenizer(folder, "qwen", limit=LONG, lowercase=False, template="$A")
    text = {**FAMILIES["qwen3.5"].config, "vocab_size": vocabulary, "max_position_embeddings": LONG}
    config = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # initial weights are small, and norms do nothing
            scale = 0.2 if parameter.ndim < 2 else 0.3 if "embed_tokens" in name else 1.3 / parameter.shape[-1] ** 0.5
            parameter.copy_(torch.randn_like(parameter) * scale)
    model.save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text())
    assert "text_config" in stored and stored["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    return folder


@torch.inference_mode()
def logits(folder: Path, texts: list[str]) -> tuple[list[np.ndarray], torch.Tensor]:
    """Hidden states of each text alone, and the logits of its last token."""
    from transformers import Qwen3_5ForConditionalGeneration

    model = Qwen3_5ForConditionalGeneration.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    hidden, last = [], []
    for text in texts:
        ids = tokenized(folder, text)["input_ids"][None]
        hidden.append(model.model(input_ids=ids).last_hidden_state[0].numpy())
        last.append(model(input_ids=ids).logits[0, -1])
    return hidden, torch.stack(last)


def test_the_text_of_a_checkpoint_that_reads_images(tmp_path, caplog, record_property):
    folder = write_hub(tmp_path / "model")
    texts = [text for text in SHORT if text]
    expected, _ = logits(folder, texts)
    with caplog.at_level(logging.WARNING, logger="millpond"), load(folder) as engine:
        worst = apart(states(engine, texts), expected)
        record_property("error in torch", worst)
        assert worst <= TOLERANCE
        assert engine.spec.dimensions == 48
    assert (
        len([entry for entry in caplog.records if "only texts are read: the tensors of visual" in entry.message]) == 1
    )


def test_notices_a_state_that_goes_on_into_the_next_text(tmp_path):
    """The mistake of a packed row: the delta rule, or its convolution, of one text begins where the last one ended."""
    folder = write_hub(tmp_path / "model")
    from transformers import Qwen3_5ForConditionalGeneration

    texts = ["How deep is it?", "The wheel."]
    expected, _ = logits(folder, texts)
    ids = [tokenized(folder, text)["input_ids"] for text in texts]
    reference = Qwen3_5ForConditionalGeneration.from_pretrained(
        folder, attn_implementation="eager"
    ).model.language_model
    for layer in reference.layers:
        if hasattr(layer, "self_attn"):  # attention sees its own text only: what is left goes through the delta rules
            layer.self_attn.register_forward_hook(lambda _, __, out: (torch.zeros_like(out[0]), None))
    with torch.inference_mode():
        carried = reference(input_ids=torch.cat(ids)[None]).last_hidden_state[0, len(ids[0]) :].numpy()
        alone = reference(input_ids=ids[1][None]).last_hidden_state[0].numpy()
    assert apart([carried], [alone]) > VISIBLE
    with load(folder) as engine:
        assert apart(states(engine, texts), expected) <= TOLERANCE
        assert apart(states(engine, texts * 9), expected * 9) <= TOLERANCE  # and in a batch of many


def test_lighton_s_pointwise_rerankers_need_their_template(tmp_path, record_property):
    """Their score is known, logit("Yes") - logit("No"), and not their prompt."""
    folder = write_language_model(
        tmp_path / "LightOn-rerank-PW-0.8B", "qwen3.5", ("No", "Yes"), tokenizer_limit=LONG, template="$A"
    )
    edit_json(folder / "config.json", max_position_embeddings=LONG)
    with pytest.raises(UnsupportedArchitectureError, match="by a template that is not known here.*score_template="):
        load(folder)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        rows = [model(input_ids=tokenized(folder, framed(*pair))["input_ids"][None]).logits[0, -1] for pair in PAIRS]
    expected = np.array([float(row[token_id(folder, "Yes")] - row[token_id(folder, "No")]) for row in rows], np.float32)
    with load(folder, score_template=FRAME) as engine:
        worst = difference(scores(engine), expected)
        record_property("error in torch", worst)
        assert worst <= TOLERANCE
        assert difference(engine.score(QUERIES, DOCUMENTS).scores, expected) <= TOLERANCE
    with load(folder, score_template=FRAME + " ") as engine:
        assert difference(scores(engine), expected) > VISIBLE


def test_sentence_transformers_files_around_a_model_that_reads_images(tmp_path, record_property):
    """Its task is "any-to-any"; the template takes lists of parts, and the head is the table of words."""
    folder = write_hub(tmp_path / "model")
    false, true = 7, 11
    part = "{{{{ (messages | selectattr('role', 'eq', '{}') | first).content[0].text }}}}"
    source = f"Query: {part.format('query')} Document: {part.format('document')} Relevant?"
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    module = {
        "transformer_task": "any-to-any",
        "modality_config": {"message": {"method": "forward", "method_output_name": "logits", "format": "structured"}},
        "module_output_name": "causal_logits",
    }
    (folder / "sentence_bert_config.json").write_text(json.dumps(module))
    kinds = ("base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore")
    paths = ("", "1_LogitScore")
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": true, "false_token_id": false}))
    (folder / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')
    _, rows = logits(folder, [f"Query: {query} Document: {document} Relevant?" for query, document in PAIRS])
    expected = (rows[:, true] - rows[:, false]).numpy()
    with load(folder) as engine:
        worst = difference(scores(engine), expected)
        record_property("error in torch", worst)
        assert worst <= TOLERANCE
    _, rows = logits(folder, [f"Query: {query} Document: {document}" for query, document in PAIRS])
    assert difference((rows[:, true] - rows[:, false]).numpy(), expected) > VISIBLE  # without the template's end


def test_lighton_s_listwise_rerankers_write(tmp_path):
    folder = write_checkpoint(tmp_path / "LightOn-rerank-LW-2B", "qwen3.5", wrapped=True)
    with pytest.raises(UnsupportedArchitectureError, match="by writing their order, and millpond writes no text"):
        load(folder)
