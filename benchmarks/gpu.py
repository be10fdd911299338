"""Throughput on a GPU in tokens per second, from texts to float32 rows, beside sentence-transformers in float16.

    PYTHONPATH=src python benchmarks/gpu.py [--smoke] [--out FILE] [--only embed,profile,rerank,maxsim,callers,ingest]
        [--shapes minilm,bert-base,bge-m3,modernbert-base,qwen3-0.6b] [--lengths 11,50,177,512,mixed]
        [--rounds 3] [--tokens 1000000] [--without-peers]

Needs torch, transformers and numpy; sentence-transformers takes part if it is installed. The shapes are those of known
models, with random weights and a tokenizer trained on the standard library's docstrings, which are also the texts, so
nothing is downloaded. All engines run in this process and take turns; sentence-transformers has its best batch size,
and reads an eighth of the texts. A time counts only if the results equal float32. The two rates of the device are
measured in the same run: a large copy, and a large product in bfloat16; what a shape reaches is a share of the latter.
The file is written after each part, so a run that is stopped keeps what it has measured.
``--smoke`` runs tiny shapes on the CPU in float32, to check that everything runs and gives equal results.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import gpu_profile
from peers.equality import judge
from peers.gpu_models import LIMIT, SHAPES, write_model, write_tokenizer
from peers.texts import Texts, Workload, docstrings
from record import RESULTS, record_file

LENGTHS = ("11", "50", "177", "512", "mixed")
PARTS = ("embed", "profile", "rerank", "maxsim", "callers", "ingest")
BATCH_SIZES = (64, 256)
LARGE = ("bge-m3", "modernbert-base", "qwen3-0.6b")  # they read two fifths of the texts
PEER_SHARE = 8  # a peer reads this part of the texts
CHECKED = 128  # number of texts whose results are compared with float32
CALLERS = 64
PEER = "sentence-transformers, float16, SDPA"

Arrays = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to compute vectors or scores.

    Attributes:
        name: Its name in the results.
        run: Takes inputs and a batch size, returns arrays by name.
        peer: Whether it takes a batch size, so that the best one is searched for, and reads fewer texts.
    """

    name: str
    run: Callable[[Any, int], Arrays]
    peer: bool = False


