"""Speedup of computing a reranker's shared prefix once: one query, 100 documents, with and without, alternating.

The model has the shape of Qwen3-0.6B reduced to a few layers, with random weights, and uses Qwen3-Reranker's template.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from record import record

from millpond import Engine
from millpond.engine.schedule import intake

QUERY = "what makes bread rise"
WORDS = "yeast eats sugar and gives off gas that stretches gluten while heat sets the crumb of the loaf".split()
# Qwen3-Reranker's prefix has about 60 tokens with its default instruction, and so has this one, with word tokens.
TEMPLATE = (
    "<|im_start|>system\n" + "judge whether the document meets the query " * 6 + "<|im_end|>\n"
    "<Query>: {{ messages[0].content }}\n<Document>: {{ messages[1].content }}<|im_end|>\n<|im_start|>assistant\n"
)


def write_model(folder: Path, layers: int) -> None:
    """Write a Qwen3 of ``layers`` layers with a score head and a word tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification

    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(["[UNK]", *WORDS, *TEMPLATE.split(), *QUERY.split()]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        num_labels=1,
    )
    Qwen3ForSequenceClassification(config).save_pretrained(folder)


def measure(engine: Engine, documents: list[str], rounds: int) -> dict[str, Any]:
    """Median seconds of both ways, measured alternately."""
    share = intake.shared_prefixes
    seconds: dict[str, list[float]] = {"once": [], "for each": []}
    for _ in range(rounds + 1):
        for name in seconds:
            intake.shared_prefixes = share if name == "once" else lambda items, tokenized: {}
            start = time.perf_counter()
            engine.rerank(QUERY, documents)
            seconds[name].append(time.perf_counter() - start)
    intake.shared_prefixes = share
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}  # the first round warms up
    return {"seconds": medians, "speedup": medians["for each"] / medians["once"]}


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one layer, one round, not recorded")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    layers, rounds = (1, 1) if options.smoke else (options.layers, options.rounds)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), layers)
        with Engine(folder, score_template=TEMPLATE, device="cpu") as engine:
            for words in (50, 150):
                chosen = random.Random(words)  # distinct: equal pairs are computed once
                documents = [" ".join(chosen.choices(WORDS, k=words)) for _ in range(100)]
                if options.smoke:
                    documents = documents[:8]
                results[f"100 documents of {words} tokens"] = measure(engine, documents, rounds)
    print(json.dumps(results, indent=2))
    if not options.smoke:
        record("prefix", results)


if __name__ == "__main__":
    main()
