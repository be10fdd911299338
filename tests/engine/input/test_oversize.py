"""Oversize texts: they are cut, or refused, as if they had been tokenized whole."""

import numpy as np
import pytest
from tests.tiny.tokenizers import KINDS, SENTENCES, write_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from millpond.engine.input import oversize
from millpond.engine.input.encode import InputEncoder
from millpond.engine.input.pair_tokenizer import PairTokenizer
from millpond.engine.input.plan import Plan
from millpond.engine.input.text_tokenizer import TextTokenizer
from millpond.errors import InputTooLongError
from millpond.inputs import Pair, SpannedText, TokenIds
from millpond.pooling.pooler import Readout

LIMIT = 24
SIZE = 40_000
PROSE = " ".join(SENTENCES)


def repeated(text):
    return (text * (SIZE // len(text) + 1))[:SIZE]


TEXTS = {
    "prose": repeated(PROSE + " "),
    "lines": repeated(PROSE.replace(". ", ".\n\n")),
    "tabs": repeated(PROSE.replace(" ", "\t")),
    "spaced": repeated(PROSE.replace(" ", "     ")),
    "marks": repeated("! "),
    "spaces first": " " * SIZE + PROSE,
    "spaces last": PROSE + " " * SIZE,
    "spaces between": PROSE + " " * SIZE + PROSE,
}


@pytest.fixture(scope="module", params=list(KINDS))
def encoder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_tokenizer(folder, request.param, limit=None)
    tokenizer = TextTokenizer.load(folder, lower=False)
    return InputEncoder(texts=tokenizer, pairs=PairTokenizer(tokenizer))


@pytest.fixture(autouse=True)
def sooner(monkeypatch):
    """Shorter texts are oversize here, which saves time."""
    monkeypatch.setattr(oversize, "_WHOLE_CHARACTERS", 1 << 13)


def plan(truncate, **more):
    return Plan(task="embed", readout=Readout(kind="pooled"), limit=LIMIT, truncate=truncate, width=8, **more)


def index_of(i):
    return 40 + i


@pytest.fixture
def read(monkeypatch):
    """The number of characters of every text that was tokenized."""
    sizes = []
    encode = TextTokenizer._encode

    def spied(self, texts, *, offsets=False):
        sizes.extend(map(len, texts))
        return encode(self, texts, offsets=offsets)

    monkeypatch.setattr(TextTokenizer, "_encode", spied)
    return sizes


@pytest.mark.parametrize("truncate", ["end", "start"])
@pytest.mark.parametrize("name", TEXTS)
def test_what_is_kept_is_what_the_whole_would_keep(encoder, name, truncate):
    items = ["The pond.", TEXTS[name], TokenIds((5, 6))]
    whole = encoder.texts.encode([TEXTS[name]], prompt="", limit=LIMIT, truncate=truncate, index_of=index_of)[0]
    found = encoder.encode(items, plan(truncate), index_of=index_of)[1]
    assert np.array_equal(found.ids, whole.ids)
    assert found.truncated is whole.truncated


@pytest.mark.parametrize("prompt", ["query: ", "Find it: "])
@pytest.mark.parametrize("truncate", ["end", "start"])
def test_a_prompt_stays_in_front(encoder, prompt, truncate):
    how = {"prompt": prompt, "limit": LIMIT, "truncate": truncate}
    whole = encoder.texts.encode([TEXTS["prose"]], index_of=index_of, **how)[0]
    (found,) = encoder.encode([TEXTS["prose"]], plan(truncate, prompt=prompt), index_of=index_of)
    assert np.array_equal(found.ids, whole.ids)


@pytest.mark.parametrize("truncate", ["end", "start"])
def test_pairs_of_oversize_texts(encoder, truncate):
    giant = TEXTS["prose"]
    pairs = [Pair("Who?", giant), Pair(giant, "Nobody."), Pair(giant, giant)]
    whole = encoder.pairs.encode(pairs, limit=LIMIT, truncate=truncate, index_of=index_of)
    for found, expected in zip(encoder.encode(pairs, plan(truncate), index_of=index_of), whole, strict=True):
        assert np.array_equal(found.ids, expected.ids) and found.truncated


@pytest.mark.parametrize("name", ["prose", "lines", "spaced", "marks"])
def test_little_of_an_oversize_text_is_tokenized(encoder, read, name):
    encoder.encode([TEXTS[name]], plan("end"), index_of=index_of)
    assert sum(read) < SIZE / 4


@pytest.mark.parametrize("item", [TEXTS["marks"], Pair("Who?", TEXTS["marks"])], ids=["text", "pair"])
def test_an_oversize_text_is_refused_by_the_tokens_of_its_beginning(encoder, read, item):
    with pytest.raises(InputTooLongError, match="at index 41 has at least ") as caught:
        encoder.encode(
            ["The pond." if isinstance(item, str) else Pair("a", "b"), item], plan("error"), index_of=index_of
        )
    error = caught.value
    assert (error.index, error.limit, error.at_least) == (41, LIMIT, True)
    assert 2 * LIMIT < error.tokens < SIZE / 10
    assert sum(read) < SIZE / 4


def test_beside_an_oversize_text_that_may_be_cut_another_is_counted_exactly(encoder):
    text = "pond " * 100
    with pytest.raises(InputTooLongError) as caught:
        encoder.encode([" " * SIZE, text], plan("error"), index_of=index_of)
    # To some of these tokenizers spaces are no tokens; then the second text is the one that is too long.
    if caught.value.index == 41:
        assert caught.value.tokens == encoder.texts.count(text) and caught.value.at_least is None


def test_spaces_that_are_no_tokens_are_not_too_long(tmp_path):
    write_tokenizer(tmp_path, "bert", limit=None)
    encoder = InputEncoder(texts=TextTokenizer.load(tmp_path, lower=False))
    spaced = encoder.encode([" " * SIZE + "The pond."], plan("error"), index_of=index_of)
    assert np.array_equal(spaced[0].ids, encoder.encode(["The pond."], plan("error"), index_of=index_of)[0].ids)


def test_a_text_with_spans_is_read_whole(encoder, read):
    item = SpannedText(TEXTS["prose"], ((SIZE - 5, SIZE),))
    encoder.encode([item], plan("start"), index_of=index_of)
    assert max(read) == SIZE


def test_many_long_texts_are_not_read_at_once():
    items = ["a" * 600_000, "a" * 300_000, "a" * 200_000, "b", TokenIds((1,) * 500_000), "c"]
    assert list(oversize.bunches(items)) == [range(2), range(2, 4), range(4, 5), range(5, 6)]
    assert list(oversize.bunches([])) == []


@pytest.mark.parametrize("end", ["", "\u0301", "\u0323", "\u0323 and a pond", " and a pond\u0323"])
def test_accents_that_compose_are_read_in_parts_unless_one_moves_to_the_front(tmp_path, read, end):
    write_tokenizer(tmp_path, "roberta", limit=None)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.normalizer = normalizers.NFC()
    tokenizer = TextTokenizer(backend, lower=False, limit=None)
    text = "a" + "\u0301" * SIZE + end
    (found,) = InputEncoder(texts=tokenizer).encode([text], plan("end"), index_of=index_of)
    whole = backend.encode(text).ids
    assert found.truncated and found.ids.tolist() == [*whole[: LIMIT - 1], whole[-1]]
    moves = end.startswith("\u0323")  # to the left of all of the others
    assert (sum(read) > SIZE) == moves


@pytest.mark.parametrize("truncate", ["end", "start"])
@pytest.mark.parametrize("digits", [r"\d{1,3}(?=(\d{3})*(?!\d))", r"(?=(\d{3})+(?!\d))"])
def test_digits_that_are_counted_from_their_end_are_read_to_it(tmp_path, digits, truncate):
    write_tokenizer(tmp_path, "qwen", limit=None)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    split = pre_tokenizers.Split(Regex(digits), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    tokenizer = TextTokenizer(backend, lower=False, limit=None)
    for end in (" pond", "7 pond", "77 pond"):
        text = "1824" * 2_200 + end  # such patterns take quadratic time
        (found,) = InputEncoder(texts=tokenizer).encode([text], plan(truncate), index_of=index_of)
        *ids, last = backend.encode(text).ids
        kept = ids[: LIMIT - 1] if truncate == "end" else ids[1 - LIMIT :]
        assert found.ids.tolist() == [*kept, last]


def test_offsets_of_unknown_bytes_are_those_of_the_whole_run():
    fallback = [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("\u2581", -2.0), ("pond", -3.0), *fallback], 0, True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = TextTokenizer(backend, lower=False, limit=None)
    item = SpannedText("pond " + "\u6c60" * SIZE, ((0, 1),))
    whole = tokenizer.encode([item.text], prompt="", limit=LIMIT, truncate="end", index_of=index_of, align=True)[0]
    (found,) = InputEncoder(texts=tokenizer).encode([item], plan("end"), index_of=index_of)
    assert np.array_equal(found.ids, whole.ids)
    assert np.array_equal(found.alignment.offsets, whole.alignment.offsets)


@pytest.mark.parametrize("mark", ["\uff9e", "\uff9f"])
def test_sound_marks_that_become_accents_let_one_move_to_the_front(tmp_path, mark):
    write_tokenizer(tmp_path, "roberta", limit=None)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.normalizer = normalizers.NFKC()
    tokenizer = TextTokenizer(backend, lower=False, limit=None)
    text = "a" + mark * SIZE + "\u0338"
    (found,) = InputEncoder(texts=tokenizer).encode([text], plan("end"), index_of=index_of)
    whole = backend.encode(text).ids
    assert found.ids.tolist() == [*whole[: LIMIT - 1], whole[-1]]


@pytest.mark.parametrize("kind", ["roberta", "qwen", "mistral"])
@pytest.mark.parametrize("truncate", ["end", "start"])
def test_an_added_token_takes_all_of_the_whitespace_beside_it(tmp_path, kind, truncate):
    write_tokenizer(tmp_path, kind, limit=None)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([AddedToken("[x]", lstrip=True, rstrip=True, normalized=False)])
    tokenizer = TextTokenizer(backend, lower=False, limit=None)
    for blank in (" ", " \n"):
        text = "pond[x]" * 200 + blank * (SIZE // 2) + "[x]pond" * 200
        if truncate == "start":
            text = "[x]" * 300 + blank * SIZE
        for giant in (text, "pond " + blank * SIZE + "[x]"):
            whole = tokenizer.encode([giant], prompt="", limit=LIMIT, truncate=truncate, index_of=index_of)[0]
            (found,) = InputEncoder(texts=tokenizer).encode([giant], plan(truncate), index_of=index_of)
            assert np.array_equal(found.ids, whole.ids)
