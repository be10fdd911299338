"""Layerwise rerankers beside transformers' hidden states of all layers and the heads of the models' own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.parity.comparison import TOLERANCE, VISIBLE
from tests.parity.rerankers import DOCUMENTS, LONG, PAIRS, QUERIES, difference, load, scores
from tests.tiny.heads import headed

from millpond.errors import ModelLoadError, UnsupportedArchitectureError

pytestmark = pytest.mark.contract  # two engines for each case, one of them a peer's

QUESTION = "Predict whether passage B contains an answer to query A."
FIRST, LAST = 2, 5  # layers behind which there are heads
HEADS = {f"lm_head.{i}.linear_head.weight": (1, 48) for i in range(LAST - FIRST + 1)}


def write_gemma(folder: Path, **config: Any) -> Path:
    """bge-reranker-v2.5-gemma2-lightweight."""
    own = {"AutoModelForCausalLM": "gemma_model.CostWiseGemmaForCausalLM"}
    fields = {
        "model_type": "cost_wise_gemma",
        "layer_wise": True,
        "start_layer": FIRST,
        "layer_sep": 1,
        "auto_map": own,
    }
    size = {"num_hidden_layers": LAST, "max_position_embeddings": LONG, "final_logit_softcapping": 2.0}
    return headed(
        "gemma2",
        size,
        "CostWiseGemmaForCausalLM",
        HEADS,
        prefix="model.",
        config={**fields, **config},
        tokenizer_limit=LONG,
    )(folder)


YES_OR_NO = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
    "prediction of either 'Yes' or 'No'."
)


def write_minicpm(folder: Path, **config: Any) -> Path:
    """bge-reranker-v2-minicpm-layerwise."""
    own = {"AutoModelForCausalLM": "modeling_minicpm_reranker.LayerWiseMiniCPMForCausalLM"}
    heads = {"head_type": "simple", "head_multi": True, "start_layer": FIRST, "dim_model_base": 16}
    fields = {"model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, **heads, "auto_map": own}
    size = {"num_hidden_layers": LAST, "max_position_embeddings": LONG}
    return headed(
        "llama",
        size,
        "LayerWiseMiniCPMForCausalLM",
        HEADS,
        prefix="model.",
        config={**fields, **config},
        tokenizer_limit=LONG,
    )(folder)


def ids_of(folder: Path, query: str, document: str, question: str) -> torch.Tensor:
    """Of the models' own code: each line, and each newline, is tokenized apart."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    parts = [f"A: {query}", "\n", f"B: {document}", "\n", question]
    ids = [token for part in parts for token in tokenizer(part, add_special_tokens=False)["input_ids"]]
    return torch.tensor([tokenizer.bos_token_id, *ids])


@torch.inference_mode()
def expected_of(
    folder: Path, model: torch.nn.Module, layers: int, head: int, *, question: str, softcap: float | None
) -> np.ndarray:
    weight = load_file(folder / "model.safetensors")[f"lm_head.{head}.linear_head.weight"]
    rows = []
    for pair in PAIRS:
        states = model(ids_of(folder, *pair, question)[None], output_hidden_states=True).hidden_states  # type: ignore[operator]
        state = states[layers][0, -1]
        rows.append(weight @ (state if layers == LAST else model.norm(state)))  # type: ignore[operator]
    logits = torch.cat(rows)
    return (logits if softcap is None else softcap * torch.tanh(logits / softcap)).numpy()


