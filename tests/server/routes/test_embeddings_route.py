"""/v1/embeddings: every form of a request and of its answer, against the engine itself."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from tests.tiny import SENTENCES

from millpond.inputs import TokenIds
from millpond.server.app import create_app
from millpond.server.served.models import ServedModels
from millpond.server.settings.config import ModelConfig, ServerConfig

TEXTS = list(SENTENCES[:5])
LONG = " ".join(SENTENCES)
TALK = [{"role": "user", "content": "How deep is it?"}]
RENDERED = "<|im_start|>user\nHow deep is it?<|im_end|>\n"


@pytest.fixture(scope="module")
def models(pool):
    return {model.name: model.engine for model in pool[0]}


@pytest.fixture(scope="module")
def ask(pool):
    def ask(model="embedder", *, status=200, **body):
        response = pool[1].post("/v1/embeddings", json={"model": model, **body})
        assert response.status_code == status, response.text
        return response

    return ask


def vectors(response):
    return np.array([item["embedding"] for item in response.json()["data"]], dtype=np.float32)


def bare(engine, texts):
    """Vectors of texts rendered by a template, which adds their only special tokens."""
    items = [TokenIds(tuple(ids)) for ids in engine.tokenize(texts, special_tokens=False)]
    return engine.submit("embed", items).result().embeddings


def error(response):
    return response.json()["error"]


class TestInput:
    def test_the_answers_shape(self, ask, models):
        answer = ask(input=TEXTS[:2], user="somebody", request_id="mine").json()
        assert list(answer) == ["id", "object", "created", "model", "data", "usage"]
        assert answer["id"] == "embd-mine" and answer["object"] == "list" and answer["model"] == "embedder"
        assert [(item["index"], item["object"]) for item in answer["data"]] == [(0, "embedding"), (1, "embedding")]
        count = models["embedder"].embed(TEXTS[:2]).usage.prompt_tokens
        assert answer["usage"] == {
            "prompt_tokens": count,
            "total_tokens": count,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        }

    def test_the_id_is_the_requests(self, pool):
        response = pool[1].post(
            "/v1/embeddings", json={"model": "embedder", "input": "a"}, headers={"X-Request-Id": "abc"}
        )
        assert response.json()["id"] == "embd-abc"

    @pytest.mark.parametrize("texts", [TEXTS, TEXTS[:1], ["", "a"]])
    def test_texts(self, ask, models, texts):
        np.testing.assert_allclose(vectors(ask(input=texts)), models["embedder"].embed(texts).embeddings, atol=1e-6)

    def test_one_text(self, ask, models):
        actual = vectors(ask(input=TEXTS[0]))
        np.testing.assert_allclose(actual, models["embedder"].embed(TEXTS[:1]).embeddings, atol=1e-6)

    def test_token_ids(self, ask, models):
        ids = models["embedder"].tokenize(TEXTS)
        expected = models["embedder"].embed(TEXTS).embeddings
        np.testing.assert_allclose(vectors(ask(input=ids)), expected, atol=1e-6)
        np.testing.assert_allclose(vectors(ask(input=ids[1])), expected[1:2], atol=1e-6)

    def test_without_special_tokens(self, ask, models):
        bare = models["embedder"].tokenize(TEXTS, special_tokens=False)
        actual = vectors(ask(input=TEXTS, add_special_tokens=False))
        np.testing.assert_allclose(actual, vectors(ask(input=bare)), atol=1e-6)
        assert np.abs(actual - vectors(ask(input=TEXTS))).max() > 0.01

    def test_null_is_what_was_left_out(self, ask):
        """Some clients send every field they know."""
        names = ["encoding_format", "embed_dtype", "endianness", "dimensions", "user", "priority", "messages"]
        nulls = dict.fromkeys([*names, "add_generation_prompt", "truncate_prompt_tokens", "input_type"])
        np.testing.assert_allclose(vectors(ask(input=TEXTS, **nulls)), vectors(ask(input=TEXTS)), atol=1e-6)

    def test_without_a_model(self, embedder, classifier):
        """One of the two embeds."""
        configs = [ModelConfig(model=str(folder), names=(folder.name,)) for folder in (classifier, embedder)]
        with TestClient(create_app(ServedModels.load(configs))) as client:
            assert client.post("/v1/embeddings", json={"input": "a"}).json()["model"] == "embedder"
            assert client.post("/classify", json={"input": "a"}).json()["model"] == "classifier"

    def test_too_many(self, embedder):
        models = ServedModels.load([ModelConfig(model=str(embedder))])
        with TestClient(create_app(models, ServerConfig(max_inputs=2))) as client:
            assert client.post("/v1/embeddings", json={"input": ["a", "b"]}).status_code == 200
            refused = client.post("/v1/embeddings", json={"input": ["a", "b", "c"]})
        assert refused.status_code == 400 and "3 input" in error(refused)["message"]

    @pytest.mark.parametrize(
        ("body", "part", "param"),
        [
            ({"input": []}, "You must pass at least one prompt", "input"),
            ({"input": [[]]}, "index 0 has no token ids", None),
            ({"input": [[5], [5, 1 << 40]]}, "index 1 .* out of vocabulary", None),
            ({"input": [[5], [-1]]}, "index 1 .* out of vocabulary", None),
            ({"input": ["a", 5]}, r"input.texts.1: .*string_type", "input"),
            ({"input": [5, "a"]}, r"input.tokens.1: .*int_type", "input"),
            ({"input": [[5], "a"]}, r"input.token_lists.1: .*list_type", "input"),
            ({"input": [[5], [5, "a"]]}, r"input.token_lists.1.1: .*int_type", "input"),
            ({"input": [5.0]}, r"input.tokens.0: .*int_type", "input"),
            ({"input": [True]}, r"input.tokens.0: .*int_type", "input"),
            ({"input": 5}, r"string_type", "input"),
            ({"input": {"a": 1}}, r"string_type", "input"),
            ({"input": None}, "input is missing", None),
            ({}, "input is missing", None),
            ({"input": "a", "messages": TALK}, "exclude each other", None),
            ({"input": "a", "encoding_format": "hex"}, "literal_error.*'hex'", "encoding_format"),
            ({"input": "a", "embed_dtype": "int8"}, "literal_error.*'int8'", "embed_dtype"),
            ({"input": "a", "endianness": "middle"}, "literal_error.*'middle'", "endianness"),
            ({"input": "a", "dimensions": True}, "int_type", "dimensions"),
            ({"input": "a", "dimensions": 16}, "does not support Matryoshka embeddings", "dimensions"),
            ({"input": "a", "dimensions": -1}, "does not support Matryoshka embeddings", "dimensions"),
            ({"input": "a", "truncate_prompt_tokens": -2}, "greater_than_equal", "truncate_prompt_tokens"),
            ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0", None),
            ({"input": "a", "truncation_side": "middle"}, "literal_error", "truncation_side"),
            ({"input": "a", "padding": "max_length"}, "millpond never pads", None),
            ({"input": "a", "cache_salt": ""}, "string_too_short", "cache_salt"),
            ({"input": "a", "late_chunking_params": {"chunk_size": 4}}, "is not served", "late_chunking_params"),
            ({"input": "a", "input_type": "prose"}, "Unsupported input_type 'prose'", None),
            ({"input": "a", "role": "query", "input_type": "query"}, "exclude each other", "role"),
            ({"input": "a", "prompt_name": "nobody"}, "nobody", None),
            ({"input": "a", "normalize": True, "use_activation": False}, "contradict", None),
        ],
    )
    def test_refused(self, ask, body, part, param):
        actual = error(ask(status=400, **body))
        assert actual["code"] == 400 and actual["param"] == param
        assert re.search(part, actual["message"])

    @pytest.mark.parametrize(("model", "status"), [("nobody", 404), ("classifier", 501)])
    def test_another_model(self, ask, model, status):
        options = error(ask(model, status=status, input="a"))["message"]
        assert options in ("The model `nobody` does not exist.", "The model does not support Embeddings API")

    def test_fields_that_nobody_knows(self, ask):
        ask(input="a", input_text="b", extra={"c": 1}, priority=-3, cache_salt="x", mm_processor_kwargs={})


class TestTruncation:
    def test_over_long_texts_are_refused_by_their_place(self, ask):
        actual = error(ask(status=400, input=["a", LONG]))
        assert actual["message"].startswith("This model's maximum context length is 64 tokens. However")
        assert "index 1" in actual["message"] and actual["param"] == "input_tokens"

    def test_and_so_are_token_ids(self, ask):
        assert "64 tokens" in error(ask(status=400, input=[[5] * 65]))["message"]

    @pytest.mark.parametrize("limit", [-1, 64, 10])
    @pytest.mark.parametrize("side", [None, "right", "left"])
    def test_cut(self, ask, models, limit, side):
        answer = ask(input=["a", LONG], truncate_prompt_tokens=limit, truncation_side=side)
        (first,) = models["embedder"].tokenize([LONG], special_tokens=False)
        room = (64 if limit == -1 else limit) - 2
        kept = first[-room:] if side == "left" else first[:room]
        ((start, end),) = models["embedder"].tokenize([""])
        np.testing.assert_allclose(vectors(answer)[1:], vectors(ask(input=[[start, *kept, end]])), atol=1e-6)

    def test_more_than_the_model_reads(self, ask):
        actual = error(ask(status=400, input="a", truncate_prompt_tokens=65))
        assert actual["message"] == (
            "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation size."
        )


class TestEncoding:
    def test_base64_is_little_endian_float32(self, ask):
        answer = ask(input=TEXTS, encoding_format="base64").json()
        actual = [np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4") for item in answer["data"]]
        np.testing.assert_allclose(actual, vectors(ask(input=TEXTS)), atol=1e-6)
        assert "shape" not in answer["data"][0]

    @pytest.mark.parametrize("order", ["little", "big", "native"])
    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
    def test_dtypes(self, ask, dtype, order):
        answer = ask(input=TEXTS[0], encoding_format="base64", embed_dtype=dtype, endianness=order).json()
        data = base64.b64decode(answer["data"][0]["embedding"])
        kind = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(dtype) or getattr(torch, dtype)
        if order == "big":
            data = np.frombuffer(data, dtype=f"u{kind.itemsize}").byteswap().tobytes()
        actual = torch.frombuffer(bytearray(data), dtype=kind).float().numpy()
        tolerance = 0.1 if dtype.startswith("fp8") else 1e-2 if kind.itemsize == 2 else 1e-6
        np.testing.assert_allclose(actual, vectors(ask(input=TEXTS[0]))[0], atol=tolerance)

    def test_bytes(self, ask):
        response = ask(input=TEXTS[:3], encoding_format="bytes", embed_dtype="float16")
        metadata = json.loads(response.headers["metadata"])
        assert response.headers["content-type"] == "application/octet-stream"
        assert metadata["model"] == "embedder" and metadata["usage"]["prompt_tokens"] > 3
        assert metadata["data"][1] == {
            "index": 1,
            "embed_dtype": "float16",
            "endianness": "little",
            "start": 96,
            "end": 192,
            "shape": [48],
        }
        actual = [
            np.frombuffer(response.content[item["start"] : item["end"]], dtype="<f2") for item in metadata["data"]
        ]
        np.testing.assert_allclose(actual, vectors(ask(input=TEXTS[:3])), atol=1e-3)

    def test_bytes_of_a_usual_batch(self, ask):
        """vLLM's clients read the table in the header, which aiohttp accepts."""
        texts = [f"{i} ponds" for i in range(64)]
        response = ask(input=texts, encoding_format="bytes")
        table = json.loads(response.headers["metadata"])["data"]
        assert [item["index"] for item in table] == list(range(64))
        assert len(response.headers["metadata"]) < 8190
        actual = [np.frombuffer(response.content[item["start"] : item["end"]], dtype="<f4") for item in table]
        np.testing.assert_allclose(actual, vectors(ask(input=texts)), atol=1e-6)

    def test_bytes_of_many(self, ask):
        """The table would not fit a header."""
        texts = [f"{i} ponds" for i in range(300)]
        response = ask(input=texts, encoding_format="bytes")
        metadata = json.loads(response.headers["metadata"])
        assert len(response.headers["metadata"]) < 4096
        assert metadata["data"] is None and metadata["shape"] == [300, 48] and metadata["stride"] == 192
        actual = np.frombuffer(response.content, dtype="<f4").reshape(metadata["shape"])
        np.testing.assert_allclose(actual, vectors(ask(input=texts)), atol=1e-6)

    def test_bytes_only(self, ask):
        response = ask(input=TEXTS, encoding_format="bytes_only", endianness="big")
        assert "metadata" not in response.headers
        actual = np.frombuffer(response.content, dtype=">f4").reshape(-1, 48)
        np.testing.assert_allclose(actual, vectors(ask(input=TEXTS)), atol=1e-6)


