"""Reward models compared with their formulas on reference hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.parity.head_oracles import classifier
from tests.parity.oracles import oracle
from tests.parity.test_classifiers import TOLERANCE, VISIBLE, difference, ids_of
from tests.tiny import SENTENCES, TEXTS, drop_tensor, edit_json, write_checkpoint
from tests.tiny.checkpoints import token_id
from tests.tiny.heads import CHAT, REWARD, STEP, write_language_model, write_reward

from millpond import Engine, PoolingParams, TokenIds
from millpond.errors import InputTooLongError, InvalidRequestError, UnsupportedTaskError, WeightMismatchError

pytestmark = pytest.mark.contract  # two engines for each case, one of them a peer's

CONVERSATIONS = (
    [{"role": "user", "content": "How deep is it?"}, {"role": "assistant", "content": "Two sacks."}],
    [{"role": "system", "content": SENTENCES[0]}, {"role": "user", "content": "a"}],
)
STEPS = (
    f"Open the gate.{STEP} The wheel turns.{STEP}",
    f"Two sacks.{STEP}",
    f"{SENTENCES[4]}{STEP} How much?{STEP} a{STEP}",
    "no step at all",
)
WHOLE = ("InternLM2ForRewardModel", "Qwen2ForRewardModel")


def load(folder: Path, **options: Any) -> Engine:
    return Engine(folder, dtype="float32", device="cpu", **options)


def rows_of(folder: Path, items: Sequence[Any]) -> list[np.ndarray]:
    """Reference: the head's formula, applied to every token's state."""
    states, tensors = oracle(folder), load_file(folder / "model.safetensors")

    def head(hidden: torch.Tensor) -> torch.Tensor:
        if "v_head.weight" in tensors:
            return hidden @ tensors["v_head.weight"].T
        inner = F.linear(hidden, tensors["score.0.weight"], tensors["score.0.bias"]).clamp(min=0)
        return F.linear(inner, tensors["score.2.weight"], tensors["score.2.bias"])

    with torch.inference_mode():
        return [head(states(ids)).numpy() for ids in ids_of(folder, items)]


def language_rows(folder: Path, items: Sequence[Any], tokens: Sequence[int]) -> list[np.ndarray]:
    """Columns of the vocabulary logits of transformers' language model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, local_files_only=True
    ).eval()
    with torch.inference_mode():
        return [model(input_ids=ids[None]).logits[0][:, list(tokens)].numpy() for ids in ids_of(folder, items)]


def at(folder: Path, items: Sequence[Any], rows: Sequence[np.ndarray], tag: int) -> list[np.ndarray]:
    """The rows at the tokens ``tag``."""
    return [matrix[(ids == tag).numpy()] for ids, matrix in zip(ids_of(folder, items), rows, strict=True)]


# --- One reward for a text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", WHOLE)
def test_a_text_s_reward_is_its_last_token_s(architecture, tmp_path, record_property):
    folder = write_reward(tmp_path / "model", architecture)
    expected = rows_of(folder, TEXTS)
    with load(folder) as engine:
        assert engine.tasks == {"reward", "token_classify", "embed", "token_embed"}
        assert engine.spec.labels == ("reward",)
        actual = list(engine.reward(TEXTS).rewards)
        worst = difference(actual, [matrix[-1:] for matrix in expected])
        record_property("error", worst)
        assert worst <= TOLERANCE
        alone = [engine.reward([text]).rewards[0] for text in TEXTS]
        assert difference(actual, alone) <= TOLERANCE
        # The rewards of all tokens, as in vLLM.
        tokens = engine.token_classify(TEXTS, activation=False)
        assert difference(list(tokens.probs), expected) <= TOLERANCE
        probabilities = engine.reward(TEXTS, activation=True).rewards.flat
    # Rewards are raw by default.
    assert np.abs(probabilities - 1 / (1 + np.exp(-np.concatenate(actual)))).max() < 1e-6
    # Negative control: another row.
    assert difference(actual, [matrix[:1] for matrix in expected]) > VISIBLE


@pytest.mark.parametrize("architecture", WHOLE)
def test_a_conversation_goes_through_the_chat_template(architecture, tmp_path):
    """InternLM2's conversations end with the reward token, which its code appends; the template does not contain it."""
    folder = write_reward(tmp_path / "model", architecture)
    texts = [
        "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in conversation)
        for conversation in CONVERSATIONS
    ]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert [sequence[0] for sequence in ids] == [token_id(folder, "<|im_start|>")] * 2
    ends = [token_id(folder, REWARD)] if architecture.startswith("InternLM2") else []
    items = [TokenIds((*sequence, *ends)) for sequence in ids]
    expected = [matrix[-1:] for matrix in rows_of(folder, items)]
    with load(folder) as engine:
        output = engine.reward(CONVERSATIONS)
        assert difference(list(output.rewards), expected) <= TOLERANCE
        assert output.usage.prompt_tokens == sum(len(item.ids) for item in items)
        mixed = list(engine.reward([CONVERSATIONS[0], "How deep is it?", CONVERSATIONS[1]]).rewards)
        assert difference([mixed[0], mixed[2]], expected) <= TOLERANCE
        assert difference(list(engine.reward(texts).rewards), expected) > VISIBLE or not ends


