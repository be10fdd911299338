"""Classifier heads compared with transformers' classes, one text at a time.

A decoder is scored at a text's last token, whatever it is, as vLLM has it. transformers looks for the last token that
is no padding, which is another one where the padding token also ends the text:
:func:`test_a_text_that_ends_with_the_padding_token` is that case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.pairwise import pairwise
from tests.parity.head_oracles import classifier
from tests.tiny import FAMILIES, MAX_TOKENS, TEXTS, write_checkpoint
from tests.tiny.families import some

from millpond import Engine, PoolingParams, TokenIds

TOLERANCE = 1e-5  # relative to the largest logit
VISIBLE = 1e-3  # a mistake must change the logits by more than this
ONE_TOKEN = TokenIds((7,))
ITEMS = (*TEXTS, ONE_TOKEN)

SEQUENCE = (
    *("bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert", "electra", "albert", "deberta-v2"),
    *(
        "camembert",
        "ernie",
        "data2vec",
        "megatron",
        "xlm-roberta-xl",
        "roformer",
        "rembert",
        "mmbert",
        "deberta",
        "big-bird",
    ),
    *("eurobert", "ultrabert", "nomic", "gte", "gte-en", "gte-snowflake", "jina"),
    *("gpt2", "llama", "mistral", "mistral-sliding", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "jamba", "qwen3.5"),
)
# transformers has no class of the first three; Longformer's classifiers of texts are refused
TOKEN = (*(family for family in SEQUENCE if family not in ("gemma3", "jamba", "qwen3.5")), "longformer")
DECODERS = tuple(family for family in SEQUENCE if FAMILIES[family].head in ("ForCausalLM", "LMHeadModel"))
PLAIN_JINA = {"lora_adaptations": None, "matryoshka_dimensions": None}  # no adapters beside a head

Written = Callable[..., Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The folder of a family's checkpoint with a head."""
    root = tmp_path_factory.mktemp("headed")

    def folder(family: str, kind: str, *, labels: int = 3, **config: Any) -> Path:
        place = root / "-".join(map(str, (family, kind, labels, *config.values())))
        config = {**(PLAIN_JINA if family == "jina" else {}), **config}
        return place if place.exists() else write_checkpoint(place, family, head=kind, labels=labels, config=config)

    return folder


@pytest.fixture(scope="module")
def engine_of() -> Iterator[Callable[..., Engine]]:
    engines: dict[tuple[Any, ...], Engine] = {}

    def engine(folder: Path, **options: Any) -> Engine:
        key = (folder, *sorted(options.items()))
        if key not in engines:
            engines[key] = Engine(folder, dtype="float32", device="cpu", **options)
        return engines[key]

    yield engine
    for made in engines.values():
        made.close()


def ids_of(folder: Path, items: Sequence[Any]) -> list[torch.Tensor]:
    """Token ids by transformers' tokenizer, cut at the end."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)

    def ids(item: Any) -> Sequence[int]:
        return (
            item.ids
            if isinstance(item, TokenIds)
            else tokenizer(item, truncation=True, max_length=MAX_TOKENS).input_ids
        )

    return [torch.tensor(ids(item)) for item in items]


def expected_of(folder: Path, items: Sequence[Any] = ITEMS, **overrides: Any) -> list[np.ndarray]:
    reference = classifier(folder, **overrides)
    return [reference(ids).numpy() for ids in ids_of(folder, items)]


def logits(engine: Engine, task: str, items: Sequence[Any] = ITEMS) -> list[np.ndarray]:
    return list(engine.encode(items, task=task, params=PoolingParams(activation=False)).probs)


def difference(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The largest difference, relative to the largest logit."""
    assert [rows.shape for rows in actual] == [rows.shape for rows in expected]
    scale = max(float(np.abs(rows).max()) for rows in expected)
    return max(float(np.abs(a - b).max()) for a, b in zip(actual, expected, strict=True)) / scale


@pytest.mark.parametrize("family", some(SEQUENCE))
def test_a_text_s_classes(family, written, engine_of, record_property):
    folder = written(family, "SequenceClassification")
    expected, engine = expected_of(folder), engine_of(folder)
    lengths = [len(ids) for ids in ids_of(folder, ITEMS)]
    assert min(lengths) == 1
    assert lengths.count(MAX_TOKENS) >= 2
    actual = logits(engine, "classify")
    worst = difference(actual, expected)
    record_property("error", worst)
    assert worst <= TOLERANCE
    alone = [logits(engine, "classify", [item])[0] for item in ITEMS]
    assert difference(actual, alone) <= TOLERANCE
    assert engine.spec.labels == ("level_0", "level_1", "level_2")
    assert engine.tasks == {"classify", "token_classify"}


