"""Throughput on a GPU, from texts to float32 rows, in tokens per second, compared with other ways to compute them.

    PYTHONPATH=src python benchmarks/gpu.py [--smoke] [--out FILE] [--rounds 5] [--tokens 2000000]

Needs torch, transformers and numpy; sentence-transformers and flash-attn take part if they are installed. The model has
BERT-base's shape and random weights. The tokenizer is trained on the standard library's docstrings, which are also the
texts, so nothing is downloaded. All engines run in this process and take turns, each with its best batch size.
``--smoke`` runs a tiny shape on the CPU in float32, to check that everything runs and gives equal results.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.equality import judge
from peers.texts import Texts, Workload, docstrings
from record import RESULTS, record_file

VOCABULARY = 30_522
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
BATCH_SIZES = (64, 128, 256, 512)
CHECKED = 256  # number of texts whose results are compared with float32

Arrays = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to compute vectors or scores.

    Attributes:
        name: Its name in the results.
        run: Takes inputs and a batch size, returns arrays by name.
        searches: Whether it takes a batch size, so that the best one is searched for.
    """

    name: str
    run: Callable[[Any, int], Arrays]
    searches: bool = True


def write_models(folder: Path, *, tiny: bool) -> tuple[Path, Path]:
    """Write an encoder and a cross-encoder of BERT-base's shape, or tiny ones."""
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = BertConfig(vocab_size=VOCABULARY, num_labels=1, **(small if tiny else {}))
    encoder, cross = folder / "encoder", folder / "cross-encoder"
    torch.manual_seed(0)
    for kind, path in ((BertModel, encoder), (BertForSequenceClassification, cross)):
        model = kind(config)
        with torch.no_grad():  # with transformers' initial scale, texts and pairs would hardly differ
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=1.5 / config.hidden_size**0.5)
        model.save_pretrained(path)
    for path in (encoder, cross):
        write_tokenizer(path)
    return encoder, cross


def write_tokenizer(folder: Path) -> None:
    """A WordPiece tokenizer of the docstrings' words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL.values()), show_progress=False
    )
    tokenizer.train_from_iterator(docstrings(), trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **SPECIAL).save_pretrained(folder)


def workload(texts: Texts, name: str, count: int) -> Workload:
    """Texts of 50 tokens, of 512, or of 10 to 500."""
    chance = random.Random(name)
    lengths = [chance.randint(10, 500) if name == "mixed" else int(name) for _ in range(count)]
    pieces = texts.pieces(lengths, chance)
    tokens = [len(encoding.ids) for encoding in texts.tokenizer.encode_batch(pieces)]
    return Workload(name=name, texts=tuple(pieces), lengths=tuple(min(count, 512) for count in tokens))


def padded(model: Path, kind: str, dtype: torch.dtype, device: str) -> Callable[[Any, int], Arrays]:
    """transformers' classes: texts sorted by length and padded; the mean of the states, or a score for each pair."""
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    loader = AutoModel if kind == "embed" else AutoModelForSequenceClassification
    backbone = loader.from_pretrained(model, dtype=dtype).eval().to(device)

    def tokenized(texts: Sequence[str], pairs: Sequence[str] | None) -> Any:
        options = {"padding": True, "truncation": True, "max_length": 512, "return_tensors": "pt"}
        inputs = tokenizer(list(texts), None if pairs is None else list(pairs), **options)
        return inputs.to(device, non_blocking=True)

    def in_batches(texts: Sequence[str], batch: int, work: Callable[[Sequence[int]], torch.Tensor]) -> Any:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        rows = [work(order[start : start + batch]) for start in range(0, len(order), batch)]
        results = torch.cat(rows).float().cpu().numpy()
        in_order = np.empty_like(results)
        in_order[order] = results
        return in_order

    @torch.inference_mode()
    def embed(texts: Sequence[str], batch: int) -> Arrays:
        def work(chosen: Sequence[int]) -> torch.Tensor:
            inputs = tokenized([texts[i] for i in chosen], None)
            mask = inputs["attention_mask"].unsqueeze(-1)
            states = backbone(**inputs).last_hidden_state
            mean = (states * mask).sum(1, dtype=torch.float32) / mask.sum(1)
            return torch.nn.functional.normalize(mean, dim=-1)

        return {"vectors": in_batches(texts, batch, work)}

    @torch.inference_mode()
    def rerank(pair: dict[str, Any], batch: int) -> Arrays:
        documents = pair["documents"]

        def work(chosen: Sequence[int]) -> torch.Tensor:
            inputs = tokenized([pair["query"]] * len(chosen), [documents[i] for i in chosen])
            return backbone(**inputs).logits.float().sigmoid()[:, 0]

        return {"scores": in_batches(documents, batch, work)}

    return embed if kind == "embed" else rerank


