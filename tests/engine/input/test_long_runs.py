"""Long runs: a text of megabytes that reads as a few tokens is shortened, and not one of its tokens changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.tiny.tokenizers import KINDS, SENTENCES, write_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, normalizers

from millpond.engine.input import long_runs
from millpond.engine.input.casefold import fold
from millpond.engine.input.long_runs import LongRuns
from millpond.engine.input.text_tokenizer import TextTokenizer

SIZE = 3000
# Stretches of which BERT makes one token or none, however long they are.
POOR = {
    "one letter": "w",
    "letters": "Ab9",
    "accents": "\u0301",
    "accents that stop reordering": "\u0301\u0323\u034f",
    "a letter with accents": "a\u0301\u0302\u0303",
    "a ligature": "\ufdfa",
    "spaces": " ",
    "blank lines": " \n\t",
    "zero width": "\u200b\u200d\ufeff",
    "spaces and zero width": " \u200b",
    "variation selectors": "\ufe0f",
    "jamo": "\u1112\u1161\u11ab",
    "a capital that gets longer": "İ",
    "family": "👩\u200d👩\u200d👧\ufe0f",
    "private use": "\ue000",
    "control characters": "\x00\x01\x7f",
    "spacing marks that trade places": "\u302e\u0301\U0001d165",
}
RICH = ["池塘", "!?.", "[SEP]", "[MASK] ", "\u037e", "The miller's daughter, 1824; ", "é ü ", "a\u0301 b\u0323 "]
PIECES = [*POOR.values(), *RICH, SENTENCES[0]]
TEXTS = st.lists(
    st.tuples(st.sampled_from(PIECES), st.sampled_from([1, 2, 3, 65, 130, 200, 400])), min_size=1, max_size=7
).map(lambda pieces: "".join((piece * size)[:size] for piece, size in pieces))


def backend_of(folder, name: str, **options: Any) -> Tokenizer:
    write_tokenizer(folder, name, limit=None, **options)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=["bert", "bert lower", "bert folded", "mpnet", "xlm-roberta", "nfkc"])
def shortened(request, tmp_path_factory) -> tuple[Tokenizer, LongRuns, Any]:
    """A tokenizer, what shortens its texts, and how they are folded."""
    name, _, variant = request.param.partition(" ")
    folder = tmp_path_factory.mktemp("tokenizer")
    kind = "xlm-roberta" if name == "nfkc" else name
    backend = backend_of(folder, kind, lowercase=variant == "lower")
    if name == "nfkc":
        spaces = normalizers.Replace(Regex(" {2,}"), " ")
        backend.normalizer = normalizers.Sequence([normalizers.NFKC(), spaces, normalizers.Strip()])
    folding = fold if variant == "folded" else str
    return backend, long_runs.long_runs(backend, folding), folding


@given(text=TEXTS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_token_changes(shortened, text):
    backend, runs, folding = shortened
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_runs, "_CHUNK", 501)
        excerpt = runs.shorten(text)
    assert backend.encode(folding(excerpt.text)).ids == backend.encode(folding(text)).ids
    assert excerpt.end == len(text)
    if excerpt.origin is not None:
        assert "".join(text[i] for i in excerpt.origin) == excerpt.text


@pytest.mark.parametrize("name", POOR)
@pytest.mark.parametrize("lowercase", [True, False])
def test_what_reads_as_few_tokens_is_short(tmp_path, name, lowercase):
    backend = backend_of(tmp_path, "bert", lowercase=lowercase)
    text = (POOR[name] * (20 * SIZE))[: 20 * SIZE]
    tokens = len(backend.encode(text).ids)
    short = long_runs.long_runs(backend, str).shorten(text).text
    if tokens > SIZE:  # to a cased tokenizer some of these are tokens of their own
        assert not lowercase and len(short) == len(text)
    else:
        assert len(short) <= 1200 * tokens


def test_prose_stays_as_it_is(tmp_path):
    text = " ".join(SENTENCES) * 20
    for name in KINDS:
        folder = tmp_path / name
        folder.mkdir()
        excerpt = long_runs.long_runs(backend_of(folder, name), str).shorten(text)
        assert excerpt.text == text and excerpt.origin is None


@pytest.mark.parametrize("name", ["roberta", "gpt2", "mistral", "gemma"])
def test_tokenizers_that_make_tokens_of_every_character_are_left_alone(tmp_path, name):
    runs = long_runs.long_runs(backend_of(tmp_path, name), str)
    for piece in POOR.values():
        assert runs.shorten(piece * SIZE).text == piece * SIZE


@pytest.mark.parametrize("content", ["pond", "x\u0301]", "[" + "P" * 80 + "]"])
def test_an_added_token_that_may_lie_inside_of_a_word_stays(tmp_path, content):
    backend = backend_of(tmp_path, "bert")
    backend.add_tokens([AddedToken(content, normalized=False)])
    text = "w" * 500 + content + "w" * 500
    assert backend.token_to_id(content) in backend.encode(text).ids
    shorter = long_runs.long_runs(backend, str).shorten(text).text
    assert backend.encode(shorter).ids == backend.encode(text).ids


@pytest.mark.parametrize("options", [{"single_word": True}, {"lstrip": True}, {"rstrip": True}], ids=repr)
@pytest.mark.parametrize("dropped", ["\u0301\u200b", "\u200b\u0301", "\u200b\x0b", "\x0b\u200b"], ids=ascii)
def test_an_added_token_sees_the_same_characters_beside_it(tmp_path, options, dropped):
    backend = backend_of(tmp_path, "bert", lowercase=True)
    backend.add_tokens([AddedToken("[x]", normalized=False, **options)])
    runs = long_runs.long_runs(backend, str)
    for text in (f"The pond{3 * dropped}[x] stands.", f"The pond [x]{3 * dropped}stands."):
        excerpt, whole = runs.shorten(text), backend.encode(text, add_special_tokens=False)
        found = backend.encode(excerpt.text, add_special_tokens=False)
        assert len(excerpt.text) < len(text)
        assert found.ids == whole.ids
        offsets = np.array(found.offsets, dtype=np.int32)
        assert excerpt.offsets_in_whole(offsets).tolist() == [list(span) for span in whole.offsets]


def test_spans_of_an_excerpt_are_spans_of_the_whole(tmp_path):
    backend = backend_of(tmp_path, "bert", lowercase=True)
    text = "The pond" + " " * 900 + "w" * 900 + "\u0301" * 900 + " stands" + "\u200b" * 900 + "."
    excerpt = long_runs.long_runs(backend, str).shorten(text)
    offsets = np.array(backend.encode(excerpt.text).offsets, dtype=np.int32)[1:-1]
    assert len(excerpt.text) < 700
    assert excerpt.offsets_in_whole(offsets).tolist() == [list(span) for span in backend.encode(text).offsets[1:-1]]


@pytest.mark.parametrize("prompt", ["", "Find it: "])
def test_windows_are_cut_from_the_shortened_text(tmp_path, monkeypatch, prompt):
    write_tokenizer(tmp_path, "bert", limit=None)
    tokenizer, sizes = TextTokenizer.load(tmp_path, lower=False), []
    text = "The pond " + "w" * 100_000 + " stands."
    encode = TextTokenizer._encode

    def spied(self, texts, *, offsets=False):
        sizes.extend(map(len, texts))
        return encode(self, texts, offsets=offsets)

    monkeypatch.setattr(TextTokenizer, "_encode", spied)
    ((ids, front, back),) = tokenizer.read_whole([text], prompt=prompt)
    whole = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(prompt + text).ids
    assert [*front, *ids, *back] == whole
    assert sum(sizes) < 1000
