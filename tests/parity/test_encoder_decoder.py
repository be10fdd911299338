"""KaLM-Reranker-V1: T5Gemma 2, whose encoder reads the document and whose decoder reads the query.

The reference is the published formula over transformers' class, one pair at a time: states of the encoder, their means
over each four tokens, and the logits of "yes" and "no" behind the decoder's prompt.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.native.models import TARGETS, compiled
from tests.parity.rerankers import DOCUMENTS, PAIRS, QUERIES, difference, load, scores, sigmoid
from tests.parity.test_backbones import TOLERANCE, VISIBLE
from tests.parity.test_backbones import difference as apart
from tests.tiny import SENTENCES, edit_json
from tests.tiny.tokenizers import write_tokenizer
from tests.variants import assert_same_direction
from tests.variants import native as native_of

from millpond.backends.native.encoder import bounds_of
from millpond.errors import InputTooLongError, InvalidRequestError, UnsupportedArchitectureError

pytestmark = pytest.mark.contract  # two engines for each case, one of them a peer's

LONG = 1024
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a query, retrieve documents that answer the query."
ADDED = ("<start_of_turn>", "<end_of_turn>", "yes", "no")
# Longer than the windows, of either part
LONGEST = (("How deep is it? " * 6, SENTENCES[3]), ("How deep is it?", " ".join(SENTENCES[1:6])))
ALL = (*PAIRS, *LONGEST)


def write(folder: Path, *, window: int = 24, **settings: Any) -> Path:
    """A checkpoint as transformers saves it, with the settings of its module for sentence-transformers."""
    from transformers import AutoTokenizer, T5Gemma2Config, T5Gemma2ForConditionalGeneration

    folder.mkdir()
    write_tokenizer(folder, "gemma", limit=LONG, lowercase=False, template="$A")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(ADDED)})
    tokenizer.save_pretrained(folder)
    part = {
        "vocab_size": len(tokenizer),
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "max_position_embeddings": LONG,
        "query_pre_attn_scalar": 12,
        "sliding_window": window,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    }
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "image_size": 64,
        "patch_size": 4,
    }
    config = T5Gemma2Config(
        encoder={
            "text_config": {**part, "num_hidden_layers": 2, "layer_types": kinds[:2]},
            "vision_config": vision,
            "eoi_token_index": 5,
        },
        decoder={**part, "num_hidden_layers": 3, "layer_types": kinds},
    )
    torch.manual_seed(0)
    model = T5Gemma2ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if parameter.ndim < 2 else 0.15 if "embed_tokens" in name else 1.3 / parameter.shape[-1] ** 0.5
            parameter.copy_(torch.randn_like(parameter) * scale)
    model.save_pretrained(folder)
    (folder / "kalm_cross_encoder_config.json").write_text(json.dumps(settings), encoding="utf-8")
    listed = [{"idx": 0, "name": "0", "path": "", "type": "kalm_cross_encoder.KaLMCrossEncoderModule"}]
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    (folder / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}', encoding="utf-8")
    return folder


def prompt(query: str, instruction: str = INSTRUCTION) -> str:
    return (
        f"<bos><start_of_turn>user\n{SYSTEM}\n\n<Instruct>: {instruction}\n<Query>: {query}<end_of_turn>\n"
        "<start_of_turn>model\n\n\n\n"
    )


class Reference:
    """The published formula."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer, T5Gemma2ForConditionalGeneration

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = T5Gemma2ForConditionalGeneration.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()

    def ids(self, text: str, most: int = LONG) -> torch.Tensor:
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[:, :most]

    @torch.inference_mode()
    def __call__(
        self, document: str, decoder: str, *, chunk: int | None = 4, most: int = LONG, swapped: str | None = None
    ) -> float:
        from transformers.modeling_outputs import BaseModelOutput

        read = self.ids(f"<Document>: {document}" if swapped is None else swapped, most)
        states = self.model.get_encoder()(input_ids=read).last_hidden_state
        if chunk is not None:
            states = torch.stack([piece.mean(1) for piece in states.split(chunk, 1)], 1)
        out = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            attention_mask=torch.ones(states.shape[:2]),
            decoder_input_ids=self.ids(decoder),
        ).logits[0, -1]
        yes, no = (self.tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
        return float(out[yes] - out[no])

    @torch.inference_mode()
    def states(self, read: torch.Tensor, asked: torch.Tensor) -> np.ndarray:
        """The decoder's states of token ids."""
        states = self.model.get_encoder()(input_ids=read[None]).last_hidden_state
        states = torch.stack([piece.mean(1) for piece in states.split(4, 1)], 1)
        decoder = self.model.get_decoder()
        return decoder(input_ids=asked[None], encoder_hidden_states=states).last_hidden_state[0].numpy()

    def of(self, pairs: Sequence[tuple[str, str]], **options: Any) -> np.ndarray:
        return np.array([self(document, prompt(query), **options) for query, document in pairs], np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("kalm") / "KaLM-Reranker-V1-Nano")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def test_a_reranker_of_two_parts(folder, reference, caplog, record_property):
    expected = reference.of(ALL)
    queries, documents = ([pair[side] for pair in ALL] for side in (0, 1))
    with caplog.at_level(logging.WARNING, logger="millpond"), load(folder) as engine:
        assert engine.tasks == {"score"}
        assert engine.spec.score_type == "cross-encoder"
        actual = engine.score(queries, documents, activation=False).scores
        worst = difference(actual, expected)
        record_property("error", worst)
        assert worst <= TOLERANCE
        alone = np.array([engine.score(*pair, activation=False).scores[0] for pair in ALL])
        assert difference(actual, alone) <= TOLERANCE
        habit = engine.score(queries, documents).scores
        assert np.abs(habit - sigmoid(expected)).max() <= 1e-5
        best = engine.rerank(QUERIES[1], DOCUMENTS)
        assert len(best) == len(DOCUMENTS)
    with load(folder, backend="torch") as engine:
        worst = difference(engine.score(queries, documents, activation=False).scores, expected)
        record_property("error in torch", worst)
        assert worst <= TOLERANCE
    told = [entry.message for entry in caplog.records if "only texts are read" in entry.message]
    assert len(told) == 2 and "vision_tower" in told[0] and "multi_modal_projector" in told[0]


def test_notices_plausible_mistakes(folder, reference):
    """The next pair's document, an uncompressed one, both in one part, and a template with one line less."""
    expected = reference.of(PAIRS)
    turned = [(query, document) for (query, _), (_, document) in zip(PAIRS, PAIRS[1:] + PAIRS[:1], strict=True)]
    assert difference(reference.of(turned), expected) > VISIBLE
    assert difference(reference.of(PAIRS, chunk=None), expected) > VISIBLE
    together = [reference(document, f"<Document>: {document}" + prompt(query)) for query, document in PAIRS]
    assert difference(np.array(together, np.float32), expected) > VISIBLE
    shorter = [reference(document, prompt(query)[:-1]) for query, document in PAIRS]
    assert difference(np.array(shorter, np.float32), expected) > VISIBLE


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_windows_of_either_part(backend, tmp_path):
    """Without them, texts that are longer have other scores; the encoder's are longer ahead than back."""
    narrow, wide = (write(tmp_path / f"KaLM-Reranker-V1-{window}", window=window) for window in (8, 512))
    expected, plain = (Reference(place).of(ALL) for place in (narrow, wide))
    assert difference(plain, expected) > VISIBLE
    queries, documents = ([pair[side] for pair in ALL] for side in (0, 1))
    with load(narrow, backend=backend) as engine:
        assert difference(engine.score(queries, documents, activation=False).scores, expected) <= TOLERANCE


@pytest.mark.parametrize("chunk", [None, 1, 3, 32])
def test_compression(chunk, folder, reference):
    expected = reference.of(PAIRS, chunk=chunk)
    with load(folder, hf_overrides={"encoder_chunk_size": chunk}) as engine:
        assert difference(scores(engine), expected) <= TOLERANCE
        assert difference(scores(engine), reference.of(PAIRS)) > VISIBLE


def test_settings_of_the_checkpoint_and_an_instruction(tmp_path):
    settings = {"encoder_chunk_size": 2, "document_max_length": 24, "query_max_length": 5}
    folder = write(tmp_path / "anything", **settings, system_instruction=SYSTEM.replace("Judge", "Say"))
    reference = Reference(folder)
    prompts = [prompt(query).replace("Judge", "Say") for query, _ in PAIRS]
    asked = [reference.tokenizer.decode(reference.ids(query, 5)[0]) for query, _ in PAIRS]
    cut = [prompt(query).replace("Judge", "Say") for query in asked]

    def expected(decoders: list[str], most: int) -> np.ndarray:
        rows = zip(decoders, PAIRS, strict=True)
        return np.array([reference(document, text, chunk=2, most=most) for text, (_, document) in rows])

    with load(folder) as engine:
        output = engine.score(QUERIES, DOCUMENTS, activation=False)
        assert difference(output.scores, expected(cut, 24)) <= TOLERANCE
        assert difference(output.scores, expected(prompts, 24)) > VISIBLE
        assert difference(output.scores, expected(cut, LONG)) > VISIBLE
        assert output.truncated.any() and not output.truncated.all()
        with pytest.raises(InputTooLongError):
            engine.score(QUERIES, DOCUMENTS, truncate="error")
        told = prompt("a", "Find water").replace("Judge", "Say")
        actual = engine.score("a", "b", instruction="Find water", activation=False).scores
        assert difference(actual, np.array([reference("b", told, chunk=2)])) <= TOLERANCE
    longer = {"document_max_length": LONG, "query_max_length": LONG}
    with load(folder, hf_overrides=longer) as engine:
        assert (
            difference(engine.score(QUERIES, DOCUMENTS, activation=False).scores, expected(prompts, LONG)) <= TOLERANCE
        )


@compiled
@pytest.mark.parametrize(("highest", "dtype"), TARGETS)
@pytest.mark.parametrize("window", [8, 24])
def test_states_by_every_instruction_set_and_any_threads(window, highest, dtype, tmp_path):
    folder = write(tmp_path / "KaLM-Reranker-V1-Nano", window=window)
    reference, encoder = Reference(folder), native_of(folder, highest, dtype)
    rows = [
        (reference.ids(f"<Document>: {document}")[0], reference.ids(prompt(query))[0]) for query, document in ALL * 4
    ]
    ids = torch.cat([part for row in rows for part in row]).numpy().astype(np.int32)
    types = np.concatenate([np.repeat(np.arange(2, dtype=np.int32), [*map(len, row)]) for row in rows])
    bounds = bounds_of([sum(map(len, row)) for row in rows])
    assert len(ids) > 4 * encoder.block  # several slices
    expected = [reference.states(*row) for row in rows[: len(ALL)]] * 4
    for threads in (1, 3):
        whole = encoder.encode(ids, bounds, types=types, threads=threads)
        last = encoder.encode(ids, bounds, types=types, rows="last", threads=threads)
        own = [whole[end - len(row[1]) : end] for end, row in zip(bounds[1:], rows, strict=True)]
        assert all((whole[start : start + len(row[0])] == 0).all() for start, row in zip(bounds, rows, strict=False))
        assert np.abs(last - np.stack([part[-1] for part in own])).max() <= (1e-5 if dtype == "float32" else 0.1)
        if dtype == "float32":
            assert apart(own, expected) <= TOLERANCE
        else:
            assert_same_direction(np.concatenate(own), np.concatenate(expected))
    with pytest.raises(IndexError, match="a part for the encoder and one for the decoder"):
        encoder.encode(ids, bounds, types=np.ones_like(types))


def test_known_by_its_name_too(folder, reference, tmp_path):
    """The first revisions have none of sentence-transformers' files."""
    place = tmp_path / "KaLM-Reranker-V1-Small-R2"
    place.mkdir()
    for path in folder.iterdir():
        if path.name not in ("kalm_cross_encoder_config.json", "modules.json", "config_sentence_transformers.json"):
            (place / path.name).write_bytes(path.read_bytes())
    with load(place) as engine:
        assert difference(scores(engine), reference.of(PAIRS)) <= TOLERANCE
    place = place.rename(tmp_path / "t5gemma-2-270m-270m")
    with pytest.raises(UnsupportedArchitectureError, match="an encoder with a decoder that writes.*rerankers"):
        load(place)
    template = (
        "{{ (messages | selectattr('role', 'eq', 'document') | first).content }}\ue0f5<bos>"
        "{{ (messages | selectattr('role', 'eq', 'query') | first).content }}"
    )
    named = {"classifier_from_token": ["no", "yes"]}
    expected = np.array([reference("", f"<bos>{query}", swapped=document) for query, document in PAIRS])
    with load(place, hf_overrides=named, score_template=template) as engine:
        assert difference(scores(engine), expected) <= TOLERANCE
    with pytest.raises(InvalidRequestError, match="must have the character"):
        load(place, hf_overrides=named, score_template=template.replace("\ue0f5", " "))


def test_capped_logits_are_refused(folder, tmp_path):
    place = tmp_path / "KaLM-Reranker-V1-Nano"
    place.mkdir()
    for path in folder.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    stored = json.loads((place / "config.json").read_text())
    edit_json(place / "config.json", decoder=stored["decoder"] | {"final_logit_softcapping": 30.0})
    with pytest.raises(UnsupportedArchitectureError, match="final_logit_softcapping"):
        load(place)