def millpond(model: Path, kind: str, device: str) -> Callable[[Any, int], Arrays]:
    """`Engine` with default settings, except for the pooling, which the bare checkpoint does not name."""
    from millpond import Engine

    dtype = "auto" if device != "cpu" else "float32"
    if kind == "embed":
        encoder = Engine(model, device=device, dtype=dtype, pooling="mean", normalize=True)
        return lambda texts, batch: {"vectors": encoder.embed(texts).embeddings}
    scorer = Engine(model, device=device, dtype=dtype)
    return lambda pair, batch: {"scores": scorer.score(pair["query"], pair["documents"]).scores}


def others(model: Path, kind: str, device: str) -> list[Way]:
    """sentence-transformers in half precision, padded and (encoders only) without padding."""
    if importlib.util.find_spec("sentence_transformers") is None:
        print("sentence-transformers is not installed and does not take part")
        return []
    from sentence_transformers import CrossEncoder, SentenceTransformer

    half = {"torch_dtype": torch.float16 if device != "cpu" else torch.float32}
    if kind == "rerank":
        cross = CrossEncoder(str(model), device=device, model_kwargs=half)

        def rerank(pair: dict[str, Any], batch: int) -> Arrays:
            pairs = [(pair["query"], document) for document in pair["documents"]]
            return {"scores": cross.predict(pairs, batch_size=batch, show_progress_bar=False)}

        return [Way(name="sentence-transformers", run=rerank)]

    def embedding(encoder: Any) -> Callable[[Any, int], Arrays]:
        def embed(texts: Sequence[str], batch: int) -> Arrays:
            vectors = encoder.encode(list(texts), batch_size=batch, normalize_embeddings=True, show_progress_bar=False)
            return {"vectors": vectors.astype(np.float32)}

        return embed

    plain = SentenceTransformer(str(model), device=device, model_kwargs=half)
    plain.max_seq_length = 512
    ways = [Way(name="sentence-transformers", run=embedding(plain))]
    if device != "cpu" and importlib.util.find_spec("flash_attn") is not None:
        flash = SentenceTransformer(
            str(model), device=device, model_kwargs={**half, "attn_implementation": "flash_attention_2"}
        )
        flash.max_seq_length = 512
        ways.append(Way(name="sentence-transformers, FlashAttention", run=embedding(flash)))
    return ways


def compare(ways: Sequence[Way], inputs: Any, few: Any, reference: Arrays, *, rounds: int, sizes: Sequence[int]) -> Any:
    """Compare results for ``few``, search batch sizes, then time ``inputs`` in turns; returns rows by name."""
    rows: dict[str, Any] = {}
    chosen: dict[str, int] = {}
    for way in ways:
        verdict = judge(way.run(few, sizes[0]), reference, "half")
        rows[way.name] = {"equal": verdict.equal, **verdict.figures}
        way.run(inputs, sizes[0])  # warm-up
        tried = {size: seconds_of(way, inputs, size) for size in sizes} if way.searches and len(sizes) > 1 else {}
        chosen[way.name] = min(tried, key=lambda size: tried[size]) if tried else sizes[0]
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for number in range(rounds):
        for way in [*ways[number % len(ways) :], *ways[: number % len(ways)]]:
            times[way.name].append(seconds_of(way, inputs, chosen[way.name]))
    for way in ways:
        if rows[way.name]["equal"]:  # else the time means nothing
            rows[way.name] |= {
                "batch": chosen[way.name] if way.searches else None,
                "median_seconds": statistics.median(times[way.name]),
                "seconds": times[way.name],
            }
    return rows


