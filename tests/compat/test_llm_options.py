"""LLM: truncation, the options of a call or of each prompt, and every key of the pooler's configuration."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tests.tiny import SENTENCES

import millpond
from millpond.errors import InputTooLongError, InvalidRequestError
from millpond.vllm import LLM, PoolingParams

HELLO = "Hello, my name is"
LONG = " ".join(SENTENCES[:8])  # longer than the 64 tokens that these models read
BERT, CLASSES, PAIRS = "intfloat/e5-small", "a/bert-classifier", "BAAI/bge-reranker-v2-m3"
SHEPHERD, PROCESS = "peiyi9979/math-shepherd-mistral-7b-prm", "Qwen/Qwen2.5-Math-PRM-7B"
STEPS = [1, 300, 123, 301, 123, 302]


def vector(llm: LLM, text: str = HELLO, **options: object) -> np.ndarray:
    return np.array(llm.embed(text, **options)[0].outputs.embedding)


class TestTruncation:
    @pytest.mark.parametrize("options", [{}, {"truncation": False}, {"add_special_tokens": True}, {"padding": False}])
    @pytest.mark.parametrize("prompt", [LONG, {"prompt": LONG}, [5] * 65])
    def test_too_long_is_an_error(self, load, options, prompt):
        with pytest.raises(InputTooLongError, match="more than max_length=64"):
            load(BERT).embed([HELLO, prompt], tokenization_kwargs=options)

    def test_a_pair_that_is_too_long_is_an_error(self, load):
        with pytest.raises(InputTooLongError, match="pair at index 1"):
            load(PAIRS).score(HELLO, [HELLO, LONG])
        assert len(load(PAIRS).score(HELLO, LONG, truncate_prompt_tokens=-1)[0].prompt_token_ids) == 64

    @pytest.mark.parametrize(
        ("options", "length"),
        [
            ({"truncation": True}, 64),
            ({"truncate_prompt_tokens": -1}, 64),
            ({"truncate_prompt_tokens": 10}, 10),
            ({"truncation": True, "max_length": 10}, 10),
        ],
    )
    @pytest.mark.parametrize("side", ["right", "left"])
    def test_a_long_text_is_cut_on_request(self, load, options, length, side):
        llm = load(BERT)
        ids = llm.engine.tokenize([LONG])[0]
        (output,) = llm.embed(LONG, tokenization_kwargs={**options, "truncation_side": side})
        kept = ids[1 : length - 1] if side == "right" else ids[-length + 1 : -1]
        assert output.prompt_token_ids == [ids[0], *kept, ids[-1]]
        np.testing.assert_allclose(output.outputs.embedding, vector(llm, output.prompt_token_ids), atol=1e-6)

    @pytest.mark.parametrize("method", ["embed", "encode"])
    def test_the_limit_may_be_an_argument_or_in_the_params(self, load, method):
        run = getattr(load(BERT), method)
        cut = [
            run(LONG, truncate_prompt_tokens=10),
            run(LONG, pooling_params=PoolingParams(truncate_prompt_tokens=10)),
            run(LONG, tokenization_kwargs={"truncate_prompt_tokens": 10}, truncate_prompt_tokens=20),
        ]
        assert [len(one.prompt_token_ids) for (one,) in cut] == [10, 10, 10]
        left = PoolingParams(truncate_prompt_tokens=10)
        (from_left,) = run(LONG, pooling_params=left, tokenization_kwargs={"truncation_side": "left"})
        assert from_left.prompt_token_ids[1:] != cut[0][0].prompt_token_ids[1:]
        assert run(LONG, pooling_params=PoolingParams(truncate="start", truncate_prompt_tokens=10))[
            0
        ].prompt_token_ids == (from_left.prompt_token_ids)

    def test_late_interaction_encodes_at_its_own_lengths(self, load):
        llm = load("answerdotai/answerai-colbert-small-v1")
        assert len(llm.encode(LONG, pooling_task="token_embed")[0].prompt_token_ids) == 24
        with pytest.raises(InputTooLongError):
            llm.encode(LONG, pooling_task="token_embed", pooling_params=PoolingParams(truncate="error"))
        with pytest.raises(InputTooLongError):
            llm.encode(LONG, pooling_task="token_embed", tokenization_kwargs={"truncation": False})

    @pytest.mark.parametrize(
        "options",
        [
            {"truncate": True},
            {"padding": "max_length"},
            {"truncation": "some"},
            {"truncation_side": "top"},
            {"add_special_tokens": 0},
            {"truncate_prompt_tokens": 0},
            {"truncate_prompt_tokens": 65},
        ],
    )
    def test_an_invalid_option_is_refused(self, load, options):
        with pytest.raises(InvalidRequestError, match=next(iter(options))):
            load(BERT).embed(HELLO, tokenization_kwargs=options)


class TestParams:
    def test_millponds_own_params_are_taken_too(self, load):
        own = vector(load(BERT), pooling_params=millpond.PoolingParams(normalize=False))
        np.testing.assert_array_equal(own, vector(load(BERT), pooling_params=PoolingParams(use_activation=False)))

    @pytest.mark.parametrize(("old", "new"), [("embedding", "embed"), ("encode", "token_embed"), ("score", "score")])
    def test_older_names_of_tasks(self, old, new):
        assert PoolingParams(task=old) == PoolingParams(task=new)
        assert PoolingParams(task=old).task == new

    @pytest.mark.parametrize(
        "options",
        [{"use_activation": "no"}, *({"truncate_prompt_tokens": limit} for limit in (0, True, -2, 1.5, "8"))],
        ids=str,
    )
    def test_an_invalid_value_is_refused(self, options):
        with pytest.raises(InvalidRequestError, match=next(iter(options))):
            PoolingParams(**options)

    def test_a_limit_may_be_a_number_of_numpy(self, load):
        limit = PoolingParams(truncate_prompt_tokens=np.int8(6)).truncate_prompt_tokens
        assert (limit, type(limit)) == (6, int)
        cut = load(BERT).embed(LONG, pooling_params=PoolingParams(truncate_prompt_tokens=limit))
        assert len(cut[0].prompt_token_ids) == 6

    def test_each_prompt_may_have_its_own_params(self, load):
        llm = load(BERT, hf_overrides={"is_matryoshka": True})
        params = [PoolingParams(dimensions=8), PoolingParams(normalize=False), PoolingParams(dimensions=8)]
        vectors = [np.array(one.outputs.embedding) for one in llm.embed([HELLO] * 3, pooling_params=params)]
        assert [len(vector) for vector in vectors] == [8, 48, 8]
        np.testing.assert_allclose(vectors[0], vectors[1][:8] / np.linalg.norm(vectors[1][:8]), atol=1e-6)

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_too_few_or_too_many_params_are_refused(self, load, count):
        with pytest.raises(InvalidRequestError, match=f"{count} pooling_params for 2 prompts"):
            load(BERT).embed([HELLO] * 2, pooling_params=[PoolingParams()] * count)

    @pytest.mark.parametrize("params", [{"dimensions": 3}, [{"dimensions": 3}], "x"])
    def test_params_of_another_type_are_refused(self, load, params):
        with pytest.raises(TypeError, match="pooling_params has a"):
            load(BERT).embed(HELLO, pooling_params=params)

    @pytest.mark.parametrize("name", ["normalize", "use_activation", "activation"])
    def test_every_name_of_normalization(self, load, name):
        off, on = (vector(load(BERT), pooling_params=PoolingParams(**{name: value})) for value in (False, True))
        assert np.linalg.norm(on) == pytest.approx(1, abs=1e-5)
        assert np.linalg.norm(off) > 1.1
        np.testing.assert_allclose(off / np.linalg.norm(off), on, atol=1e-6)

    @pytest.mark.parametrize("name", ["activation", "use_activation", "softmax", "normalize"])
    def test_every_name_of_an_activation(self, load, name):
        off, on = (
            torch.tensor(load(CLASSES).classify(HELLO, pooling_params=PoolingParams(**{name: value}))[0].outputs.probs)
            for value in (False, True)
        )
        torch.testing.assert_close(off.softmax(-1), on)
        assert off.sum() != pytest.approx(1, abs=1e-3)

    @pytest.mark.parametrize(
        ("method", "options", "message"),
        [
            ("embed", {"normalize": True, "use_activation": False}, "contradict"),
            ("embed", {"activation": "softmax"}, "nothing to a vector"),
            ("embed", {"step_tag_id": 3}, "step_tag_id=3 means nothing to embed"),
            ("classify", {"activation": True, "use_activation": False}, "contradict"),
            ("classify", {"dimensions": 3}, "dimensions=3 means nothing to classify"),
        ],
    )
    def test_invalid_params_are_refused(self, load, method, options, message):
        with pytest.raises(InvalidRequestError, match=message):
            getattr(load(BERT if method == "embed" else CLASSES), method)(
                HELLO, pooling_params=PoolingParams(**options)
            )


class TestPoolerConfig:
    @pytest.mark.parametrize("key", ["pooling_type", "seq_pooling_type"])
    @pytest.mark.parametrize(
        ("kind", "mode"), [("MEAN", "mean"), ("CLS", "cls"), ("LAST", "lasttoken"), ("mean", "mean")]
    )
    def test_pooling_of_texts(self, load, key, kind, mode):
        llm = load(BERT, pooler_config={key: kind})
        assert llm.engine.spec.pooling == (mode,)
        rows = llm.encode(SENTENCES[0], pooling_task="token_embed", pooling_params=PoolingParams(normalize=False))
        data = rows[0].outputs.data.numpy()
        expected = {"mean": data.mean(0), "cls": data[0], "lasttoken": data[-1]}[mode]
        pooled = vector(llm, SENTENCES[0], pooling_params=PoolingParams(normalize=False))
        np.testing.assert_allclose(pooled, expected, atol=1e-5)

    @pytest.mark.parametrize("key", ["pooling_type", "tok_pooling_type"])
    def test_steps(self, load, key):
        config = {key: "STEP", "step_tag_id": 123, "returned_token_ids": [45, 78]}
        llm = load(SHEPHERD, pooler_config=json.dumps(config))
        everything = PoolingParams(returned_token_ids=tuple(range(100)))
        whole = load(SHEPHERD).reward([STEPS], pooling_params=everything)[0].outputs.data
        torch.testing.assert_close(llm.reward([STEPS])[0].outputs.data, whole[[2, 4]][:, [45, 78]])
        active = llm.encode([STEPS], pooling_task="token_classify")[0].outputs.data
        torch.testing.assert_close(active, whole[[2, 4]][:, [45, 78]].softmax(-1))
        torch.testing.assert_close(llm.encode([STEPS])[0].outputs.data, active)
        own = llm.reward([STEPS], pooling_params=PoolingParams(step_tag_id=300, returned_token_ids=[3]))
        torch.testing.assert_close(own[0].outputs.data, whole[[1]][:, [3]])

    @pytest.mark.parametrize("key", ["use_activation", "normalize", "softmax", "activation"])
    def test_activation(self, load, key):
        off, on = ({key: value} for value in (False, True))
        assert np.linalg.norm(vector(load(BERT, pooler_config=off))) > 1.1
        assert np.linalg.norm(vector(load(BERT, pooler_config=on))) == pytest.approx(1, abs=1e-5)
        raw = torch.tensor(load(CLASSES, pooler_config=off).classify(HELLO)[0].outputs.probs)
        torch.testing.assert_close(
            raw.softmax(-1), torch.tensor(load(CLASSES, pooler_config=on).classify(HELLO)[0].outputs.probs)
        )
        overruled = load(BERT, pooler_config=off).embed(HELLO, pooling_params=PoolingParams(use_activation=True))
        assert np.linalg.norm(overruled[0].outputs.embedding) == pytest.approx(1, abs=1e-5)

    def test_dimensions(self, load):
        llm = load(BERT, pooler_config={"dimensions": 16}, hf_overrides={"is_matryoshka": True})
        assert vector(llm).shape == (16,)
        assert llm.encode(HELLO, pooling_task="token_embed")[0].outputs.data.shape[1] == 16
        assert vector(llm, pooling_params=PoolingParams(dimensions=8)).shape == (8,)

    def test_long_texts_in_windows(self, load):
        llm = load(BERT, pooler_config={"enable_chunked_processing": True})
        outputs = llm.embed([LONG, HELLO])
        expected = load(BERT).engine.embed([LONG, HELLO], prompt="", long_texts="mean").embeddings
        np.testing.assert_allclose([one.outputs.embedding for one in outputs], expected, atol=1e-6)
        cut = vector(llm, LONG, truncate_prompt_tokens=-1)
        np.testing.assert_allclose(cut, vector(load(BERT), LONG, truncate_prompt_tokens=-1), atol=1e-6)
        assert not np.allclose(cut, expected[0], atol=1e-3)

    def test_texts_in_windows_have_a_maximum_length(self, load):
        config = {"enable_chunked_processing": True, "max_embed_len": 80}
        with pytest.raises(InputTooLongError, match="index 1 .*max_embed_len=80"):
            load(BERT, pooler_config=config).embed([HELLO, LONG])
        assert len(load(BERT, pooler_config=config).embed([HELLO])) == 1

    @pytest.mark.parametrize("config", [{"logit_mean": 0.25}, {"logit_sigma": 2.0}])
    def test_calibration_of_classes(self, load, config):
        llm, raw = load(CLASSES, pooler_config=config), load(CLASSES, pooler_config={"use_activation": False})
        logits = torch.tensor(raw.classify(HELLO)[0].outputs.probs)
        expected = (logits - config.get("logit_mean", 0)) / config.get("logit_sigma", 1)
        params = PoolingParams(activation="sigmoid")
        probs = llm.classify(HELLO, pooling_params=params)[0].outputs.probs
        torch.testing.assert_close(torch.tensor(probs), expected.sigmoid())
        torch.testing.assert_close(torch.tensor(llm.classify(HELLO)[0].outputs.probs), expected.softmax(-1))
        rows = raw.encode(HELLO, pooling_task="token_classify")[0].outputs.data
        rows = (rows - config.get("logit_mean", 0)) / config.get("logit_sigma", 1)
        torch.testing.assert_close(llm.reward(HELLO)[0].outputs.data, rows)

    def test_the_task(self, load):
        assert load(BERT, pooler_config={"task": "token_embed"}).encode(HELLO)[0].outputs.data.ndim == 2
        assert load(CLASSES, pooler_config={"task": "encode"}).encode(HELLO)[0].outputs.data.ndim == 2
        assert load(CLASSES, pooler_config={"task": "score"}).encode(HELLO)[0].outputs.data.ndim == 1

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"pooling": "MEAN"}, "pooling, which is unknown"),
            ("{", "not JSON"),
            ("[1]", "must be a dict"),
            ({"pooling_type": "MEDIAN"}, "'MEDIAN' is unknown"),
            ({"pooling_type": "CLS", "seq_pooling_type": "CLS"}, "excludes"),
            ({"pooling_type": "ALL", "step_tag_id": 3}, "STEP"),
            ({"task": "generate"}, "task='generate'"),
            ({"use_activation": "yes"}, "use_activation"),
            ({"use_activation": True, "normalize": False}, "contradict"),
            ({"dimensions": 0}, "dimensions=0"),
            ({"max_embed_len": -1}, "max_embed_len=-1"),
            ({"logit_sigma": 0}, "logit_sigma=0"),
            ({"step_tag_id": -1}, "step_tag_id=-1"),
            ({"returned_token_ids": []}, "returned_token_ids"),
        ],
    )
    def test_an_invalid_configuration_is_refused(self, config, message):
        with pytest.raises(InvalidRequestError, match=message):
            LLM("./not-loaded", pooler_config=config)

    @pytest.mark.parametrize(
        "config", [{"logit_mean": 0.25, "logit_sigma": 2.0}, {"logit_bias": 0.25, "logit_scale": 0.5}]
    )
    def test_calibration(self, load, config):
        llm, raw = load(PAIRS, pooler_config=config), load(PAIRS, pooler_config={"use_activation": False})
        logit = raw.score(HELLO, "mill")[0].outputs.score
        expected = 1 / (1 + np.exp(-(logit - 0.25) / 2))
        assert llm.score(HELLO, "mill")[0].outputs.score == pytest.approx(expected, abs=1e-6)
        (shifted,) = llm.score(HELLO, "mill", pooling_params=PoolingParams(activation=False))
        assert shifted.outputs.score == pytest.approx((logit - 0.25) / 2, abs=1e-5)
