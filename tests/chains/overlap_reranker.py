"""A tiny cross-encoder, trained in seconds to score a document by how many words of the query it holds.

Two layers of 64 columns with random word vectors. It begins with attention from which counting common words is quickly
learned: in the first layer equal tokens attend to each other, in the second [CLS] to the tokens of the query. What to
make of that is trained, on other documents than those it is tested on.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

TOKENS = 64
_COLUMNS, _SEGMENT = 64, 63  # the last column is that of the segment
_WORD = re.compile(r"[a-z]{4,}")
_STEPS, _QUERIES, _DOCUMENTS = 80, 20, 4


def words_of(text: str) -> list[str]:
    """The different words at the beginning of a text, which the model reads."""
    return list(dict.fromkeys(_WORD.findall(" ".join(text.split()[:32]).lower())))


def write_reranker(folder: Path, texts: Sequence[str], *, tokenizer_of: str, steps: int = _STEPS) -> str:
    """Train on ``texts`` with a fixed seed, and write a checkpoint as those of cross-encoders on the hub."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    tokenizer.model_max_length = TOKENS
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _untrained(len(tokenizer))
        _train(model, tokenizer, texts, steps)
    model.config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity"}
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _untrained(vocabulary: int) -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=_COLUMNS,
        num_hidden_layers=2,
        num_attention_heads=1,
        intermediate_size=64,
        max_position_embeddings=TOKENS,
        num_labels=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
    )
    model = BertForSequenceClassification(config)
    equal_tokens, one_segment = torch.eye(_COLUMNS), torch.zeros(_COLUMNS, _COLUMNS)
    equal_tokens[_SEGMENT, _SEGMENT] = 0
    one_segment[0, _SEGMENT] = 3
    with torch.no_grad():
        embeddings = model.bert.embeddings
        embeddings.word_embeddings.weight.normal_()
        embeddings.word_embeddings.weight[:, _SEGMENT] = 0
        embeddings.position_embeddings.weight.zero_()
        embeddings.token_type_embeddings.weight.zero_()
        embeddings.token_type_embeddings.weight[:, _SEGMENT] = torch.tensor([-2.0, 2.0])
        for layer, weight in zip(model.bert.encoder.layer, (equal_tokens, one_segment), strict=True):
            attention: Any = layer.attention
            for linear in (attention.self.query, attention.self.key):
                linear.weight.copy_(weight)
            for linear in (attention.self.value, attention.output.dense):
                linear.weight.copy_(torch.eye(_COLUMNS))
    embeddings.word_embeddings.weight.requires_grad_(False)
    return model


def _train(model: BertForSequenceClassification, tokenizer: Any, texts: Sequence[str], steps: int) -> None:
    """Each step: queries of three words of a document, and which of four documents they are of."""
    choose = random.Random(0)
    words = [words_of(text) for text in texts]
    long_enough = [index for index, found in enumerate(words) if len(found) >= 3]
    having = defaultdict(list)  # the documents of each word
    for index in long_enough:
        for word in words[index]:
            having[word].append(index)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    first = torch.zeros(_QUERIES, dtype=torch.long)
    model.train()
    for _ in range(steps):
        pairs = []
        for _ in range(_QUERIES):
            index = choose.choice(long_enough)
            query = choose.sample(words[index], 3)
            two = [other for other in having[query[0]] if query[1] in words[other] and other != index]
            others = [choose.choice(two or long_enough), choose.choice(having[query[2]]), choose.choice(long_enough)]
            pairs += [(" ".join(query), texts[document]) for document in (index, *others)]
        queries, documents = zip(*pairs, strict=True)
        inputs = tokenizer(
            list(queries),
            list(documents),
            truncation="only_second",
            max_length=TOKENS,
            padding=True,
            return_tensors="pt",
        )
        scores = model(**inputs).logits.view(_QUERIES, _DOCUMENTS)
        loss = torch.nn.functional.cross_entropy(scores, first)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
