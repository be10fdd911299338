"""What a GPU gives: texts in, float32 rows out, in tokens per second, beside the ways that users have.

    PYTHONPATH=src python benchmarks/gpu.py [--smoke] [--out FILE] [--rounds 5] [--tokens 2000000]

Needs torch, transformers and numpy; sentence-transformers and flash-attn take part where they are installed. The model
has BERT-base's shape and random weights, the tokenizer is made of the standard library's docstrings, and so are the
texts: nothing is downloaded. All engines are in this process and take turns; each batch size is searched for.
``--smoke`` runs a tiny shape on the CPU, in float32: it is there to see that everything runs and is equal.
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
from record import RESULTS, record

VOCABULARY = 30_522
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
BATCH_SIZES = (64, 128, 256, 512)
CHECKED = 256  # texts whose results are compared with float32

Arrays = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to compute something.

    Attributes:
        name: As the results have it.
        run: Inputs and batch size to arrays by name.
        searches: Whether it has a batch size.
    """

    name: str
    run: Callable[[Any, int], Arrays]
    searches: bool = True


def write_models(folder: Path, *, tiny: bool) -> tuple[Path, Path]:
    """An encoder and a cross-encoder of BERT-base's shape, or a tiny one."""
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = BertConfig(vocab_size=VOCABULARY, num_labels=1, **(small if tiny else {}))
    encoder, cross = folder / "encoder", folder / "cross-encoder"
    torch.manual_seed(0)
    for kind, path in ((BertModel, encoder), (BertForSequenceClassification, cross)):
        model = kind(config)
        with torch.no_grad():  # at transformers' own scale, texts and pairs would hardly differ
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
    found = texts.pieces(lengths, chance)
    read = [len(one.ids) for one in texts.tokenizer.encode_batch(found)]
    return Workload(name=name, texts=tuple(found), lengths=tuple(min(length, 512) for length in read))


def padded(model: Path, kind: str, dtype: torch.dtype, device: str) -> Callable[[Any, int], Arrays]:
    """transformers by hand: sorted by length, padded; the mean of the states, or a score for each pair."""
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    loader = AutoModel if kind == "embed" else AutoModelForSequenceClassification
    backbone = loader.from_pretrained(model, dtype=dtype).eval().to(device)

    def given(texts: Sequence[str], pairs: Sequence[str] | None) -> Any:
        options = {"padding": True, "truncation": True, "max_length": 512, "return_tensors": "pt"}
        found = tokenizer(list(texts), None if pairs is None else list(pairs), **options)
        return found.to(device, non_blocking=True)

    def in_batches(texts: Sequence[str], batch: int, work: Callable[[Sequence[int]], torch.Tensor]) -> Any:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        rows = [work(order[start : start + batch]) for start in range(0, len(order), batch)]
        found = torch.cat(rows).float().cpu().numpy()
        back = np.empty_like(found)
        back[order] = found
        return back

    @torch.inference_mode()
    def embed(texts: Sequence[str], batch: int) -> Arrays:
        def work(chosen: Sequence[int]) -> torch.Tensor:
            inputs = given([texts[i] for i in chosen], None)
            mask = inputs["attention_mask"].unsqueeze(-1)
            states = backbone(**inputs).last_hidden_state
            mean = (states * mask).sum(1, dtype=torch.float32) / mask.sum(1)
            return torch.nn.functional.normalize(mean, dim=-1)

        return {"vectors": in_batches(texts, batch, work)}

    @torch.inference_mode()
    def rerank(pair: dict[str, Any], batch: int) -> Arrays:
        documents = pair["documents"]

        def work(chosen: Sequence[int]) -> torch.Tensor:
            inputs = given([pair["query"]] * len(chosen), [documents[i] for i in chosen])
            return backbone(**inputs).logits.float().sigmoid()[:, 0]

        return {"scores": in_batches(documents, batch, work)}

    return embed if kind == "embed" else rerank


def millpond(model: Path, kind: str, device: str) -> Callable[[Any, int], Arrays]:
    """`Engine`, default settings but for the pooling, which the bare checkpoint does not say."""
    from millpond import Engine

    dtype = "auto" if device != "cpu" else "float32"
    if kind == "embed":
        encoder = Engine(model, device=device, dtype=dtype, pooling="mean", normalize=True)
        return lambda texts, batch: {"vectors": encoder.embed(texts).embeddings}
    scorer = Engine(model, device=device, dtype=dtype)
    return lambda pair, batch: {"scores": scorer.score(pair["query"], pair["documents"]).scores}


def others(model: Path, kind: str, device: str) -> list[Way]:
    """sentence-transformers, in half precision, padded and (encoders only) without padding."""
    if importlib.util.find_spec("sentence_transformers") is None:
        print("sentence-transformers is not installed: it does not take part")
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
            found = encoder.encode(list(texts), batch_size=batch, normalize_embeddings=True, show_progress_bar=False)
            return {"vectors": found.astype(np.float32)}

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


def compare(ways: Sequence[Way], given: Any, few: Any, reference: Arrays, *, rounds: int, sizes: Sequence[int]) -> Any:
    """Batch sizes, equality on ``few``, then times of ``given`` in turns; rows by name."""
    rows: dict[str, Any] = {}
    chosen: dict[str, int] = {}
    for way in ways:
        verdict = judge(way.run(few, sizes[0]), reference, "half")
        rows[way.name] = {"equal": verdict.equal, **verdict.figures}
        way.run(given, sizes[0])  # warms it up
        tried = {size: clocked(way, given, size) for size in sizes} if way.searches and len(sizes) > 1 else {}
        chosen[way.name] = min(tried, key=lambda size: tried[size]) if tried else sizes[0]
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for number in range(rounds):
        for way in [*ways[number % len(ways) :], *ways[: number % len(ways)]]:
            times[way.name].append(clocked(way, given, chosen[way.name]))
    for way in ways:
        if rows[way.name]["equal"]:  # a time of something else is none
            rows[way.name] |= {
                "batch": chosen[way.name] if way.searches else None,
                "median_seconds": statistics.median(times[way.name]),
                "seconds": times[way.name],
            }
    return rows


def clocked(way: Way, given: Any, size: int) -> float:
    """Seconds of one pass. Results are numpy arrays on the host, so that nothing is left to wait for."""
    begin = time.perf_counter()
    way.run(given, size)
    return time.perf_counter() - begin


def measure(folder: Path, device: str, *, smoke: bool, tokens: int, rounds: int) -> dict[str, Any]:
    """Every figure."""
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
    """The rows of a workload's results; of anything else, none."""
    return load["rows"] if isinstance(load, dict) else {}


def report(name: str, rows: dict[str, Any], key: str) -> None:
    """Print one table."""
    print(f"{name}: {key}")
    for way, row in rows.items():
        print(f"  {way:40} {row.get(key, 'not equal'):>14} {row}")


def main() -> int:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU, to see that it runs")
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
        print(record(options.out.stem, results, folder=options.out.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