@pytest.mark.parametrize("family", some(SEQUENCE))
def test_notices_another_row(family, written, engine_of):
    """The same head with another pooling of the same states."""
    folder = written(family, "SequenceClassification")
    other = "cls" if family in (*DECODERS, "modernbert", "eurobert") else "lasttoken"
    assert difference(logits(engine_of(folder, pooling=other), "classify"), expected_of(folder)) > VISIBLE


@pytest.mark.parametrize("family", some(TOKEN))
def test_each_token_s_classes(family, written, engine_of, record_property):
    folder = written(family, "TokenClassification")
    expected, engine = expected_of(folder), engine_of(folder)
    actual = logits(engine, "token_classify")
    worst = difference(actual, expected)
    record_property("error", worst)
    assert worst <= TOLERANCE
    alone = [logits(engine, "token_classify", [item])[0] for item in ITEMS]
    assert difference(actual, alone) <= TOLERANCE
    assert engine.spec.labels == ("level_0", "level_1", "level_2")
    assert engine.tasks == {"token_classify"}


@pytest.mark.parametrize(
    ("family", "field", "kind"),
    [
        ("modernbert", "classifier_pooling", "cls"),
        ("modernbert", "classifier_pooling", "mean"),
        ("eurobert", "classifier_pooling", "bos"),
        ("eurobert", "classifier_pooling", "mean"),
        ("eurobert", "classifier_pooling", "late"),
        ("eurobert", "clf_pooling", "bos"),  # the key of the family's own code
        ("eurobert", "clf_pooling", "mean"),
    ],
)
def test_families_that_name_their_pooling(family, field, kind, written, engine_of):
    folder = written(family, "SequenceClassification", **{field: kind})
    actual = logits(engine_of(folder), "classify")
    assert difference(actual, expected_of(folder, classifier_pooling=kind)) <= TOLERANCE
    for other in {"modernbert": ("cls", "mean"), "eurobert": ("bos", "mean", "late")}[family]:
        if other != kind:
            assert difference(actual, expected_of(folder, classifier_pooling=other)) > VISIBLE


@pytest.mark.parametrize(
    ("family", "fields", "other"),
    [
        ("modernbert", {"classifier_activation": "silu"}, {"classifier_activation": "gelu"}),
        ("modernbert", {"norm_eps": 0.1}, {"norm_eps": 1e-5}),
        ("modernbert", {"classifier_bias": True}, None),
        ("deberta-v2", {"pooler_hidden_act": "silu"}, {"pooler_hidden_act": "gelu"}),
    ],
)
def test_heads_that_the_config_changes(family, fields, other, written, engine_of):
    folder = written(family, "SequenceClassification", **fields)
    actual = logits(engine_of(folder), "classify")
    assert difference(actual, expected_of(folder)) <= TOLERANCE
    if other is not None:
        assert difference(actual, expected_of(folder, **other)) > VISIBLE


@pairwise(
    family=["bert", "modernbert", "roberta", "qwen3"],
    labels=[1, 2],
    kind=["SequenceClassification", "TokenClassification"],
)
def test_other_numbers_of_labels(family, labels, kind, written, engine_of):
    folder = written(family, kind, labels=labels)
    engine = engine_of(folder)
    task = "classify" if kind == "SequenceClassification" else "token_classify"
    assert difference(logits(engine, task), expected_of(folder)) <= TOLERANCE
    assert engine.spec.labels == tuple(f"level_{i}" for i in range(labels))
    one = {"score", "reward"} if labels == 1 and task == "classify" else set()
    assert engine.tasks == {task, "token_classify"} | one


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_sequence_head_on_every_token(family, written, engine_of):
    """As in vLLM: the head is applied to each row, and one of the results is the text's logits."""
    engine = engine_of(written(family, "SequenceClassification"))
    rows = logits(engine, "token_classify")
    place = -1 if family == "llama" else 0
    assert difference([matrix[place] for matrix in rows], logits(engine, "classify")) <= TOLERANCE


def test_a_text_that_ends_with_the_padding_token(written, engine_of):
    """Qwen's tokenizer ends every text with the padding token; here, as in vLLM, that token's row is scored."""
    folder = written("qwen3", "SequenceClassification")
    actual = logits(engine_of(folder), "classify")
    assert all(ids[-1] == 0 for ids in ids_of(folder, TEXTS))
    assert difference(actual, expected_of(folder, pad_token_id=None)) <= TOLERANCE
    # With pad_token_id, transformers scores the token before it.
    assert difference(actual, expected_of(folder, pad_token_id=0)) > VISIBLE
    before = [TokenIds(tuple(ids[:-1].tolist())) for ids in ids_of(folder, TEXTS)]
    theirs = expected_of(folder, TEXTS, pad_token_id=0)
    assert difference(logits(engine_of(folder), "classify", before), theirs) <= TOLERANCE