class TestVectors:
    def test_no_prompt_unless_asked_for(self, ask, models):
        engine = models["prompted"]
        bare = engine.embed(TEXTS, prompt="").embeddings
        np.testing.assert_allclose(vectors(ask("prompted", input=TEXTS)), bare, atol=1e-6)
        assert np.abs(engine.embed(TEXTS).embeddings - bare).max() > 0.01

    @pytest.mark.parametrize(
        ("prompt_options", "role"),
        [
            ({"role": "query"}, "query"),
            ({"role": "document"}, "document"),
            ({"role": "passage"}, "document"),
            ({"prompt_name": "query"}, "query"),
            ({"input_type": "query"}, "query"),
            ({"input_type": "search_query"}, "query"),
            ({"input_type": "search_document"}, "document"),
            ({"input_type": "passage"}, "document"),
        ],
    )
    def test_prompts(self, ask, models, prompt_options, role):
        expected = models["prompted"].embed(TEXTS, role=role).embeddings
        np.testing.assert_allclose(vectors(ask("prompted", input=TEXTS, **prompt_options)), expected, atol=1e-6)

    def test_token_ids_take_no_prompt(self, ask):
        assert "index 0" in error(ask("prompted", status=400, input=[[5, 6]], role="query"))["message"]
        assert (
            "index 0"
            in error(ask("prompted", status=400, input="a", role="query", add_special_tokens=False))["message"]
        )
        ask("embedder", input=[[5, 6]], role="query")  # which has none

    @pytest.mark.parametrize("width", [16, 32, 48])
    def test_dimensions(self, ask, models, width):
        actual = vectors(ask("prompted", input=TEXTS, dimensions=width))
        expected = models["prompted"].embed(TEXTS, prompt="", dimensions=width).embeddings
        assert actual.shape == (5, width)
        np.testing.assert_allclose(actual, expected, atol=1e-6)

    @pytest.mark.parametrize("width", [17, 0, 49])
    def test_other_dimensions(self, ask, width):
        actual = error(ask("prompted", status=400, input=TEXTS, dimensions=width))
        assert actual["message"].startswith("Model 'prompted' only supports") and actual["param"] == "dimensions"

    @pytest.mark.parametrize("switch", ["normalize", "use_activation"])
    def test_normalization(self, ask, models, switch):
        raw = vectors(ask(input=TEXTS, **{switch: False}))
        np.testing.assert_allclose(raw, models["embedder"].embed(TEXTS, normalize=False).embeddings, atol=1e-5)
        assert np.abs(np.linalg.norm(raw, axis=1) - 1).min() > 0.1
        np.testing.assert_allclose(vectors(ask(input=TEXTS, **{switch: True})), vectors(ask(input=TEXTS)), atol=1e-6)


