"""/tokenize and /detokenize, against transformers' tokenizers."""

from __future__ import annotations

import pytest
from tests.tiny import SENTENCES
from transformers import AutoTokenizer

TALK = [{"role": "user", "content": "How deep is it?"}]
RENDERED = "<|im_start|>user\nHow deep is it?<|im_end|>\n"


@pytest.fixture(scope="module")
def ask(pool):
    def ask(path, model="embedder", *, status=200, **body):
        response = pool[1].post(path, json={"model": model, **body})
        assert response.status_code == status, response.text
        return response.json()

    return ask


class TestTokenize:
    @pytest.mark.parametrize("special", [None, True, False])
    @pytest.mark.parametrize("text", [SENTENCES[0], "", "池", " ".join(SENTENCES)])
    def test_a_prompt(self, ask, embedder, text, special):
        options = {} if special is None else {"add_special_tokens": special}
        expected = AutoTokenizer.from_pretrained(embedder)(text, add_special_tokens=special is not False)["input_ids"]
        assert ask("/tokenize", prompt=text, **options) == {
            "count": len(expected),
            "max_model_len": 64,
            "tokens": expected,
            "token_strs": None,
        }

    def test_tokens_as_the_vocabulary_has_them(self, ask):
        assert ask("/tokenize", prompt="a pond", return_token_strs=True)["token_strs"] == [
            "[CLS]",
            "a",
            "pond",
            "[SEP]",
        ]

    @pytest.mark.parametrize(
        ("chat_options", "text"),
        [
            ({}, RENDERED + "<|im_start|>assistant\n"),
            ({"add_generation_prompt": False}, RENDERED),
            ({"add_generation_prompt": False, "continue_final_message": True}, RENDERED.removesuffix("<|im_end|>\n")),
            ({"add_generation_prompt": False, "tools": [{"name": "sonar"}]}, "sonar\n" + RENDERED),
        ],
    )
    def test_a_conversation(self, ask, llm, chat_options, text):
        tokenizer = AutoTokenizer.from_pretrained(llm)
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ask("/tokenize", "llm", messages=TALK, **chat_options)["tokens"] == expected
        around = ask("/tokenize", "llm", messages=TALK, add_special_tokens=True, **chat_options)["tokens"]
        assert around == tokenizer(text)["input_ids"] != expected

    @pytest.mark.parametrize(
        ("body", "part"),
        [
            ({}, "pass prompt or messages"),
            ({"prompt": "a", "messages": TALK}, "pass prompt or messages"),
            ({"prompt": 5}, "string_type"),
            ({"prompt": ["a"]}, "string_type"),
            ({"messages": TALK}, "embedder has none"),
            ({"model": "llm", "messages": [TALK, TALK]}, "2 conversations"),
            ({"model": "llm", "messages": TALK, "continue_final_message": True}, "Cannot set both"),
            ({"model": "llm", "messages": TALK, "chat_template": "a"}, "--trust-request-chat-template"),
        ],
    )
    def test_refused(self, ask, body, part):
        assert part in ask("/tokenize", status=400, **body)["error"]["message"]

    def test_a_text_without_an_end(self, ask):
        error = ask("/tokenize", prompt="a " * (1 << 20) + "a", status=400)["error"]
        assert (
            error["message"]
            == "a text has 2097153 characters; 2097152 are the most to be tokenized whole: send it in parts"
        )


class TestDetokenize:
    @pytest.mark.parametrize("text", [SENTENCES[0], "How deep is it?"])
    def test_there_and_back(self, ask, embedder, text):
        tokens = ask("/tokenize", prompt=text)["tokens"]
        expected = AutoTokenizer.from_pretrained(embedder).decode(tokens)
        assert ask("/detokenize", tokens=tokens) == {"prompt": expected}
        assert expected.startswith("[CLS]")

    def test_no_end_of_tokens(self, ask):
        error = ask("/detokenize", tokens=[5] * ((1 << 17) + 1), status=400)["error"]
        assert "131073 tokens in one request; this server takes 131072" in error["message"]
        assert error["param"] == "tokens"

    def test_nothing(self, ask):
        assert ask("/detokenize", tokens=[]) == {"prompt": ""}

    @pytest.mark.parametrize(
        ("tokens", "part"),
        [
            ([5, 360], "360 at index 1 is out of vocabulary; embedder has 360 tokens"),
            ([1 << 32], "out of vocabulary"),
            ([(1 << 63) - 1], "out of vocabulary"),
            ([1 << 63], "less_than"),
            ([-1], "greater_than_equal"),
            ([5.0], "int_type"),
            ([True], "int_type"),
            ("5", "list_type"),
            (None, "list_type"),
        ],
    )
    def test_refused(self, ask, tokens, part):
        assert part in ask("/detokenize", status=400, tokens=tokens)["error"]["message"]