def reference(folder: Path, model_type: str, **fields: Any) -> torch.nn.Module:

    from transformers import AutoConfig, AutoModel

    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    left_out = ("auto_map", "architectures", "model_type", "layer_types", "rope_scaling")
    config = AutoConfig.for_model(model_type, **{**{k: v for k, v in content.items() if k not in left_out}, **fields})
    return AutoModel.from_pretrained(
        folder, config=config, attn_implementation="eager", dtype=torch.float32, local_files_only=True
    ).eval()


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("cutoff", [None, 3, [FIRST]], ids=str)
def test_gemma_s_first_head_reads_the_last_layer_that_is_run(cutoff, backend, tmp_path, record_property):
    folder = write_gemma(tmp_path / "model")
    layers = LAST if cutoff is None else cutoff if isinstance(cutoff, int) else cutoff[0]
    model = reference(folder, "gemma2")
    expected = expected_of(folder, model, layers, 0, question=QUESTION, softcap=2.0)
    overrides = None if cutoff is None else {"cutoff_layers": cutoff}
    with load(folder, backend=backend, hf_overrides=overrides) as engine:
        assert engine.spec.score_type == "cross-encoder"
        assert "embed" not in engine.tasks
        actual = scores(engine)
        worst = difference(actual, expected)
        record_property("error", worst)
        assert worst <= TOLERANCE
        assert np.array_equal(engine.score(QUERIES, DOCUMENTS).scores, actual)  # the raw logit
    others = [(layers, 0, None), (layers, layers - FIRST or 1, 2.0), (LAST if layers < LAST else FIRST, 0, 2.0)]
    for layer, head, softcap in others:  # without the cap, another head, other layers
        other = expected_of(folder, model, layer, head, question=QUESTION, softcap=softcap)
        assert difference(actual, other) > VISIBLE


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("cutoff", [None, 3], ids=str)
def test_minicpm_s_own_head_reads_the_last_layer_that_is_run(cutoff, backend, tmp_path, record_property):
    """Llama with scaled embeddings and residuals, which transformers has as Granite."""
    folder = write_minicpm(tmp_path / "model")
    layers = cutoff or LAST
    scaled = {"attention_multiplier": 12**-0.5, "logits_scaling": 1.0, "embedding_multiplier": 12.0}
    model = reference(folder, "granite", **scaled, residual_multiplier=1.4 / LAST**0.5)
    expected = expected_of(folder, model, layers, layers - FIRST, question=YES_OR_NO, softcap=None)
    with load(folder, backend=backend, hf_overrides={"cutoff_layers": layers}) as engine:
        assert "embed" not in engine.tasks
        actual = scores(engine)
        worst = difference(actual, expected)
        record_property("error", worst)
        assert worst <= TOLERANCE
    first = expected_of(folder, model, layers, 0, question=YES_OR_NO, softcap=None)
    assert difference(actual, first) > VISIBLE
    if cutoff:  # the residuals are scaled by the number of all layers
        model = reference(folder, "granite", **scaled, residual_multiplier=1.4 / cutoff**0.5)
        wrong = expected_of(folder, model, layers, layers - FIRST, question=YES_OR_NO, softcap=None)
        assert difference(actual, wrong) > VISIBLE


def test_the_lines_are_tokenized_apart(tmp_path):
    """A newline at the end of a text would become one token with the one behind it."""
    folder = write_gemma(tmp_path / "model")
    model = reference(folder, "gemma2")
    with load(folder) as engine:
        asked = engine.score(QUERIES, DOCUMENTS, instruction="Is B a paraphrase of A?", activation=False).scores
        expected = expected_of(folder, model, LAST, 0, question="Is B a paraphrase of A?", softcap=2.0)
        assert difference(asked, expected) <= TOLERANCE
    query, document = QUERIES[0], "deep water\n" * 30
    ids = ids_of(folder, query, document, QUESTION)
    after = len(ids_of(folder, "", "", QUESTION)) - len(ids_of(folder, "", "", "")) + 1
    limit = len(ids) - 20
    cut = torch.cat((ids[: limit - after], ids[-after:]))
    with load(folder, max_length=limit) as engine, torch.inference_mode():
        output = engine.score(query, document)
        assert output.truncated.all()
        weight = load_file(folder / "model.safetensors")["lm_head.0.linear_head.weight"]
        logit = 2.0 * torch.tanh(weight @ model(cut[None]).last_hidden_state[0, -1] / 2.0)
        assert abs(output.scores[0] - float(logit)) <= TOLERANCE


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"cutoff_layers": 1}, ModelLoadError, r"cutoff_layers=1 must be one number of layers from 2 to 5"),
        ({"cutoff_layers": [2, 3]}, ModelLoadError, r"cutoff_layers=\[2, 3\] must be one"),
        ({"compress_ratio": 2}, UnsupportedArchitectureError, "compress_ratio=2 averages tokens between layers"),
        ({"layer_wise": False}, UnsupportedArchitectureError, "layer_wise False"),
    ],
)
def test_what_is_not_run_is_refused(fields, error, message, tmp_path):
    folder = write_gemma(tmp_path / "model")
    with pytest.raises(error, match=message):
        load(folder, hf_overrides=fields)
