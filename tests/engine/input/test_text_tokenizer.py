"""Truncation that keeps special tokens and prompts."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny import SENTENCES, write_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.errors import InputTooLongError, InvalidRequestError

CLS, SEP = 0, 1


def tokenizer(*, prefix=True, suffix=True, lower=False):
    """One token per word; ``w7`` is id 17."""
    vocabulary = {"[CLS]": CLS, "[SEP]": SEP, "[UNK]": 2, **{f"w{i}": 10 + i for i in range(100)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    parts = ["[CLS]"] * prefix + ["$A"] + ["[SEP]"] * suffix
    backend.post_processor = processors.TemplateProcessing(
        single=" ".join(parts), special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    backend.enable_padding(length=64)  # as saved in many files
    backend.enable_truncation(max_length=8)
    return TextTokenizer(backend, lower=lower, limit=None)


def words(*numbers):
    return " ".join(f"w{i}" for i in numbers)


def encode(tok, text, *, limit=100, truncate="end", prompt=""):
    return tok.encode([text], prompt=prompt, limit=limit, truncate=truncate, index_of=lambda i: 40 + i)[0]


def test_padding_and_truncation_of_the_file_are_switched_off():
    out = encode(tokenizer(), words(*range(30)))
    assert len(out.ids) == 32 and not out.truncated and out.ids.dtype == np.int32


@pytest.mark.parametrize(("truncate", "kept"), [("end", [10, 11, 12]), ("start", [17, 18, 19])], ids=["end", "start"])
def test_special_tokens_survive(truncate, kept):
    out = encode(tokenizer(), words(*range(10)), limit=5, truncate=truncate)
    assert out.ids.tolist() == [CLS, *kept, SEP] and out.truncated


@pytest.mark.parametrize(("prefix", "suffix"), [(True, False), (False, True), (False, False)])
def test_tokenizers_of_other_shapes(prefix, suffix):
    out = encode(tokenizer(prefix=prefix, suffix=suffix), words(*range(10)), limit=5)
    body = list(range(10, 15 - prefix - suffix))
    assert out.ids.tolist() == [CLS] * prefix + body + [SEP] * suffix


@pytest.mark.parametrize(("truncate", "kept"), [("end", [10, 11]), ("start", [18, 19])])
def test_a_prompt_survives(truncate, kept):
    out = encode(tokenizer(), words(*range(10)), prompt="w90 w91 ", limit=6, truncate=truncate)
    assert out.ids.tolist() == [CLS, 100, 101, *kept, SEP]


def test_error_names_the_callers_index():
    with pytest.raises(InputTooLongError, match=r"index 40 has 12 tokens, more than max_length=5"):
        encode(tokenizer(), words(*range(10)), limit=5, truncate="error")


def test_prompt_length_counts_leading_specials_only():
    assert tokenizer().prompt_length("w90 w91 ") == 3
    assert tokenizer(prefix=False).prompt_length("w90 w91 ") == 2
    assert tokenizer().prompt_length("") == 0


def test_a_text_of_no_tokens_gets_a_placeholder():
    bare = tokenizer(prefix=False, suffix=False)
    with pytest.raises(InvalidRequestError, match="index 40 has no tokens"):
        encode(bare, "")
    assert encode(TextTokenizer(bare._backend, lower=False, limit=None, placeholder=7), "").ids.tolist() == [7]


@pytest.mark.parametrize("prompt", ["", "İ: ", "query: "])
def test_offsets_refer_to_the_text_before_its_case_was_folded(tmp_path, prompt):
    """The only letter that is two letters in lower case."""
    read = TextTokenizer.load(write_checkpoint(tmp_path / "model", "bert"), lower=True)
    text = "İİ The İold MILL pond"
    [found] = read.encode([text], prompt=prompt, limit=100, truncate="end", index_of=lambda i: i, align=True)
    words = [text[start:end] for start, end in found.alignment.offsets[~found.alignment.special]]
    assert "".join(words) == text.replace(" ", "")
    assert words[-2:] == ["MILL", "pond"]


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "llama", "gemma", "qwen3", "modernbert"])
def test_a_whole_reading_has_the_prompt_in_front_and_the_text_once(tmp_path, family):
    """The space behind a prompt may be in the text's first token, which does not belong to the prompt."""
    read = TextTokenizer.load(write_checkpoint(tmp_path / "model", family), lower=False)
    text, prompt = SENTENCES[0], "query: "
    [(own, front, behind)] = read.read_whole([text], prompt=prompt)
    [(alone, before, after)] = read.read_whole([text], prompt="")
    assert read.ids([prompt + text], special_tokens=True)[0] == [*front, *own, *behind]
    assert behind.tolist() == after.tolist()
    assert front[: len(before)].tolist() == before.tolist()
    assert own[-5:].tolist() == alone[-5:].tolist()
    in_front, shown = (
        "".join(letter for letter in read.transformers.decode(ids) if letter not in " Ġ▁#") for ids in (front, own)
    )
    assert "query:" in in_front
    assert shown.startswith("Theoldmill")


STRANGE = [
    "  ",
    "\t",
    "\u3000",
    "池 塘",
    "e\u0301 x",
    "\u0301",
    "[SEP]",
    "pond's",
    "x" * 90,
    "ﬁ",
    "mill-pond",
    "don't",
    "\n",
]


@pytest.fixture(scope="module")
def read_by_heads(tmp_path_factory):
    return TextTokenizer.load(write_checkpoint(tmp_path_factory.mktemp("heads") / "model", "bert"), lower=False)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([*SENTENCES, *STRANGE]), min_size=1, max_size=60),
    st.integers(8, 24),
    st.sampled_from(["", "query: ", "query:", "a b "]),
    st.sampled_from(["end", "start"]),
)
def test_the_head_of_a_long_text_has_the_tokens_of_the_whole(read_by_heads, parts, limit, prompt, truncate):
    texts = [" ".join(parts), "".join(parts)]
    options = {"prompt": prompt, "limit": limit, "truncate": truncate, "index_of": lambda i: i}
    heads = read_by_heads.encode(texts, **options)
    with mock.patch.object(read_by_heads.long_texts, "splits_at_spaces", False):
        wholes = read_by_heads.encode(texts, **options)
    for found, whole in zip(heads, wholes, strict=True):
        assert found.truncated == whole.truncated
        assert found.ids.tolist() == whole.ids.tolist()


@pytest.mark.parametrize("rest", [400, 4])
def test_of_a_long_text_the_head_alone_is_read_if_that_is_enough(read_by_heads, monkeypatch, rest):
    read, right = [], TextTokenizer._encode
    monkeypatch.setattr(
        TextTokenizer,
        "_encode",
        lambda self, texts, **how: read.append(max(map(len, texts))) or right(self, texts, **how),
    )
    text = " ".join(["a" if rest > 100 else "x" * 150] * rest)  # one token for 1 or 150 letters
    found = encode(read_by_heads, text, limit=12)
    assert found.truncated == (rest > 100)
    assert (max(read) < len(text)) == (rest > 100)
