"""Texts and pairs to token ids: truncation, templates, and pairs as transformers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny import SENTENCES, write_checkpoint
from tests.tiny.tokenizers import write_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from millpond import Pair
from millpond.checkpoints.templates.score_template import ScoreTemplate, shipped_template
from millpond.engine.input.pair_tokenizer import PairTokenizer, TemplateTokenizer
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.engine.tokenize.tokenized import Tokenized
from millpond.errors import InputTooLongError, InvalidRequestError

CLS, SEP = 0, 1


def word_level(*, prefix=True, suffix=True, lower=False):
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


def encode_text(tok, text, *, limit=100, truncate="end", prompt=""):
    return tok.encode([text], prompt=prompt, limit=limit, truncate=truncate, index_of=lambda i: 40 + i)[0]


@pytest.mark.parametrize(("truncate", "kept"), [("end", [10, 11, 12]), ("start", [17, 18, 19])], ids=["end", "start"])
def test_special_tokens_survive(truncate, kept):
    out = encode_text(word_level(), words(*range(10)), limit=5, truncate=truncate)
    assert out.ids.tolist() == [CLS, *kept, SEP] and out.truncated


@pytest.mark.parametrize(("truncate", "kept"), [("end", [10, 11]), ("start", [18, 19])])
def test_a_prompt_survives(truncate, kept):
    out = encode_text(word_level(), words(*range(10)), prompt="w90 w91 ", limit=6, truncate=truncate)
    assert out.ids.tolist() == [CLS, 100, 101, *kept, SEP]


def test_a_text_of_no_tokens_gets_a_placeholder():
    bare = word_level(prefix=False, suffix=False)
    with pytest.raises(InvalidRequestError, match="index 40 has no tokens"):
        encode_text(bare, "")
    assert encode_text(TextTokenizer(bare._backend, lower=False, limit=None, placeholder=7), "").ids.tolist() == [7]


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
        "".join(letter for letter in read.decode(ids.tolist()) if letter not in " Ġ▁#") for ids in (front, own)
    )
    assert "query:" in in_front
    assert shown.startswith("Theoldmill")


STRANGE = ["  ", "\t", "\u3000", "池 塘", "e\u0301 x", "\u0301", "[SEP]", "pond's", "x" * 90, "ﬁ", "mill-pond", "\n"]


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
    read, right = [], TextTokenizer.id_arrays
    monkeypatch.setattr(
        TextTokenizer,
        "id_arrays",
        lambda self, texts, **how: read.append(max(map(len, texts))) or right(self, texts, **how),
    )
    text = " ".join(["a" if rest > 100 else "x" * 150] * rest)  # one token for 1 or 150 letters
    found = encode_text(read_by_heads, text, limit=12)
    assert found.truncated == (rest > 100)
    assert (max(read) < len(text)) == (rest > 100)


QUERY = "How deep is the pond?"


PAIRS = (
    Pair("a", "b"),
    Pair(QUERY, SENTENCES[0]),
    Pair(SENTENCES[3], SENTENCES[3]),
    Pair(QUERY, " ".join(SENTENCES[1:9])),
    Pair(" ".join(SENTENCES[1:9]), QUERY),
    Pair(" ".join(SENTENCES[1:4]), " ".join(SENTENCES[4:7])),
    Pair("Ein Teich, une étang, 池。", "🦆 swims " * 9),
    Pair("", SENTENCES[4]),
    Pair(SENTENCES[4], ""),
)


KINDS = ("bert", "mpnet", "roberta", "xlm-roberta", "modernbert", "llama", "gemma")


FRAME = (
    "System: is it in there?\nQuery: {{ (messages | selectattr('role', 'eq', 'query') | first).content }}\n"
    "Document: {{ (messages | selectattr('role', 'eq', 'document') | first).content }}\nThe answer is:"
)


TAIL = "\nThe answer is:"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Our tokenizer and transformers', by kind."""
    from transformers import AutoTokenizer

    found: dict[str, tuple[TextTokenizer, Any]] = {}

    def load(kind: str) -> tuple[TextTokenizer, Any]:
        if kind not in found:
            folder = tmp_path_factory.mktemp("tokenizers")
            write_tokenizer(folder, kind, limit=None)
            found[kind] = TextTokenizer.load(folder, lower=False), AutoTokenizer.from_pretrained(folder)
        return found[kind]

    return load


def reference_of(tokenizer: Any, pair: Pair, **options: Any) -> dict[str, list[int]]:
    """transformers' encoding, called with lists as sentence-transformers does: one empty document makes no pair."""
    return {key: rows[0] for key, rows in tokenizer([pair.query], [pair.document], **options).items()}