class Benchmark:
    """The parts of the benchmark, over models that are written when they are first used."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self.options = options
        self.device = "cpu" if options.smoke else "cuda"
        self.dtype = "float32" if options.smoke else "auto"
        self.results: dict[str, Any] = {"device": self.device, "rates": {} if options.smoke else device_rates()}
        write_tokenizer(folder / "tokenizer")
        self.texts = Texts(folder / "tokenizer" / "tokenizer.json", data=None)
        self._workloads: dict[str, Workload] = {}
        self._models: dict[str, tuple[Path, int]] = {}

    def keep(self) -> None:
        """Write what is measured so far."""
        if not self.options.smoke:
            record_file(self.options.out, self.results)

    def model(self, name: str) -> tuple[Path, int]:
        """The checkpoint of a shape, and its parameters outside embedding tables."""
        if name not in self._models:
            folder, tokenizer = self.folder / name, self.folder / "tokenizer"
            parameters = write_model(folder, name, tokenizer, device=self.device, tiny=bool(self.options.smoke))
            self._models[name] = folder, parameters
        return self._models[name]

    def workload(self, name: str, shape: str = "") -> Workload:
        """Texts of 11, 50, 177 or 512 tokens, or of 10 to 500; fewer for large shapes."""
        if shape in LARGE:
            whole = self.workload(name)
            return whole.head(max(4, 2 * len(whole.texts) // 5))
        if name not in self._workloads:
            chance = random.Random(name)
            count = max(self.options.tokens // (255 if name == "mixed" else int(name)), 4)
            lengths = [chance.randint(10, 500) if name == "mixed" else int(name) for _ in range(count)]
            pieces = self.texts.pieces(lengths, chance)
            tokens = [len(encoding.ids) for encoding in self.texts.tokenizer.encode_batch_fast(pieces)]
            counted = tuple(min(number, LIMIT) for number in tokens)
            self._workloads[name] = Workload(name=name, texts=tuple(pieces), lengths=counted)
        return self._workloads[name]

    def embed(self) -> None:
        """Tokens per second of each shape at each length."""
        table = self.results.setdefault("embed", {})
        for shape in self.options.shapes:
            folder, parameters = self.model(shape)
            peer, exact = (None, None) if self.options.without_peers else embedders(folder, self.device)
            with self.engine(folder) as engine:
                for length in self.options.lengths:
                    load = self.workload(length, shape)
                    ways = [Way(name="millpond", run=lambda texts, batch: {"vectors": engine.embed(texts).embeddings})]
                    if peer is not None:
                        ways.append(Way(name=PEER, run=peer, peer=True))
                    checked = load.head(CHECKED).texts
                    reference = None if exact is None else exact(checked, 32)
                    rows = compare(ways, load, checked, reference, rounds=self.options.rounds, sizes=self.sizes)
                    for row in rows.values():
                        flops = 2 * parameters * row.get("tokens_per_second", 0)
                        row["tera_flops_of_products"] = round(flops / 1e12, 1)
                        if "product_tera_flops" in self.results["rates"]:
                            row["share_of_product_rate"] = round(
                                flops / 1e12 / self.results["rates"]["product_tera_flops"], 3
                            )
                    table.setdefault(shape, {})[length] = {
                        "texts": len(load.texts),
                        "tokens": load.tokens,
                        "parameters": parameters,
                        "rows": rows,
                    }
                    report(f"{shape}, {length}", rows)
                    self.keep()

    def callers(self) -> None:
        """Many threads that embed single texts, beside one caller of all of them."""
        folder, _ = self.model("bert-base")
        table = self.results.setdefault("callers", {})
        with self.engine(folder) as engine:
            for length in ("11", "50"):
                load = self.workload(length).head(40 if self.options.smoke else 20_000)
                seconds: dict[str, list[float]] = {"one caller": [], f"{CALLERS} threads": []}
                for _ in range(self.options.rounds + 1):
                    begin = time.perf_counter()
                    engine.embed(load.texts)
                    seconds["one caller"].append(time.perf_counter() - begin)
                    with ThreadPoolExecutor(CALLERS) as threads:
                        begin = time.perf_counter()
                        list(threads.map(lambda text: engine.embed([text]), load.texts))
                        seconds[f"{CALLERS} threads"].append(time.perf_counter() - begin)
                rates = {name: round(load.tokens / statistics.median(each[1:])) for name, each in seconds.items()}
                table[length] = {"tokens_per_second": rates}
                print(f"callers, {length}: {rates}", flush=True)
                self.keep()

    def rerank(self) -> None:
        """100 passages of mixed length for a query, and 100 of about 177 tokens."""
        folder, _ = self.model("cross-encoder")
        table = self.results.setdefault("rerank", {})
        scorer, exact = (None, None) if self.options.without_peers else cross_encoders(folder, self.device)
        query = docstrings()[0][:60]
        with self.engine(folder) as engine:
            for length in ("177", "mixed"):
                load = self.workload(length).head(8 if self.options.smoke else 100)
                ways = [Way(name="millpond", run=lambda texts, batch: {"scores": engine.score(query, texts).scores})]
                reference = None
                if scorer is not None and exact is not None:
                    ways.append(Way(name=PEER, run=lambda texts, batch: scorer(query, texts, batch), peer=True))
                    reference = exact(query, load.texts, 32)
                sizes = tuple(size for size in (32, 64, 128) if not self.options.smoke or size == 32)
                rounds = 5 * self.options.rounds
                rows = compare(ways, load, load.texts, reference, rounds=rounds, sizes=sizes, share=1)
                table[length] = {"documents": len(load.texts), "tokens": load.tokens, "rows": rows}
                report(f"rerank, {length}", rows)
                self.keep()

    def ingest(self) -> None:
        """An ingestion whose sink discards its rows, beside one call with the same texts."""
        from ingest_memory import DiscardSink

        from millpond.ingest import Record, ingest

        folder, _ = self.model("bert-base")
        load = self.workload("177")
        records = [Record(str(number), text) for number, text in enumerate(load.texts)]
        seconds: dict[str, list[float]] = {"call": [], "ingestion": []}
        with self.engine(folder) as engine:
            for _ in range(self.options.rounds + 1):
                begin = time.perf_counter()
                engine.embed(load.texts)
                seconds["call"].append(time.perf_counter() - begin)
                begin = time.perf_counter()
                ingest(records, engine=engine, sink=DiscardSink(), show_progress=False)
                seconds["ingestion"].append(time.perf_counter() - begin)
        rates = {name: round(load.tokens / statistics.median(each[1:])) for name, each in seconds.items()}
        self.results["ingest"] = {"rows": len(records), "tokens": load.tokens, "tokens_per_second": rates}
        print(f"ingest: {rates}", flush=True)
        self.keep()

    def maxsim(self) -> None:
        """A query of 32 token vectors beside all documents of an index in the device's memory."""
        from millpond.late_interaction.codecs.rows import CODECS
        from millpond.late_interaction.cuda import DeviceMemory, device_of
        from millpond.vectors.ragged import Ragged

        table = self.results.setdefault("maxsim", {})
        chance = np.random.default_rng(0)
        count = 200 if self.options.smoke else 200_000
        lengths = chance.integers(20, 300, count)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        query = chance.standard_normal((32, 128), dtype=np.float32)
        query /= np.linalg.norm(query, axis=1, keepdims=True)
        queries = Ragged(flat=query, offsets=np.array([0, 32]))
        block = chance.standard_normal((1 << 16, 128), dtype=np.float32)
        block /= np.linalg.norm(block, axis=1, keepdims=True)
        for name in ("bfloat16", "int8"):
            codec = CODECS[name]
            rows = DeviceMemory(device_of(self.device)).rows(codec, codec.width(128), int(offsets[-1]))
            packed, scales = codec.pack(block)
            for first in range(0, int(offsets[-1]), len(block)):
                some = min(len(block), int(offsets[-1]) - first)
                rows.write(first, packed[:some], None if scales is None else scales[:some])
            score = rows.scorer(int(offsets[-1]), offsets)
            score(queries)
            seconds = []
            for _ in range(self.options.rounds * 3):
                begin = time.perf_counter()
                score(queries)
                seconds.append(time.perf_counter() - begin)
            size = packed.nbytes / len(block) * int(offsets[-1])
            found = {
                "documents": count,
                "tokens": int(offsets[-1]),
                "bytes": int(size),
                "median_seconds": statistics.median(seconds),
                "giga_bytes_per_second": round(size / statistics.median(seconds) / 1e9, 1),
            }
            table[name] = found
            print(f"maxsim, {name}: {found}", flush=True)
            self.keep()

    def profile(self) -> None:
        """Where a device's time goes: the kernels of each shape, and the part of the time without one."""
        table = self.results.setdefault("profile", {})
        for shape in self.options.shapes:
            folder, _ = self.model(shape)
            with self.engine(folder) as engine:
                for length in ("50", "512"):
                    load = self.workload(length)
                    texts = load.head(max(4, 400_000 // int(length))).texts
                    for _ in range(3):
                        engine.embed(texts)
                    found = gpu_profile.profiled(lambda texts=texts: engine.embed(texts))
                    table.setdefault(shape, {})[length] = found
                    print(f"profile, {shape}, {length}", flush=True)
                    print("\n".join(gpu_profile.lines(found)), flush=True)
                    self.keep()

    @property
    def sizes(self) -> Sequence[int]:
        """Batch sizes that a peer tries."""
        return (8,) if self.options.smoke else BATCH_SIZES

    def engine(self, folder: Path) -> Any:
        """millpond with default settings, in torch."""
        from millpond import Engine

        return Engine(folder, device=self.device, dtype=self.dtype, backend="torch")


def device_rates() -> dict[str, float]:
    """Bytes of a large copy, read and written, and operations of a large product in bfloat16, per second."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    product, copy = milliseconds(lambda: a @ b), milliseconds(lambda: target.copy_(source))
    return {
        "product_tera_flops": round(2 * 8192**3 / product / 1e9, 1),
        "copy_giga_bytes_per_second": round(2 * source.nbytes / copy / 1e6, 1),
    }


def milliseconds(call: Callable[[], Any], *, rounds: int = 15) -> float:
    """The median of a call's times on the device."""
    times = []
    for _ in range(rounds + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


def embedders(model: Path, device: str) -> tuple[Any, Any]:
    """sentence-transformers in half precision and in float32; ``None`` twice if it is not installed."""
    if importlib.util.find_spec("sentence_transformers") is None:
        print("sentence-transformers is not installed and does not take part; results are not compared")
        return None, None
    from sentence_transformers import SentenceTransformer

    def embedder(dtype: torch.dtype) -> Callable[[Sequence[str], int], Arrays]:
        options = {"dtype": dtype, "attn_implementation": "sdpa"}
        encoder = SentenceTransformer(str(model), device=device, model_kwargs=options)

        def embed(texts: Sequence[str], batch: int) -> Arrays:
            vectors = encoder.encode(list(texts), batch_size=batch, show_progress_bar=False)
            return {"vectors": vectors.astype(np.float32)}

        return embed

    return embedder(torch.float16 if device != "cpu" else torch.float32), embedder(torch.float32)


def cross_encoders(model: Path, device: str) -> tuple[Any, Any]:
    """The same for reranking."""
    if importlib.util.find_spec("sentence_transformers") is None:
        return None, None
    from sentence_transformers import CrossEncoder

    def reranker(dtype: torch.dtype) -> Callable[[str, Sequence[str], int], Arrays]:
        cross = CrossEncoder(str(model), device=device, model_kwargs={"dtype": dtype, "attn_implementation": "sdpa"})

        def rerank(query: str, texts: Sequence[str], batch: int) -> Arrays:
            pairs = [(query, text) for text in texts]
            return {"scores": cross.predict(pairs, batch_size=batch, show_progress_bar=False).astype(np.float32)}

        return rerank

    return reranker(torch.float16 if device != "cpu" else torch.float32), reranker(torch.float32)


def compare(
    ways: Sequence[Way],
    load: Workload,
    checked: Sequence[str],
    reference: Arrays | None,
    *,
    rounds: int,
    sizes: Sequence[int],
    share: int = PEER_SHARE,
) -> dict[str, Any]:
    """Compare results for ``checked``, search batch sizes, then time in turns; returns rows by name."""
    rows: dict[str, Any] = {}
    chosen: dict[str, int] = {}
    fewer = load.head(max(4, len(load.texts) // share))
    loads = {way.name: fewer if way.peer else load for way in ways}
    for way in ways:
        inputs = loads[way.name].texts
        if reference is None:
            rows[way.name] = {"equal": None}
        else:
            verdict = judge(way.run(checked, sizes[0]), reference, "half")
            rows[way.name] = {"equal": verdict.equal, **verdict.figures}
        way.run(inputs, sizes[0])  # warm-up
        if not way.peer:
            way.run(inputs, sizes[0])  # graphs are captured when a shape is seen again
        tried = {size: seconds_of(way, inputs, size) for size in sizes} if way.peer and len(sizes) > 1 else {}
        chosen[way.name] = min(tried, key=lambda size: tried[size]) if tried else sizes[0]
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for number in range(rounds):
        for way in [*ways[number % len(ways) :], *ways[: number % len(ways)]]:
            times[way.name].append(seconds_of(way, loads[way.name].texts, chosen[way.name]))
    for way in ways:
        if rows[way.name]["equal"] is not False:  # else the time means nothing
            seconds = statistics.median(times[way.name])
            rows[way.name] |= {
                "batch": chosen[way.name] if way.peer else None,
                "tokens_per_second": round(loads[way.name].tokens / seconds),
                "median_seconds": seconds,
                "seconds": times[way.name],
            }
    return rows


def seconds_of(way: Way, inputs: Any, size: int) -> float:
    """Seconds of one pass. Results are numpy arrays on the host, so no work is pending afterwards."""
    begin = time.perf_counter()
    way.run(inputs, size)
    return time.perf_counter() - begin


def report(name: str, rows: Mapping[str, Any]) -> None:
    """Print one table."""
    print(name)
    for way, row in rows.items():
        rate = f"{row['tokens_per_second']:,}" if "tokens_per_second" in row else "not equal"
        rest = {key: row[key] for key in row if key not in ("seconds", "tokens_per_second")}
        print(f"  {way:36} {rate:>12}  {rest}", flush=True)


def main() -> int:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU, to check that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json")
    shapes = [name for name in SHAPES if name != "cross-encoder"]
    for name, all_of in (("only", PARTS), ("shapes", shapes), ("lengths", LENGTHS)):
        parser.add_argument(f"--{name}", type=lambda text: text.split(","), default=list(all_of))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="in one pass")
    parser.add_argument("--without-peers", action="store_true", help="only millpond, and no comparison with float32")
    options = parser.parse_args()
    for name, all_of in (("only", PARTS), ("shapes", shapes), ("lengths", LENGTHS)):
        if unknown := set(getattr(options, name)) - set(all_of):
            parser.error(f"--{name} has no {', '.join(sorted(unknown))}; choose of {', '.join(all_of)}")
    if not options.smoke and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured (--smoke runs tiny shapes on the CPU)", file=sys.stderr)
        return 1
    if options.smoke:
        options.tokens, options.rounds = 2_000, 1
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(Path(folder), options)
        for part in options.only:
            if not (part == "profile" and options.smoke):
                getattr(benchmark, part)()
    unequal = unequal_in(benchmark.results)
    if unequal:
        print(f"not equal: {', '.join(unequal)}", file=sys.stderr)
    elif not options.smoke:
        print(options.out)
    return 1 if unequal else 0


def unequal_in(results: Any, path: str = "") -> list[str]:
    """The places of all rows whose results do not equal float32."""
    if not isinstance(results, dict):
        return []
    found = [path] if results.get("equal") is False else []
    return found + [place for key, value in results.items() for place in unequal_in(value, f"{path}/{key}")]


if __name__ == "__main__":
    sys.exit(main())
