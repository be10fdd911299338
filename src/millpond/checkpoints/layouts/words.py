"""sentence-transformers' models of whole words: WordEmbeddings, a table of vectors, and BoW, which counts words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millpond.checkpoints.layouts.token_modules import word_weights
from millpond.checkpoints.resolve import read_json_object
from millpond.errors import ModelLoadError

_CONFIG, _WHITESPACE = "wordembedding_config.json", "whitespacetokenizer_config.json"
_PHRASES = (
    "PhraseTokenizer, which splits texts by NLTK's rules and joins phrases; millpond reads WhitespaceTokenizer and "
    "TransformersTokenizerWrapper, and with the former its table can be saved again, phrases left out"
)


@dataclass(frozen=True, kw_only=True)
class Words:
    """WhitespaceTokenizer: words between white space, which the vocabulary has as they are or simplified."""

    ids: dict[str, int]
    stop_words: frozenset[str] = frozenset()
    lower: bool = False  # whether texts are in lower case first


@dataclass(frozen=True, kw_only=True)
class Bag:
    """A text's vector has a column for each word: the word's weight, ``counted`` as often as the word occurs."""

    weights: tuple[float, ...]
    counted: bool


def read_word_embeddings(folder: Path, no_length: int) -> tuple[Words | None, int]:
    """The words of a WordEmbeddings (``None``: it has a tokenizer of transformers), and how many of a text it reads."""
    path = folder / _CONFIG
    config = read_json_object(path)
    length = config.get("max_seq_length", no_length)
    if type(length) is not int or length < 1:
        raise ModelLoadError(f"{path}: max_seq_length is {length!r}; it must be a positive int")
    dotted = str(config.get("tokenizer_class", ""))
    kind = dotted.rsplit(".", 1)[-1]
    if dotted.startswith("sentence_transformers.") and kind == "TransformersTokenizerWrapper":
        return None, length
    if not dotted.startswith("sentence_transformers.") or kind != "WhitespaceTokenizer":
        what = _PHRASES if kind == "PhraseTokenizer" else f"{dotted!r}, which is code of the checkpoint's own"
        raise ModelLoadError(f"{path}: tokenizer_class is {what}")
    return _read_words(folder / _WHITESPACE), length


def read_bag(folder: Path) -> tuple[Words, Bag]:
    """The words of a BoW and how it counts them."""
    path = folder / "config.json"
    config = dict(read_json_object(path))
    if isinstance(config.get("vocab"), list):
        config["vocab"] = list(dict.fromkeys(config["vocab"]))
    weights, _ = word_weights(path, config)
    words = Words(ids={word: number for number, word in enumerate(config["vocab"])})
    return words, Bag(weights=weights, counted=bool(config.get("cumulative_term_frequency", True)))


def _read_words(path: Path) -> Words:
    config: dict[str, Any] = read_json_object(path)
    vocabulary, stop_words = config.get("vocab"), config.get("stop_words", [])
    for words in (vocabulary, stop_words):
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ModelLoadError(f"{path} must give vocab and stop_words as lists of words")
    assert isinstance(vocabulary, list)
    return Words(
        ids={word: number for number, word in enumerate(vocabulary)},
        stop_words=frozenset(stop_words),
        lower=bool(config.get("do_lower_case", False)),
    )