class TestConversations:
    def test_special_tokens_are_the_templates(self, ask, models):
        actual = vectors(ask("llm", messages=TALK, add_special_tokens=True))
        np.testing.assert_allclose(actual, models["llm"].embed([RENDERED]).embeddings, atol=1e-6)
        assert np.abs(actual - bare(models["llm"], [RENDERED])).max() > 0.01

    @pytest.mark.parametrize(
        "body",
        [
            {"messages": TALK},
            {"messages": [TALK]},
            {"input": TALK},
            {"input": [TALK]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "How deep is it?"}]}]},
        ],
    )
    def test_one(self, ask, models, body):
        expected = bare(models["llm"], [RENDERED])
        np.testing.assert_allclose(vectors(ask("llm", **body)), expected, atol=1e-6)

    def test_several(self, ask, models):
        other = [{"role": "system", "content": "Be brief."}, *TALK]
        actual = vectors(ask("llm", messages=[TALK, other]))
        texts = [RENDERED, "<|im_start|>system\nBe brief.<|im_end|>\n" + RENDERED]
        np.testing.assert_allclose(actual, bare(models["llm"], texts), atol=1e-6)

    def test_a_prompt_for_an_answer(self, ask, models):
        expected = bare(models["llm"], [RENDERED + "<|im_start|>assistant\n"])
        actual = vectors(ask("llm", messages=TALK, add_generation_prompt=True))
        np.testing.assert_allclose(actual, expected, atol=1e-6)

    def test_an_open_end(self, ask, models):
        expected = bare(models["llm"], ["<|im_start|>user\nHow deep is it?"])
        actual = vectors(ask("llm", messages=TALK, continue_final_message=True))
        np.testing.assert_allclose(actual, expected, atol=1e-6)

    @pytest.mark.parametrize(
        ("model", "body", "part"),
        [
            ("llm", {"messages": []}, "too_short"),
            ("llm", {"messages": [[]]}, "too_short"),
            ("llm", {"messages": "hello"}, "list_type"),
            ("llm", {"messages": [{"content": "who?"}]}, "missing"),
            ("llm", {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]}, "literal_error"),
            ("llm", {"messages": [TALK, [{"role": "user", "content": None}]]}, "conversation at index 1"),
            ("llm", {"messages": TALK, "chat_template": "{{ 1 }}"}, "--trust-request-chat-template is not set"),
            ("llm", {"messages": TALK, "chat_template_kwargs": {"tokenize": True}}, "holds tokenize"),
            (
                "llm",
                {"messages": TALK, "add_generation_prompt": True, "continue_final_message": True},
                "Cannot set both",
            ),
            ("embedder", {"messages": TALK}, "embedder has none"),
        ],
    )
    def test_refused(self, ask, model, body, part):
        assert part in error(ask(model, status=400, **body))["message"]

    def test_templates(self, llm, models):
        """The server's template precedes the model's, a trusted request's precedes both."""
        own = "{% for part in messages[0]['content'] %}[{{ part['text'] }}]{% endfor %}"
        served = ServedModels.load(
            [ModelConfig(model=str(llm), names=("llm",), dtype="float32", chat_template="{{ messages[0]['content'] }}")]
        )
        with TestClient(create_app(served, ServerConfig(trust_request_chat_template=True))) as client:
            plain = client.post("/v1/embeddings", json={"messages": TALK})
            options = client.post("/v1/embeddings", json={"messages": TALK, "chat_template": own})
            chat_options = {"chat_template": "{{ mood }}", "chat_template_kwargs": {"mood": "calm"}}
            filled = client.post("/v1/embeddings", json={"messages": TALK, **chat_options})
        expected = bare(models["llm"], ["How deep is it?", "[How deep is it?]", "calm"])
        for response, vector in zip((plain, options, filled), expected, strict=True):
            np.testing.assert_allclose(vectors(response)[0], vector, atol=1e-6)