def encode(
    tokenizer: PairTokenizer | TemplateTokenizer, *pairs: Pair, limit: int = 10_000, **options: Any
) -> list[Tokenized]:
    options = {"truncate": "end", "index_of": lambda i: i, **options}
    return tokenizer.encode(pairs, limit=limit, **options)


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_whole_pairs_are_what_transformers_makes_of_them(tokenizers: Any, kind: str) -> None:
    ours, theirs = tokenizers(kind)
    for pair, mine in zip(PAIRS, encode(PairTokenizer(ours), *PAIRS), strict=True):
        reference = reference_of(theirs, pair)
        assert mine.ids.tolist() == reference["input_ids"]
        assert mine.ids.dtype == np.int32
        assert not mine.truncated
        types = reference.get("token_type_ids", [0])
        assert (mine.types.tolist() if mine.types is not None else None) == (types if any(types) else None)


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "llama"])
@pytest.mark.parametrize("side", ["end", "start"])
@pytest.mark.parametrize("limit", [6, 7, 12, 13, 20, 33, 40, 64])
def test_cuts_are_longest_first_token_by_token(tokenizers: Any, kind: str, side: str, limit: int) -> None:
    ours, theirs = tokenizers(kind)
    theirs.truncation_side = {"end": "right", "start": "left"}[side]
    for pair, mine in zip(PAIRS, encode(PairTokenizer(ours), *PAIRS, limit=limit, truncate=side), strict=True):
        reference = reference_of(theirs, pair, truncation="longest_first", max_length=limit)
        assert mine.ids.tolist() == reference["input_ids"]
        assert mine.truncated == (len(reference_of(theirs, pair)["input_ids"]) > limit)
        if mine.types is not None:
            assert mine.types.tolist() == reference["token_type_ids"]


@pytest.mark.torch
@pytest.mark.parametrize("template", [None, FRAME])
def test_refusals_name_the_pair_and_the_limit(tokenizers: Any, template: str | None) -> None:
    ours, _ = tokenizers("bert")
    tokenizer = PairTokenizer(ours) if template is None else TemplateTokenizer(ours, ScoreTemplate(source=template))
    with pytest.raises(InputTooLongError, match=r"pair at index 7 has \d+ tokens, more than max_length=60"):
        encode(tokenizer, PAIRS[0], PAIRS[3], limit=60, truncate="error", index_of=lambda i: 6 + i)
    with pytest.raises(InputTooLongError, match=r"of max_length=4 tokens, which leaves [01] for query and document"):
        encode(tokenizer, PAIRS[3], limit=4)
    with pytest.raises(InvalidRequestError, match=r"instruction='Find it' has no place"):
        encode(tokenizer, PAIRS[0], instruction="Find it")


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma"])
def test_a_template_is_one_text_with_special_tokens_around_it_once(tokenizers: Any, kind: str) -> None:
    ours, theirs = tokenizers(kind)
    template = ScoreTemplate(source=FRAME)
    text = template.render(*PAIRS[1])
    (with_them,) = encode(TemplateTokenizer(ours, template), PAIRS[1])
    assert with_them.ids.tolist() == theirs(text)["input_ids"]
    (chat,) = encode(TemplateTokenizer(ours, ScoreTemplate(source=FRAME, special_tokens=False)), PAIRS[1])
    assert chat.ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"] != with_them.ids.tolist()
    (spelled,) = encode(TemplateTokenizer(ours, ScoreTemplate(source="{{ bos_token }}" + FRAME)), PAIRS[1])
    assert spelled.ids.tolist().count(theirs.bos_token_id) == 1
    assert spelled.ids[0] == theirs.bos_token_id


@pytest.mark.torch
@pytest.mark.parametrize("limit", [75, 140])
def test_over_long_templates_lose_what_sentence_transformers_cuts(tmp_path: Path, limit: int) -> None:
    from sentence_transformers.base.modules import Transformer

    folder = write_checkpoint(tmp_path / "model", "qwen3", wrapped=True, template="$A", tokenizer_limit=None)
    (folder / "chat_template.jinja").write_text(FRAME, encoding="utf-8")
    oracle = Transformer(str(folder), transformer_task="text-generation")
    ours = TextTokenizer.load(folder, lower=False)
    tokenizer = TemplateTokenizer(ours, ScoreTemplate(source=FRAME, special_tokens=False))
    pair = Pair(QUERY, " ".join(SENTENCES))
    (mine,) = encode(tokenizer, pair, limit=limit)
    features = oracle.preprocess([tuple(pair)], max_length=limit)
    assert mine.truncated
    assert mine.ids.tolist() == features["input_ids"][0].tolist()
    naive = ours.encode_rendered([FRAME], special_tokens=False)[0].ids[:limit]
    assert mine.ids.tolist() != naive


