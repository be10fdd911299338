"""/pooling and /classify: every task of every kind of model, against the engine itself."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from starlette.testclient import TestClient
from tests.tiny import SENTENCES
from tests.tiny.heads import STEP

from millpond.server.app import create_app
from millpond.server.served.models import ServedModels
from millpond.server.settings.config import ModelConfig

TEXTS = list(SENTENCES[:3])
STEPS = [f"Fill it. {STEP} Empty it. {STEP}", f"Drain the pond. {STEP}"]


@pytest.fixture(scope="module")
def models(pool):
    return {model.name: model.engine for model in pool[0]}


@pytest.fixture(scope="module")
def ask(pool):
    def ask(model, *, path="/pooling", status=200, **body):
        response = pool[1].post(path, json={"model": model, **body})
        assert response.status_code == status, response.text
        return response

    return ask


def data(response):
    return [np.array(item["data"], dtype=np.float32) for item in response.json()["data"]]


def same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def error_of(response):
    return response.json()["error"]


class TestTasks:
    @pytest.mark.parametrize("task_options", [{"task": "embed"}, {"task": "embedding"}, {}])
    def test_embed(self, ask, models, task_options):
        same(data(ask("embedder", input=TEXTS, **task_options)), models["embedder"].embed(TEXTS).embeddings)

    @pytest.mark.parametrize("task_options", [{"task": "classify"}, {"task": "score"}, {}])
    def test_classify(self, ask, models, task_options):
        same(data(ask("classifier", input=TEXTS, **task_options)), models["classifier"].classify(TEXTS).probs)

    @pytest.mark.parametrize("model", ["embedder", "colbert", "llm"])
    def test_token_embed(self, ask, models, model):
        actual = data(ask(model, input=TEXTS, task="token_embed"))
        same(actual, models[model].encode(TEXTS, task="token_embed").embeddings)
        assert len({len(matrix) for matrix in actual}) > 1

    def test_a_query(self, ask, models):
        actual = data(ask("colbert", input=TEXTS, role="query"))
        same(actual, models["colbert"].token_embed(TEXTS, role="query").embeddings)
        assert {len(matrix) for matrix in actual} == {12}

    @pytest.mark.parametrize("task_options", [{"task": "token_classify"}, {"task": "encode"}, {}])
    def test_token_classify(self, ask, models, task_options):
        same(
            data(ask("token_classifier", input=TEXTS, **task_options)),
            models["token_classifier"].token_classify(TEXTS).probs,
        )

    def test_rewards_are_raw(self, ask, models):
        actual = data(ask("reward_model", input=STEPS, task="reward"))
        same(actual, models["reward_model"].reward(STEPS).rewards)
        assert [matrix.shape for matrix in actual] == [(2, 2), (1, 2)]

    def test_the_first_task_of_the_model(self, ask, models):
        same(data(ask("llm", input=TEXTS)), models["llm"].embed(TEXTS).embeddings)

    def test_the_answers_shape(self, ask, models):
        answer = ask("classifier", input=TEXTS).json()
        assert answer["id"].startswith("pooling-") and answer["object"] == "list" and answer["model"] == "classifier"
        assert [(item["index"], item["object"]) for item in answer["data"]] == [(i, "pooling") for i in range(3)]
        count = models["classifier"].classify(TEXTS).usage.prompt_tokens
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == count

    def test_without_a_model(self, embedder, classifier):
        configs = [ModelConfig(model=str(folder), names=(folder.name,)) for folder in (embedder, classifier)]
        with TestClient(create_app(ServedModels.load(configs))) as client:
            assert client.post("/pooling", json={"input": "a", "task": "classify"}).json()["model"] == "classifier"
            unclear = client.post("/pooling", json={"input": "a"})
        assert unclear.status_code == 400 and "embedder, classifier" in error_of(unclear)["message"]

    @pytest.mark.parametrize(
        ("model", "body", "part", "param"),
        [
            ("embedder", {"task": "generate"}, "Unsupported task: 'generate' Supported tasks: (", "task"),
            ("embedder", {"task": "classify"}, "Unsupported task: 'classify' Supported tasks: ('embed',", "task"),
            ("embedder", {"task": "reward"}, "Unsupported task: 'reward'", "task"),
            ("embedder", {"dimensions": 16}, "dimensions is currently not supported", "dimensions"),
            ("classifier", {"role": "query"}, "role='query' means nothing to classify", None),
            ("embedder", {"softmax": True, "normalize": False}, "contradict", None),
            ("embedder", {"activation": "tanh"}, "'tanh'", "activation"),
            ("reward_model", {"task": "reward", "step_tag_id": True}, "int_type", "step_tag_id"),
            ("reward_model", {"task": "reward", "step_tag_id": -1}, "greater_than_equal", "step_tag_id"),
            ("reward_model", {"task": "reward", "returned_token_ids": [0, 9]}, "returned_token_ids holds 9", None),
            ("reward_model", {"task": "reward", "returned_token_ids": []}, "returned_token_ids", None),
            ("nobody", {}, "The model `nobody` does not exist.", None),
        ],
    )
    def test_refused(self, ask, model, body, part, param):
        actual = error_of(ask(model, status=404 if model == "nobody" else 400, input="a", **body))
        assert part in actual["message"] and actual["param"] == param
        assert "/tmp" not in actual["message"]


class TestOptions:
    @pytest.mark.parametrize("name", ["use_activation", "activation", "softmax", "normalize"])
    def test_logits(self, ask, models, name):
        actual = data(ask("classifier", input=TEXTS, **{name: False}))
        same(actual, models["classifier"].classify(TEXTS, activation=False).probs)

    def test_an_activation_by_name(self, ask, models):
        actual = data(ask("classifier", input=TEXTS, activation="sigmoid"))
        same(actual, models["classifier"].classify(TEXTS, activation="sigmoid").probs)

    @pytest.mark.parametrize("name", ["use_activation", "activation", "normalize"])
    def test_vectors(self, ask, models, name):
        same(
            data(ask("embedder", input=TEXTS, **{name: False})),
            models["embedder"].embed(TEXTS, normalize=False).embeddings,
        )

    def test_rewards_as_probabilities(self, ask, models):
        actual = data(ask("reward_model", input=STEPS, task="reward", use_activation=True))
        same(actual, models["reward_model"].reward(STEPS, activation=True).rewards)
        np.testing.assert_allclose([matrix.sum(axis=1).mean() for matrix in actual], 1, atol=1e-5)

    def test_without_a_task_it_rewards_and_does_not_embed(self, ask):
        actual = data(ask("reward_model", input=STEPS))
        same(actual, data(ask("reward_model", input=STEPS, task="token_classify")))
        assert [matrix.shape for matrix in actual] == [(2, 2), (1, 2)]

    def test_steps_of_this_request(self, ask, models):
        tag = models["reward_model"].tokenize(STEPS[1:])[0][1]
        actual = data(ask("reward_model", input=STEPS[1:], task="reward", step_tag_id=tag))
        same(actual, models["reward_model"].reward(STEPS[1:], step_tag_id=tag).rewards)
        other = data(ask("reward_model", input=STEPS[1:], task="reward"))
        assert actual[0].shape == (1, 2) and np.abs(actual[0] - other[0]).max() > 1e-3

    def test_columns_of_this_request(self, ask, models):
        actual = data(ask("reward_model", input=STEPS, task="reward", returned_token_ids=[1]))
        same(actual, [matrix[:, 1:] for matrix in models["reward_model"].reward(STEPS).rewards])

    @pytest.mark.parametrize("task", ["reward", "token_classify", None])
    def test_a_language_model_that_judges_steps(self, ask, models, task):
        options = {"step_tag_id": 9, "returned_token_ids": [7, 8], "use_activation": True}
        ids = [[5, 9, 6, 9], [9]]
        actual = data(ask("llm", input=ids, task=task, **options))
        assert [matrix.shape for matrix in actual] == [(2, 2), (1, 2)]
        np.testing.assert_allclose([matrix.sum(axis=1).mean() for matrix in actual], 1, atol=1e-5)
        alone = data(ask("llm", input=[[9]], task=task, **{**options, "returned_token_ids": [8, 7]}))
        np.testing.assert_allclose(alone[0][:, ::-1], actual[1], atol=1e-6)

    def test_a_conversation(self, ask, models):
        talk = [{"role": "user", "content": "Fill it."}, {"role": "assistant", "content": f"Done. {STEP}"}]
        actual = data(ask("reward_model", messages=talk, task="reward"))
        same(actual, models["reward_model"].reward([talk]).rewards)


class TestEncoding:
    def test_base64(self, ask, models):
        answer = ask("colbert", input=TEXTS, encoding_format="base64", embed_dtype="float16").json()
        actual = [
            np.frombuffer(base64.b64decode(item["data"]), dtype="<f2").reshape(item["shape"]) for item in answer["data"]
        ]
        for one, other in zip(actual, models["colbert"].token_embed(TEXTS).embeddings, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-3)

    @pytest.mark.parametrize("copies", [1, 30])
    def test_bytes(self, ask, models, copies):
        """The table is in the header, or after the numbers if it is too long."""
        response = ask("colbert", input=TEXTS * copies, encoding_format="bytes")
        metadata = json.loads(response.headers["metadata"])
        assert len(response.headers["metadata"]) < 4096
        table = metadata["data"]
        if copies > 1:
            assert table is None
            table = json.loads(response.content[metadata["table"]["start"] : metadata["table"]["end"]])
            assert metadata["table"]["end"] == len(response.content)
        actual = [
            np.frombuffer(response.content[item["start"] : item["end"]], dtype="<f4").reshape(item["shape"])
            for item in table
        ]
        same(actual, models["colbert"].token_embed(TEXTS * copies).embeddings)


class TestClassify:
    def test_labels(self, ask, models):
        answer = ask("classifier", path="/classify", input=TEXTS).json()
        expected = models["classifier"].classify(TEXTS)
        assert answer["id"].startswith("classify-") and answer["object"] == "list" and answer["model"] == "classifier"
        assert [item["label"] for item in answer["data"]] == [top[0].label for top in expected.top(1)]
        assert {item["num_classes"] for item in answer["data"]} == {3}
        np.testing.assert_allclose([item["probs"] for item in answer["data"]], expected.probs, atol=1e-6)
        assert answer["usage"]["prompt_tokens"] == expected.usage.prompt_tokens

    @pytest.mark.parametrize("name", ["use_activation", "activation", "softmax"])
    def test_logits(self, ask, models, name):
        answer = ask("classifier", path="/classify", input=TEXTS[0], **{name: False}).json()
        expected = models["classifier"].classify(TEXTS[:1], activation=False).probs
        np.testing.assert_allclose([item["probs"] for item in answer["data"]], expected, atol=1e-5)

    def test_token_ids(self, ask, models):
        ids = models["classifier"].tokenize(TEXTS)
        answer = ask("classifier", path="/classify", input=ids).json()
        expected = models["classifier"].classify(TEXTS).probs
        np.testing.assert_allclose([item["probs"] for item in answer["data"]], expected, atol=1e-6)

    @pytest.mark.parametrize(
        ("model", "status", "body", "part"),
        [
            ("embedder", 501, {"input": "a"}, "The model does not support Classification API"),
            ("classifier", 400, {"input": []}, "You must pass at least one prompt"),
            ("classifier", 400, {"input": " ".join(SENTENCES)}, "This model's maximum context length is 64 tokens."),
            ("classifier", 400, {"messages": [{"role": "user", "content": "a"}]}, "classifier has none"),
            ("classifier", 400, {"input": "a", "use_activation": 1}, "bool_type"),
        ],
    )
    def test_refused(self, ask, model, status, body, part):
        assert part in error_of(ask(model, path="/classify", status=status, **body))["message"]

    def test_cut(self, ask, models):
        answer = ask("classifier", path="/classify", input=" ".join(SENTENCES), truncate_prompt_tokens=-1).json()
        expected = models["classifier"].classify([" ".join(SENTENCES)]).probs
        np.testing.assert_allclose([item["probs"] for item in answer["data"]], expected, atol=1e-6)