class TestTokenForm:
    """A model with token vectors only."""

    @pytest.mark.parametrize("role", [None, "query", "document"])
    def test_matrices(self, ask, models, role):
        options = {} if role is None else {"input_type": role}
        answer = ask("colbert", input=TEXTS, **options).json()
        expected = models["colbert"].token_embed(TEXTS, role=role).embeddings
        for item, matrix in zip(answer["data"], expected, strict=True):
            np.testing.assert_allclose(item["embedding"], matrix, atol=1e-6)

    def test_base64_tells_the_shape(self, ask, models):
        item = ask("colbert", input=TEXTS[0], encoding_format="base64").json()["data"][0]
        (expected,) = models["colbert"].token_embed(TEXTS[:1]).embeddings
        actual = np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4").reshape(item["shape"])
        np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_the_curl_of_the_page(embedder: Path):
    with TestClient(
        create_app(ServedModels.load([ModelConfig(model=str(embedder), names=("intfloat/e5-small",))]))
    ) as client:
        answer = client.post(
            "/v1/embeddings",
            headers={"Content-Type": "application/json"},
            content='{\n    "input": "Hello, my name is",\n    "model": "intfloat/e5-small"\n  }',
        ).json()
    assert len(answer["data"][0]["embedding"]) == 48 and answer["model"] == "intfloat/e5-small"