@pytest.mark.torch
@pytest.mark.parametrize("side", ["end", "start"])
@pytest.mark.parametrize("kind", ["qwen", "llama", "gemma", "mistral", "xlm-roberta"])
def test_only_the_document_is_cut_and_the_suffix_survives(tokenizers: Any, kind: str, side: str) -> None:
    ours, theirs = tokenizers(kind)
    template = ScoreTemplate(source=FRAME)
    tokenizer = TemplateTokenizer(ours, template)
    pair = Pair(QUERY, " ".join(f"{i} {sentence} 🦆" for i, sentence in enumerate(SENTENCES)))
    text = template.render(*pair)
    whole = theirs(text, return_offsets_mapping=True)
    ids, limit = whole["input_ids"], len(whole["input_ids"]) * 2 // 3
    (mine,) = encode(tokenizer, pair, limit=limit, truncate=side)
    assert mine.truncated
    assert len(mine.ids) == limit
    gone = len(ids) - limit
    begin, end = text.index("Document: ") + 10, len(text) - len(TAIL)
    inside = [i for i, (first, last) in enumerate(whole["offset_mapping"]) if first >= begin and first < last <= end]
    cut = inside[-1] + 1 - gone if side == "end" else inside[0]
    assert mine.ids.tolist() == ids[:cut] + ids[cut + gone :]
    assert mine.ids.tolist() != ids[:limit]  # a cut at the end would drop the suffix


@pytest.mark.torch
@pytest.mark.parametrize("limit", [50, 70, 100])
def test_a_query_that_fills_the_room_leaves_a_quarter_to_its_document(tokenizers: Any, limit: int) -> None:
    ours, theirs = tokenizers("bert")
    tokenizer = TemplateTokenizer(ours, ScoreTemplate(source=FRAME))
    fixed = len(encode(tokenizer, Pair("", ""))[0].ids)
    (mine,) = encode(tokenizer, Pair("mill " * 300, "pond " * 300), limit=limit)
    mill, pond = theirs.convert_tokens_to_ids(["mill", "pond"])
    assert len(mine.ids) == limit
    assert mine.ids.tolist().count(pond) == (limit - fixed) // 4
    assert mine.ids.tolist().count(mill) == limit - fixed - (limit - fixed) // 4
    (short,) = encode(tokenizer, Pair("mill " * 300, "pond"), limit=limit)
    assert short.ids.tolist().count(pond) == 1
    assert short.ids.tolist().count(mill) == limit - fixed - 1


@pytest.mark.torch
def test_texts_that_the_template_trims_or_repeats(tokenizers: Any) -> None:
    ours, theirs = tokenizers("bert")
    slot = "{{ (messages | selectattr('role', 'eq', '%s') | first).content | trim }}"
    trimming = slot % "query" + " ; " + slot % "document" + " ; the end"
    (mine,) = encode(
        TemplateTokenizer(ours, ScoreTemplate(source=trimming)), Pair("  the mill ", "  pond" * 50), limit=30
    )
    assert theirs.decode(mine.ids).startswith("[CLS] the mill ; pond pond")
    assert theirs.decode(mine.ids).endswith("pond ; the end [SEP]")
    twice = ScoreTemplate(source=slot % "query" + slot % "document" + slot % "document")
    assert len(encode(TemplateTokenizer(ours, twice), PAIRS[1])) == 1
    with pytest.raises(InputTooLongError, match="renders the document in more than one place"):
        encode(TemplateTokenizer(ours, twice), PAIRS[3], limit=30)
    with pytest.raises(InputTooLongError, match="max_length=30"):
        encode(TemplateTokenizer(ours, twice), PAIRS[3], limit=30, truncate="error")


@pytest.mark.torch
def test_without_a_template_a_decoder_reads_one_text_behind_the_other(tokenizers: Any) -> None:
    ours, theirs = tokenizers("llama")
    tokenizer = TemplateTokenizer(ours, shipped_template("plain", special_tokens=True))
    (mine,) = encode(tokenizer, PAIRS[1])
    assert mine.ids.tolist() == theirs(PAIRS[1].query + PAIRS[1].document)["input_ids"]
    assert mine.ids.tolist() != theirs(*PAIRS[1])["input_ids"]
    (cut,) = encode(tokenizer, PAIRS[3], limit=50)
    assert cut.ids.tolist() == theirs(PAIRS[3].query + PAIRS[3].document)["input_ids"][:50]


@pytest.mark.torch
def test_pairs_without_tokens_get_a_placeholder(tokenizers: Any) -> None:
    ours, theirs = tokenizers("llama")
    template = shipped_template("plain", special_tokens=False)
    (mine,) = encode(TemplateTokenizer(ours, template), Pair("", ""))
    assert mine.ids.tolist() == [theirs.eos_token_id]
    assert encode(PairTokenizer(ours)) == []