@pytest.mark.parametrize("truncate", ["end", "start"])
@pytest.mark.parametrize("limit", [20, 64])
def test_an_over_long_conversation_keeps_its_template_s_end_and_reward_token(limit, truncate, tmp_path):
    folder = write_reward(tmp_path / "model", "InternLM2ForRewardModel")
    from tokenizers import Tokenizer

    content = " ".join(SENTENCES[:6])
    text = f"<|im_start|>user\n{content}<|im_end|>\n"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    ending = tokenizer.encode("<|im_end|>\n", add_special_tokens=False).ids
    assert len(ids) > 64 and ids[-len(ending) :] == ending
    kept = [*ids[: limit - 1 - len(ending)], *ending] if truncate == "end" else ids[1 - limit :]
    expected = [rows_of(folder, [TokenIds((*kept, token_id(folder, REWARD)))])[0][-1:]]
    with load(folder, max_length=limit) as engine:
        output = engine.reward([[{"role": "user", "content": content}]], truncate=truncate)
        assert output.truncated.tolist() == [True]
        assert difference(list(output.rewards), expected) <= TOLERANCE
        bare = engine.encode([TokenIds(tuple(ids[:limit]))], task="reward").rewards  # cut like any text
        assert difference(list(bare), expected) > VISIBLE
        with pytest.raises(InputTooLongError, match=f"more than max_length={limit}"):
            engine.reward([[{"role": "user", "content": content}]], truncate="error")


def test_a_conversation_without_a_template_is_refused(tmp_path):
    folder = write_reward(tmp_path / "model", "Qwen2ForRewardModel")
    (folder / "chat_template.jinja").unlink()
    with load(folder) as engine, pytest.raises(InvalidRequestError, match="index 0 needs a chat template"):
        engine.reward(CONVERSATIONS)


def test_a_conversation_that_the_template_refuses(tmp_path):
    folder = write_reward(tmp_path / "model", "Qwen2ForRewardModel")
    (folder / "chat_template.jinja").write_text(CHAT + "{{ raise_exception('no such roles') }}")
    with load(folder) as engine, pytest.raises(InvalidRequestError, match="index 0 does not fit.*no such roles"):
        engine.reward(CONVERSATIONS)


@pytest.mark.parametrize("family", ["llama", "qwen2", "jamba"])
def test_a_classifier_with_one_label_rewards_outcomes(family, tmp_path):
    """As documented: the reward is the logit, and ``classify`` returns its sigmoid."""
    folder = write_checkpoint(tmp_path / "model", family, head="SequenceClassification", labels=1)
    reference = classifier(folder)
    expected = [reference(ids).numpy()[None] for ids in ids_of(folder, TEXTS)]
    with load(folder) as engine:
        assert {"reward", "classify", "score"} <= engine.tasks
        actual = list(engine.reward(TEXTS).rewards)
        assert difference(actual, expected) <= TOLERANCE
        probs = engine.classify(TEXTS).probs
    assert np.abs(probs - 1 / (1 + np.exp(-np.concatenate(actual)))).max() < 1e-6
    assert difference(list(probs[:, None]), expected) > VISIBLE


