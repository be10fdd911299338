"""Static embeddings: a vector for each token, and a text's is their mean; sentence-transformers' files and model2vec's.

There is no forward: the table takes the place of a backbone, and its rows that of the hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.checkpoints.layouts.sparse import StaticWeights
from millpond.checkpoints.layouts.words import Bag, Words, read_bag, read_word_embeddings
from millpond.checkpoints.resolve import read_json_object
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.checkpoints.tokenizers.read import read_tokenizer
from millpond.checkpoints.weights import find_tensor, stored_tensors
from millpond.errors import ModelLoadError, WeightMismatchError

# model2vec's limit where config.json gives none; sentence-transformers has none, and a limit is needed to cut by.
_MODEL2VEC_LENGTH, NO_LENGTH = 512, 1_000_000
_TABLES = ("embedding.weight", "emb_layer.weight", "embeddings")


@dataclass(frozen=True, kw_only=True)
class StaticTable:
    """How a table of token vectors reads its texts."""

    folder: Path  # of tokenizer.json and of the weights
    length: int  # most tokens of a text
    # model2vec's: texts are also cut to `length` times the median length of a token, and unknown tokens are left out
    model2vec: bool = False
    words: Words | None = None  # WhitespaceTokenizer's vocabulary, in the place of tokenizer.json
    bag: Bag | None = None  # the weights of these words, in the place of a file of them
    # WordEmbeddings': special tokens count like others, and are cut like them
    whole: bool = False


def is_model2vec(config: Mapping[str, Any]) -> bool:
    """Whether config.json is one that model2vec wrote."""
    return config.get("model_type") == "model2vec" or config.get("architectures") == ["StaticModel"]


def read_model2vec(folder: Path, config: Mapping[str, Any]) -> StaticTable:
    """The table of a folder that model2vec wrote."""
    path, length = folder / "config.json", config.get("max_length", _MODEL2VEC_LENGTH)
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
        raise ModelLoadError(f"{path}: max_length is {length!r}; it must be a positive int, or null for no limit")
    return StaticTable(folder=folder, length=length or NO_LENGTH, model2vec=True)


def read_static(folder: Path) -> StaticTable:
    """The table of sentence-transformers' StaticEmbedding, whose length is in tokenizer.json, if anywhere."""
    truncation = read_json_object(folder / "tokenizer.json").get("truncation") or {}
    return StaticTable(folder=folder, length=int(truncation.get("max_length") or NO_LENGTH))


def read_word_table(name: str, folder: Path) -> StaticTable:
    """The table of sentence-transformers' WordEmbeddings, or of a BoW, whose vectors are not stored."""
    if name == "BoW":
        words, bag = read_bag(folder)
        return StaticTable(folder=folder, length=NO_LENGTH, words=words, bag=bag)
    listed, length = read_word_embeddings(folder, NO_LENGTH)
    return StaticTable(folder=folder, length=length, words=listed, whole=listed is None)


def static_config(table: StaticTable, config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the sizes of the table under the names that a backbone has."""
    if table.bag is not None:
        count = len(table.bag.weights)
        return {"hidden_size": count, "vocab_size": count, "architectures": ["BoW"], "model_type": "static"}
    tensors = _tensors(table.folder)
    held = tensors.get("mapping", tensors["embeddings"])
    sizes = {"hidden_size": tensors["embeddings"].shape[1], "vocab_size": held.shape[0]}
    is_words = table.words is not None or table.whole
    name = "StaticModel" if table.model2vec else "WordEmbeddings" if is_words else "StaticEmbedding"
    return {**config, **sizes, "architectures": [name], "model_type": "static"}


def read_rows(table: StaticTable) -> npt.NDArray[np.float32]:
    """float32 ``[tokens, width]``: a row for each token, its weight multiplied in; a view of the file, if that has it.

    Of a BoW ``[words, 1]``, the weights alone.

    Raises:
        WeightMismatchError: The weights or the mapping of model2vec do not fit the table.
    """
    if table.bag is not None:
        return np.array(table.bag.weights, dtype=np.float32)[:, None]
    folder, tensors = table.folder, _tensors(table.folder)
    rows = tensors["embeddings"].float32()
    if "mapping" in tensors:
        mapping = tensors["mapping"].numbers().astype(np.int64)
        if mapping.size and not 0 <= mapping.min() <= mapping.max() < len(rows):
            raise WeightMismatchError(f"{folder}: mapping names row {mapping.max()} of a table of {len(rows)}")
        rows = rows[mapping]
    if "weights" in tensors:
        weights = tensors["weights"].float32()
        if weights.shape != (len(rows),):
            raise WeightMismatchError(f"{folder}: weights are {weights.shape}, and there are {len(rows)} tokens")
        rows = rows * weights[:, None]
    return rows


def weights_config(weights: StaticWeights) -> dict[str, Any]:
    """The sizes of a table of one weight a token, as those of a backbone."""
    rows = read_weights(weights)
    sizes = {"hidden_size": 1, "vocab_size": len(rows)}
    return {**sizes, "architectures": ["SparseStaticEmbedding"], "model_type": "static"}


def read_weights(weights: StaticWeights) -> npt.NDArray[np.float32]:
    """float32 ``[tokens, 1]``: the weight of each entry of the vocabulary."""
    if weights.idf is None:
        stored = stored_tensors(weights.folder, only=("weight",))
        if "weight" not in stored or len(stored["weight"].shape) != 1:
            raise WeightMismatchError(f"{weights.folder} has no tensor weight with a number for each token")
        return stored["weight"].float32()[:, None]
    backend = read_tokenizer(weights.folder).backend
    rows = np.zeros((backend.get_vocab_size(), 1), dtype=np.float32)
    for token, weight in read_json_object(weights.idf).items():
        number = backend.token_to_id(token)
        if number is not None:
            rows[number] = weight
    return rows


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a table, by model2vec's names."""
    stored = stored_tensors(folder)
    name = next((found for table in _TABLES if (found := find_tensor(stored, table))), None)
    if name is None or len(stored[name].shape) != 2:
        raise WeightMismatchError(f"{folder} has no table {' or '.join(_TABLES)}; it holds {', '.join(stored)[:200]}")
    tensors = {"embeddings": stored[name]}
    if not name.endswith("weight"):
        tensors.update((part, stored[part]) for part in ("mapping", "weights") if part in stored)
    return tensors