def seconds_of(way: Way, inputs: Any, size: int) -> float:
    """Seconds of one pass. Results are numpy arrays on the host, so no work is pending afterwards."""
    begin = time.perf_counter()
    way.run(inputs, size)
    return time.perf_counter() - begin


def measure(folder: Path, device: str, *, smoke: bool, tokens: int, rounds: int) -> dict[str, Any]:
    """Measure everything."""
    half = torch.float16 if device != "cpu" else torch.float32
    sizes = BATCH_SIZES if not smoke else (8,)
    encoder, cross = write_models(folder, tiny=smoke)
    texts = Texts(encoder / "tokenizer.json", data=None)
    results: dict[str, Any] = {"shape": "tiny" if smoke else "BERT-base, random weights", "device": device}
    ways = [
        Way(name="millpond", run=millpond(encoder, "embed", device), searches=False),
        Way(name="transformers, padded", run=padded(encoder, "embed", half, device)),
        *others(encoder, "embed", device),
    ]
    exact = padded(encoder, "embed", torch.float32, device)
    for name, mean in (("50", 50), ("512", 512), ("mixed", 255)):
        load = workload(texts, name, max(tokens // mean, 4))
        few = load.texts[:CHECKED]
        rows = compare(ways, load.texts, few, exact(few, 32), rounds=rounds, sizes=sizes)
        for row in rows.values():
            if row["equal"]:
                row["tokens_per_second"] = round(load.tokens / row["median_seconds"])
        results[name] = {"texts": len(load.texts), "tokens": load.tokens, "rows": rows}
        report(name, rows, "tokens_per_second")
    ways = [
        Way(name="millpond", run=millpond(cross, "rerank", device), searches=False),
        Way(name="transformers, padded", run=padded(cross, "rerank", half, device)),
        *others(cross, "rerank", device),
    ]
    load = workload(texts, "mixed", 8 if smoke else 100)
    pair = {"query": docstrings()[0][:60], "documents": list(load.texts)}
    reference = padded(cross, "rerank", torch.float32, device)(pair, 32)
    fitting = tuple(size for size in sizes if size <= 128)
    rows = compare(ways, pair, pair, reference, rounds=4 * rounds, sizes=fitting)
    results["rerank"] = {"documents": len(load.texts), "tokens": load.tokens, "rows": rows}
    report("rerank", rows, "median_seconds")
    return results


def rows_in(load: Any) -> dict[str, Any]:
    """The rows of a workload's results; empty for other entries."""
    return load["rows"] if isinstance(load, dict) else {}


def report(name: str, rows: dict[str, Any], key: str) -> None:
    """Print one table."""
    print(f"{name}: {key}")
    for way, row in rows.items():
        print(f"  {way:40} {row.get(key, 'not equal'):>14} {row}")


def main() -> int:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU, to check that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2_000_000, help="in one pass")
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured (--smoke runs a tiny shape on the CPU)", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        device, tokens, rounds = ("cpu", 2_000, 1) if options.smoke else ("cuda", options.tokens, options.rounds)
        results = measure(Path(folder), device, smoke=options.smoke, tokens=tokens, rounds=rounds)
    unequal = sorted({way for load in results.values() for way, row in rows_in(load).items() if not row["equal"]})
    if options.smoke and unequal:
        print(f"not equal: {', '.join(unequal)}", file=sys.stderr)
        return 1
    if not options.smoke:
        print(record_file(options.out, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