# --- One for each step ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stray", [False, True])
def test_a_process_reward_model_s_steps(stray, tmp_path, record_property):
    folder = write_reward(tmp_path / "model", "Qwen2ForProcessRewardModel", stray=stray)
    tag = token_id(folder, STEP)
    everything = rows_of(folder, STEPS)
    expected = at(folder, STEPS, everything, tag)
    assert [len(matrix) for matrix in expected] == [2, 1, 3, 0]
    with load(folder) as engine:
        assert engine.spec.step_tag_id == tag
        assert engine.spec.labels == ("bad", "good")
        actual = list(engine.reward(STEPS).rewards)
        assert [matrix.shape for matrix in actual] == [(2, 2), (1, 2), (3, 2), (0, 2)]
        worst = difference(actual[:3], expected[:3])
        record_property("error", worst)
        assert worst <= TOLERANCE
        alone = [engine.reward([text]).rewards[0] for text in STEPS[:3]]
        assert difference(actual[:3], alone) <= TOLERANCE
        probabilities = engine.reward(STEPS, activation=True).rewards
        tokens = engine.token_classify(STEPS, activation=False)
        good = engine.reward(STEPS, returned_token_ids=[1]).rewards
        params = PoolingParams(returned_token_ids=(1,), activation=False)
        column = engine.encode(STEPS, task="token_classify", params=params)
        assert column.labels == ("good",)
        assert {entity.label for entities in column for entity in entities} == {"good"}
        other = engine.reward(STEPS, step_tag_id=tag - 1).rewards
    for raw, row in zip(actual, probabilities, strict=True):
        assert np.abs(torch.from_numpy(raw).softmax(-1).numpy() - row).max(initial=0) < 1e-6
    assert difference(list(tokens.probs), everything) <= TOLERANCE
    assert np.abs(good.flat[:, 0] - np.concatenate(actual)[:, 1]).max() == 0
    assert len(other.flat) == 0
    # Negative control: the row before a step's token is not its reward.
    before = [np.roll(matrix, 1, axis=0) for matrix in everything]
    assert difference(actual[:3], at(folder, STEPS, before, tag)[:3]) > VISIBLE


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2"])
def test_a_language_model_s_steps(family, tied, tmp_path, record_property):
    """Math-shepherd: two rows of the vocabulary head, read at the step's token."""
    config: dict[str, Any] = {"tie_word_embeddings": tied}
    if family == "gemma2":
        config["final_logit_softcapping"] = 2.0  # small enough to have an effect
    folder = write_language_model(tmp_path / "model", family, ("+", "-", STEP), config=config, template="$A")
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not tied
    tag, *tokens = (token_id(folder, token) for token in (STEP, "+", "-"))
    everything = language_rows(folder, STEPS, tokens)
    with load(folder) as engine:
        actual = list(engine.reward(STEPS, step_tag_id=tag, returned_token_ids=tokens).rewards)
        expected = at(folder, STEPS, everything, tag)
        worst = difference(actual[:3], expected[:3])
        record_property("error", worst)
        assert worst <= TOLERANCE
        assert actual[3].shape == (0, 2)
        chances = engine.reward(STEPS, step_tag_id=tag, returned_token_ids=tokens, activation=True).rewards.flat
        assert np.abs(chances - torch.from_numpy(np.concatenate(actual)).softmax(-1).numpy()).max() < 1e-6
        # The rewards of all tokens, and with the two columns swapped.
        params = PoolingParams(returned_token_ids=tuple(tokens), activation=False)
        rows = engine.encode(STEPS, task="token_classify", params=params)
        assert difference(list(rows.probs), everything) <= TOLERANCE
        assert rows.labels == tuple(str(token) for token in tokens)
        best = [rows.labels[column] for column in rows.probs[3].argmax(1)]
        assert [entity.label for entity in rows[3]] == best
        turned = list(engine.reward(STEPS, step_tag_id=tag, returned_token_ids=tokens[::-1]).rewards)
        assert difference([matrix[:, ::-1] for matrix in turned[:3]], expected[:3]) <= TOLERANCE
        assert difference(turned[:3], expected[:3]) > VISIBLE
        with pytest.raises(UnsupportedTaskError, match="pass returned_token_ids"):
            engine.reward(STEPS, step_tag_id=tag)
        with pytest.raises(InvalidRequestError, match=r"returned_token_ids holds 99999.*run from 0 to \d+"):
            engine.reward(STEPS, step_tag_id=tag, returned_token_ids=[99999])
        with pytest.raises(InvalidRequestError, match="step_tag_id=99999 is not a token"):
            engine.reward(STEPS, step_tag_id=99999, returned_token_ids=tokens)


def test_callers_with_other_tags_share_a_batch(tmp_path):
    folder = write_language_model(tmp_path / "model", "llama", ("+", "-", STEP, "<step>"), template="$A")
    plus, minus, first, second = (token_id(folder, token) for token in ("+", "-", STEP, "<step>"))
    texts = [f"Open the gate.{STEP} Two sacks.<step>", f"The wheel turns.<step> a{STEP} b{STEP}"]
    options = [(first, (plus, minus)), (second, (minus, plus)), (second, (plus, minus, 7)), (first, (plus,))]
    with load(folder) as engine:
        futures = [
            engine.submit("reward", texts, PoolingParams(step_tag_id=tag, returned_token_ids=tokens))
            for tag, tokens in options
        ]
        actual = [list(future.result().rewards) for future in futures]
    for (tag, tokens), rewards in zip(options, actual, strict=True):
        expected = at(folder, texts, language_rows(folder, texts, tokens), tag)
        assert difference(rewards, expected) <= TOLERANCE


def test_an_untied_model_without_its_head_is_refused(tmp_path):
    """Its input embeddings have the right shape but are not its head."""
    folder = write_language_model(tmp_path / "model", "llama", (STEP,), template="$A")
    drop_tensor(folder, "lm_head.weight")
    with load(folder) as engine, pytest.raises(WeightMismatchError, match="no language-model head"):
        engine.reward(STEPS, step_tag_id=token_id(folder, STEP), returned_token_ids=[5, 6])
    edit_json(folder / "config.json", tie_word_embeddings=True)
    with load(folder) as engine:
        assert engine.reward(STEPS, step_tag_id=token_id(folder, STEP), returned_token_ids=[5, 6]).rewards.flat.any()
