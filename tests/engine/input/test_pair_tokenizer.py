"""Pairs: the token ids of transformers and sentence-transformers, and how over-long pairs are cut."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import SENTENCES, write_checkpoint
from tests.tiny.tokenizers import write_tokenizer
from transformers import AutoTokenizer

from millpond import Pair
from millpond.checkpoints.templates.score_template import ScoreTemplate, shipped_template
from millpond.engine.input.pair_tokenizer import PairTokenizer, TemplateTokenizer
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.engine.tokenize.tokenized import Tokenized
from millpond.errors import InputTooLongError, InvalidRequestError

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


@pytest.mark.contract
def test_a_bert_pair_is_what_a_cross_encoder_feeds(tmp_path: Path) -> None:
    from sentence_transformers.cross_encoder import CrossEncoder

    folder = write_checkpoint(tmp_path / "model", "bert")
    oracle = CrossEncoder(str(folder), num_labels=1, device="cpu")
    ours = PairTokenizer(TextTokenizer.load(folder, lower=False))
    for pair, mine in zip(PAIRS, encode(ours, *PAIRS, limit=oracle.max_seq_length), strict=True):
        features = oracle.preprocess([tuple(pair)])
        assert mine.ids.tolist() == features["input_ids"][0].tolist()
        types = np.zeros(len(mine.ids)) if mine.types is None else mine.types
        assert types.tolist() == features["token_type_ids"][0].tolist()


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


def test_without_a_template_a_decoder_reads_one_text_behind_the_other(tokenizers: Any) -> None:
    ours, theirs = tokenizers("llama")
    tokenizer = TemplateTokenizer(ours, shipped_template("plain", special_tokens=True))
    (mine,) = encode(tokenizer, PAIRS[1])
    assert mine.ids.tolist() == theirs(PAIRS[1].query + PAIRS[1].document)["input_ids"]
    assert mine.ids.tolist() != theirs(*PAIRS[1])["input_ids"]
    (cut,) = encode(tokenizer, PAIRS[3], limit=50)
    assert cut.ids.tolist() == theirs(PAIRS[3].query + PAIRS[3].document)["input_ids"][:50]


def test_an_instruction_fills_its_slot(tokenizers: Any) -> None:
    ours, theirs = tokenizers("qwen")
    tokenizer = TemplateTokenizer(ours, shipped_template("qwen3-reranker", special_tokens=False))
    (mine,) = encode(tokenizer, PAIRS[1], instruction="Find the depth")
    assert "<Instruct>: Find the depth\n<Query>" in theirs.decode(mine.ids)
    assert mine.ids.tolist() != encode(tokenizer, PAIRS[1])[0].ids.tolist()
    assert mine.ids[-1] != theirs.eos_token_id  # which this tokenizer appends to texts; the answer is read before it


def test_pairs_without_tokens_get_a_placeholder(tokenizers: Any) -> None:
    ours, theirs = tokenizers("llama")
    (mine,) = encode(
        TemplateTokenizer(
            ours, ScoreTemplate(source=shipped_template("plain", special_tokens=True).source, special_tokens=False)
        ),
        Pair("", ""),
    )
    assert mine.ids.tolist() == [theirs.eos_token_id]
    assert encode(PairTokenizer(ours)) == []
