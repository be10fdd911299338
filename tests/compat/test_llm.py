"""LLM: the calls of vLLM's users for each kind of model, over tiny stand-ins for checkpoints of the hub."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.tiny import SENTENCES, TEXTS
from tests.tiny.hub import WIDTH

from millpond import UnsupportedTaskError
from millpond.errors import InvalidRequestError, MissingExtraError, ModelLoadError
from millpond.vllm import LLM, PoolingParams

HELLO = "Hello, my name is"
CAPITAL = "What is the capital of France?"
BRASILIA = "The capital of Brazil is Brasilia."


class TestExamplesOfVllmsPages:
    """With the arguments of the examples only."""

    def test_a_vector(self, hub):
        llm = LLM(model=str(hub("intfloat/e5-small")), runner="pooling")
        outputs = llm.embed(HELLO)
        embeds = outputs[0].outputs.embedding
        assert type(embeds) is list and {type(number) for number in embeds} == {float}
        assert f"size={len(embeds)}" == "size=48"
        assert f"{embeds!r}".startswith("[")

    def test_a_shorter_vector(self, hub):
        llm = LLM(model=str(hub("jinaai/jina-embeddings-v3")), runner="pooling", trust_remote_code=True)
        outputs = llm.embed(["Follow the white rabbit."], pooling_params=PoolingParams(dimensions=32))
        assert str(outputs[0].outputs).startswith("EmbeddingData(hidden_size=32, embedding=[")
        vector = np.array(outputs[0].outputs.embedding)
        assert vector.shape == (32,)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)

    def test_a_language_model_that_reranks(self, load):
        overrides = {
            "architectures": ["Qwen3ForSequenceClassification"],
            "classifier_from_token": ["no", "yes"],
            "is_original_qwen3_reranker": True,
        }
        llm, known = load("somebody/tuned", hf_overrides=overrides), load("Qwen/Qwen3-Reranker-0.6B")
        documents = [BRASILIA, SENTENCES[1]]
        scores = [one.outputs.score for one in llm.score(CAPITAL, documents)]
        by_name = [one.outputs.score for one in known.score(CAPITAL, documents)]
        assert scores == pytest.approx(by_name, abs=1e-6)
        assert 0 < scores[0] < 1 and scores[0] != scores[1]
        assert "score" in llm.engine.tasks and "embed" in load("somebody/tuned").engine.tasks


class TestPrompts:
    @pytest.mark.parametrize("wrap", [lambda text: text, lambda text: {"prompt": text}], ids=["str", "dict"])
    def test_texts(self, load, wrap):
        llm = load("intfloat/e5-small")
        expected = llm.engine.embed(TEXTS, prompt="").embeddings
        outputs = llm.embed([wrap(text) for text in TEXTS], truncate_prompt_tokens=-1)
        np.testing.assert_allclose([one.outputs.embedding for one in outputs], expected, atol=1e-6)
        alone = llm.embed(wrap(TEXTS[1]))
        assert len(alone) == 1
        np.testing.assert_allclose(alone[0].outputs.embedding, expected[1], atol=1e-6)

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda ids: ids,
            lambda ids: {"prompt_token_ids": ids},
            lambda ids: {"prompt_token_ids": ids, "prompt": "something else"},
            lambda ids: [ids],
        ],
    )
    def test_token_ids_run_as_they_are(self, load, wrap):
        llm = load("intfloat/e5-small")
        ids = llm.engine.tokenize([SENTENCES[0]])[0]
        (output,) = llm.embed(wrap(ids))
        np.testing.assert_allclose(output.outputs.embedding, llm.engine.embed([SENTENCES[0]]).embeddings[0], atol=1e-6)
        assert output.prompt_token_ids == ids
        (without,) = llm.embed(wrap(ids[1:]))
        assert not np.allclose(without.outputs.embedding, output.outputs.embedding, atol=1e-3)

    @pytest.mark.parametrize(
        ("prompts", "message"),
        [
            ([], "at least one prompt"),
            (3, "index 0"),
            ([HELLO, None], "index 1"),
            ([HELLO, []], "index 1"),
            ([{}], "index 0"),
            ([{"prompt": HELLO, "multi_modal_data": {}}], "index 0"),
            ([{"prompt_token_ids": []}], "index 0"),
            ([[True, False]], "index 0"),
            ([[1, 10**6]], "index 0"),
        ],
    )
    def test_an_invalid_prompt_is_refused(self, load, prompts, message):
        with pytest.raises(InvalidRequestError, match=message):
            load("intfloat/e5-small").embed(prompts)

    def test_a_prompt_of_the_checkpoint_is_applied_only_on_request(self, load):
        llm = load("a/prompted-embedder")
        engine = llm.engine
        params = [PoolingParams(), PoolingParams(role="query"), PoolingParams(prompt_name="document")]
        outputs = llm.embed([HELLO] * 3, pooling_params=params)
        options = ({"prompt": ""}, {"role": "query"}, {})  # the checkpoint's default prompt is the document's
        expected = [engine.embed([HELLO], **each).embeddings[0] for each in options]
        np.testing.assert_allclose([one.outputs.embedding for one in outputs], expected, atol=1e-6)
        assert not np.allclose(expected[0], expected[2], atol=1e-3)


class TestOutputs:
    def test_each_has_the_token_ids_that_were_run(self, load):
        llm = load("intfloat/e5-small")
        for one, text in zip(llm.embed([HELLO, SENTENCES[0]]), (HELLO, SENTENCES[0]), strict=True):
            assert one.prompt_token_ids == llm.get_tokenizer()(text)["input_ids"]

    def test_the_ids_of_a_pair_are_the_rendered_template(self, load):
        llm = load("Qwen/Qwen3-Reranker-0.6B")
        (output,) = llm.score("q", "d")
        text = llm.get_tokenizer().decode(output.prompt_token_ids)
        assert "<Query>: q" in text and "<Document>: d" in text

    def test_the_repr_is_short(self, load):
        (vector,), (classes,) = load("intfloat/e5-small").embed(HELLO), load("a/bert-classifier").classify(HELLO)
        assert len(repr(vector)) < 200
        assert "hidden_size=48" in repr(vector) and f"[{vector.outputs.embedding[0]:.4g}, " in repr(vector)
        assert repr(classes.outputs) == (
            f"ClassificationData(num_classes=2, probs=[{classes.outputs.probs[0]:.4g}, {classes.outputs.probs[1]:.4g}])"
        )
        assert classes.outputs.num_classes == 2

    def test_the_ids_of_a_pair_are_both_texts_for_an_embedder(self, load):
        llm = load("intfloat/e5-small")
        ids = llm.get_tokenizer()
        (output,) = llm.score("the mill", "the pond")
        assert output.prompt_token_ids == [
            *ids("the mill")["input_ids"], ids.pad_token_id, *ids("the pond")["input_ids"]
        ]  # fmt: skip

    def test_request_ids_differ(self, load):
        llm = load("intfloat/e5-small")
        outputs = [*llm.embed([HELLO] * 3), *llm.score(HELLO, [HELLO] * 2), *llm.encode(HELLO)]
        assert len({one.request_id for one in outputs}) == 6
        assert all(type(one.request_id) is str and one.finished for one in outputs)


class TestEncode:
    @pytest.mark.parametrize(
        ("name", "task", "shape"),
        [
            ("intfloat/e5-small", "embed", (WIDTH,)),
            ("intfloat/e5-small", "token_embed", (4, WIDTH)),
            ("intfloat/e5-small", None, (WIDTH,)),
            ("a/bert-classifier", "classify", (2,)),
            ("a/bert-classifier", "token_classify", (4, 2)),
            ("a/bert-classifier", None, (2,)),
            ("boltuix/NeuroBERT-NER", "token_classify", (4, 2)),
            ("boltuix/NeuroBERT-NER", None, (4, 2)),
            ("internlm/internlm2-1_8b-reward", "reward", (1, 1)),
        ],
    )
    def test_every_task(self, load, name, task, shape):
        llm = load(name)
        (ids,) = llm.engine.tokenize(["mill"])
        (output,) = llm.encode("mill", pooling_task=task)
        assert output.outputs.data.dtype == torch.float32
        assert output.outputs.data.device.type == "cpu"
        rows = (len(ids), *shape[1:]) if len(shape) == 2 else shape
        assert tuple(output.outputs.data.shape) == rows

    def test_the_params_may_name_the_task(self, load):
        llm = load("intfloat/e5-small")
        assert llm.encode(HELLO, PoolingParams(task="token_embed"))[0].outputs.data.ndim == 2
        assert llm.encode([HELLO], [PoolingParams(task="encode")])[0].outputs.data.ndim == 2
        assert llm.encode(HELLO, PoolingParams())[0].outputs.data.ndim == 1

    @pytest.mark.parametrize("task", ["generate", "sparse_embed", ""])
    def test_an_unknown_task_is_refused(self, load, task):
        llm = load("intfloat/e5-small")
        if task:
            with pytest.raises(InvalidRequestError, match="token_embed"):
                llm.encode(HELLO, pooling_task=task)
        else:
            assert llm.encode(HELLO, pooling_task=task)[0].outputs.data.ndim == 1

    @pytest.mark.parametrize("method", ["classify", "reward"])
    def test_a_task_that_the_model_does_not_serve(self, load, method):
        with pytest.raises(UnsupportedTaskError, match="serves embed, token_embed"):
            getattr(load("intfloat/e5-small"), method)(HELLO)

    def test_params_for_another_task_are_refused(self, load):
        with pytest.raises(InvalidRequestError, match="contradicts"):
            load("intfloat/e5-small").embed(HELLO, pooling_params=PoolingParams(task="classify"))


class TestReward:
    def test_rewards_are_raw_by_default(self, load):
        llm = load("internlm/internlm2-1_8b-reward")
        raw = llm.reward(HELLO)[0].outputs.data
        assert ((raw < 0) | (raw > 1)).any()
        active = llm.reward(HELLO, pooling_params=PoolingParams(use_activation=True))[0].outputs.data
        torch.testing.assert_close(active, raw.sigmoid())

    def test_a_process_reward_model_keeps_its_steps(self, load):
        llm = load("Qwen/Qwen2.5-Math-PRM-7B")
        text = "Open the gate.<extra_0> The wheel turns.<extra_0>"
        (output,) = llm.reward(text)
        assert output.outputs.data.shape == (2, 2)
        np.testing.assert_allclose(output.outputs.data, llm.engine.reward([text]).rewards[0], atol=1e-5)
        active = llm.encode(text, pooling_task="token_classify")[0].outputs.data
        torch.testing.assert_close(active, output.outputs.data.softmax(-1))

    @pytest.mark.parametrize(
        ("name", "active"),
        [
            ("internlm/internlm2-1_8b-reward", True),
            ("Qwen/Qwen2.5-Math-PRM-7B", True),
            ("Qwen/Qwen2.5-Math-RM-72B", False),
        ],
    )
    def test_encode_rewards_by_default_as_vllm_does(self, load, name, active):
        llm = load(name)
        text = "Open the gate.<extra_0> The wheel turns.<extra_0>"
        rewards = llm.encode(text)[0].outputs.data
        torch.testing.assert_close(rewards, llm.encode(text, pooling_task="token_classify")[0].outputs.data)
        same = PoolingParams(use_activation=active)
        torch.testing.assert_close(rewards, llm.reward(text, pooling_params=same)[0].outputs.data)
        other = PoolingParams(use_activation=not active)
        assert not torch.allclose(rewards, llm.reward(text, pooling_params=other)[0].outputs.data)

    def test_a_language_model_needs_columns(self, load):
        with pytest.raises(UnsupportedTaskError, match="returned_token_ids"):
            load("peiyi9979/math-shepherd-mistral-7b-prm").reward(HELLO)


class TestScore:
    def test_one_query_with_several_documents(self, load):
        llm = load("BAAI/bge-reranker-v2-m3")
        documents = [BRASILIA, SENTENCES[1], SENTENCES[2]]
        scores = [one.outputs.score for one in llm.score(CAPITAL, documents)]
        np.testing.assert_allclose(scores, llm.engine.score(CAPITAL, documents).scores, atol=1e-6)
        assert len(set(scores)) == 3

    @pytest.mark.parametrize(
        ("left", "right"), [([CAPITAL] * 2, [BRASILIA]), ([CAPITAL] * 2, [BRASILIA] * 3), ([], [HELLO]), (HELLO, [])]
    )
    def test_numbers_that_do_not_pair_up(self, load, left, right):
        with pytest.raises(InvalidRequestError, match="pair up|At least one"):
            load("BAAI/bge-reranker-v2-m3").score(left, right)

    def test_content_parts(self, load):
        llm = load("BAAI/bge-reranker-v2-m3")
        parts = [{"type": "text", "text": "The capital"}, {"type": "text", "text": "of Brazil"}]
        query = {"content": [{"type": "text", "text": CAPITAL}]}
        scores = [one.outputs.score for one in llm.score(query, [{"content": parts}, {"prompt": BRASILIA}])]
        plain = [one.outputs.score for one in llm.score(CAPITAL, ["The capital\nof Brazil", BRASILIA])]
        assert scores == pytest.approx(plain, abs=1e-6)
        assert plain[0] != pytest.approx(plain[1], abs=1e-6)
        bare = llm.score({"content": CAPITAL}, BRASILIA)[0].outputs.score
        assert bare == pytest.approx(plain[1], abs=1e-6)

    @pytest.mark.parametrize(
        "data",
        [
            {"content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            {"prompt_token_ids": [1]},
            None,
        ],
    )
    def test_an_input_without_text_is_refused(self, load, data):
        with pytest.raises(InvalidRequestError, match="data_2 .* index 0.*texts only"):
            load("BAAI/bge-reranker-v2-m3").score(CAPITAL, data)

    def test_a_call_may_bring_a_template(self, load):
        llm = load("Qwen/Qwen3-Reranker-0.6B")
        own = llm.score(CAPITAL, BRASILIA)[0]
        template = "{{ messages[0].content }} => {{ messages[1].content }} ?"
        (other,) = llm.score(CAPITAL, BRASILIA, chat_template=template)
        assert other.outputs.score != own.outputs.score
        assert llm.get_tokenizer().decode(other.prompt_token_ids) == f"{CAPITAL} => {BRASILIA} ?"
        assert llm.score(CAPITAL, BRASILIA)[0].outputs.score == pytest.approx(own.outputs.score, abs=1e-6)

    def test_a_template_for_two_vectors_is_refused(self, load):
        with pytest.raises(InvalidRequestError, match="reads no template"):
            load("intfloat/e5-small").score(CAPITAL, BRASILIA, chat_template="{{ query }} {{ document }}")

    def test_raw_scores(self, load):
        llm = load("BAAI/bge-reranker-v2-m3")
        for params in (
            PoolingParams(use_activation=False),
            PoolingParams(activation=False),
            PoolingParams(softmax=False),
        ):
            (raw,) = llm.score(CAPITAL, BRASILIA, pooling_params=params)
            active = 1 / (1 + np.exp(-raw.outputs.score))
            assert active == pytest.approx(llm.score(CAPITAL, BRASILIA)[0].outputs.score, abs=1e-6)

    def test_by_cosine_and_by_maxsim(self, load):
        for name in ("intfloat/e5-small", "answerdotai/answerai-colbert-small-v1"):
            llm = load(name)
            scores = [one.outputs.score for one in llm.score(CAPITAL, [BRASILIA, SENTENCES[1]])]
            np.testing.assert_allclose(scores, llm.engine.score(CAPITAL, [BRASILIA, SENTENCES[1]]).scores, atol=1e-5)

    def test_a_classifier_of_several_classes_has_no_score(self, load):
        with pytest.raises(UnsupportedTaskError, match="calm, flood"):
            load("a/bert-classifier").score(CAPITAL, BRASILIA)


class TestLoading:
    def test_arguments_by_position_and_by_name(self, hub):
        folder = hub("intfloat/e5-small")
        with LLM(folder, dtype="float") as llm, LLM(model=folder, dtype="float32", convert="none") as other:
            assert llm.engine.dtype == "float32"
            vectors = [llm.embed(prompts=HELLO)[0].outputs.embedding, other.embed(HELLO)[0].outputs.embedding]
            np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)
        assert llm.engine.closed
        with LLM(folder, dtype="half") as llm:
            assert llm.engine.dtype == "float16"
        with pytest.raises(TypeError):
            LLM(folder, "pooling")

    @pytest.mark.parametrize("method", ["embed", "classify", "reward", "score", "encode"])
    def test_an_unknown_argument_of_a_method_is_refused(self, load, method):
        with pytest.raises(TypeError, match="mistake"):
            getattr(load("intfloat/e5-small"), method)(*[HELLO] * (1 + (method == "score")), mistake=1)

    def test_an_unknown_argument_is_refused(self, hub):
        with pytest.raises(TypeError, match="LLM has no argument 'max_lenght'"):
            LLM(hub("intfloat/e5-small"), max_lenght=3, seed=0)

    def test_ignored_arguments_are_named_in_one_warning(self, hub):
        with pytest.warns(UserWarning, match="ignored: enforce_eager, gpu_memory_utilization, seed") as warned:
            LLM(
                hub("intfloat/e5-small"), tensor_parallel_size=1, gpu_memory_utilization=0.5, enforce_eager=True, seed=0
            ).close()
        assert [Path(one.filename).name for one in warned] == [Path(__file__).name]  # the caller's line

    @pytest.mark.parametrize(
        "options",
        [
            {"runner": "generate"},
            {"task": "generate"},
            {"trust_remote_code": "yes"},
            {"tensor_parallel_size": 2},
        ],
    )
    def test_an_argument_that_millpond_cannot_follow_is_refused(self, hub, options):
        with pytest.raises(InvalidRequestError, match=next(iter(options))):
            LLM(hub("intfloat/e5-small"), **options)

    def test_an_unknown_architecture_is_refused(self, hub):
        with pytest.raises(ModelLoadError, match="PondModel"):
            LLM(hub("intfloat/e5-small"), hf_overrides={"architectures": ["PondModel"]})

    def test_jina_without_a_task_matches_texts(self, load):
        llm = load("jinaai/jina-embeddings-v3")
        expected = llm.engine.embed([HELLO], adapter="text-matching", prompt="").embeddings[0]
        np.testing.assert_allclose(llm.embed(HELLO)[0].outputs.embedding, expected, atol=1e-6)
        other = llm.embed(HELLO, pooling_params=PoolingParams(adapter="separation"))[0].outputs.embedding
        assert not np.allclose(other, expected, atol=1e-3)


def test_without_torch_what_is_no_tensor_is_returned_and_the_rest_is_refused(
    load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load("intfloat/e5-small")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert len(llm.embed(HELLO)[0].outputs.embedding) == 48
    for method in (llm.encode, llm.reward):
        with pytest.raises(MissingExtraError, match=rf"LLM.{method.__name__}\(\) returns tensors.*millpond\[torch\]"):
            method(HELLO)
