"""Tokens per second of each family beside sentence-transformers, at published widths with random weights.

    python benchmarks/families.py [--smoke] [--only bert,qwen3,...] [--texts 48] [--rounds 3] [--record]
                                  [--fastembed PYTHON]

Both engines read the same folder and texts in turns, and the fastest round of each counts. sentence-transformers
computes in float32; millpond as it does by default on this processor, and in float32, where the vectors are compared.
Families that sentence-transformers reads with remote code only are not here, nor is Qwen2, in whose place is Qwen3:
transformers 5 gives it a pre-tokenizer of its own, so that the peer would read other tokens. Of a deep model only some
layers are built, as its row says. ``PYTHON`` is the interpreter of an environment with fastembed: it reads an ONNX
export of those families that fastembed's list of models has, and embeds the same texts in batches of its default.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from peers.gpu_models import VOCABULARY, write_pipeline, write_tokenizer
from peers.texts import Texts
from record import record, recorded_here

from millpond import Engine

_SMALL = {"vocab_size": VOCABULARY, "pad_token_id": 0}
_NARROW = {"hidden_size": 1024, "intermediate_size": 3072}
# The name of transformers' class without "Model", fields of its configuration, published and measured layers.
SHAPES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "bert": ("Bert", {}, 12, 12),
    "distilbert": ("DistilBert", {}, 6, 6),
    "roberta": ("Roberta", {"max_position_embeddings": 514}, 12, 12),
    "electra": ("Electra", {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}, 12, 12),
    "mpnet": ("MPNet", {"max_position_embeddings": 514}, 12, 12),
    "albert": ("Albert", {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}, 12, 12),
    "xlm-roberta-xl": ("XLMRobertaXL", {}, 36, 2),
    "ernie": ("Ernie", {}, 12, 12),
    "data2vec": ("Data2VecText", {"max_position_embeddings": 514}, 12, 12),
    "megatron": ("MegatronBert", {}, 24, 6),
    "roformer": ("RoFormer", {}, 12, 12),
    "rembert": ("RemBert", {}, 32, 4),
    "mobilebert": ("MobileBert", {}, 24, 24),
    "longformer": ("Longformer", {"max_position_embeddings": 4098}, 12, 12),
    "bigbird": ("BigBird", {"attention_type": "original_full"}, 12, 12),
    "deberta": ("Deberta", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}, 12, 12),
    "deberta-v3": (
        "DebertaV2",
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 256,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
        12,
        12,
    ),
    "modernbert": ("ModernBert", {}, 22, 22),
    "nomic": ("NomicBert", {}, 12, 12),
    "eurobert": ("EuroBert", {"num_attention_heads": 12, "num_key_value_heads": 12}, 12, 12),
    "t5": ("T5Encoder", {"d_model": 768, "d_ff": 3072, "num_heads": 12}, 12, 12),
    "qwen3": ("Qwen3", {**_NARROW, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}, 28, 6),
    "gemma3": (
        "Gemma3Text",
        {
            "hidden_size": 768,
            "intermediate_size": 1152,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "use_bidirectional_attention": True,
            "sliding_window": 512,
        },
        24,
        12,
    ),
    "llama": ("Llama", {"hidden_size": 2048, "intermediate_size": 8192, "num_key_value_heads": 8}, 16, 2),
    "mistral": ("Mistral", {}, 32, 1),
    "phi3": ("Phi3", {}, 32, 1),
    "olmo2": ("Olmo2", {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}, 16, 2),
    "granite": ("Granite", {"hidden_size": 2048, "intermediate_size": 8192, "num_key_value_heads": 8}, 40, 2),
    "smollm3": ("SmolLM3", {"hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16}, 36, 2),
    "gpt-neox": ("GPTNeoX", {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}, 24, 6),
    "lfm2": ("Lfm2", {"hidden_size": 1024, "intermediate_size": 6656, "num_attention_heads": 16}, 16, 6),
}
DECODERS = ("Qwen3", "Llama", "Mistral", "Phi3", "Olmo2", "Granite", "SmolLM3", "GPTNeoX", "Lfm2")
PEER = "sentence-transformers"
# Families of fastembed's list of models.
FASTEMBED = ("bert", "roberta", "mpnet", "nomic")
# Reads lines of JSON with texts from standard input, and answers with the seconds, and with the vectors at first.
WORKER = """
import json, sys, time
from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType
folder, width = sys.argv[1], int(sys.argv[2])
TextEmbedding.add_custom_model(model="local", pooling=PoolingType.MEAN, normalization=True,
                               sources=ModelSource(hf="local"), dim=width, model_file="model.onnx")
model = TextEmbedding("local", specific_model_path=folder, threads=2)
for i, line in enumerate(sys.stdin):
    texts = json.loads(line)
    start = time.perf_counter()
    vectors = list(model.embed(texts))
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "vectors": [] if i else [row.tolist() for row in vectors]}), flush=True)
"""


def write_model(folder: Path, family: str, tokenizer: Path) -> None:
    """A checkpoint of this family in ``folder``, with the files of ``tokenizer`` and random weights."""
    import torch
    import transformers

    name, fields, _, layers = SHAPES[family]
    config_class = getattr(transformers, f"{name.removesuffix('Encoder')}Config")
    depth = next((key for key in ("num_layers", "n_layers") if key in vars(config_class())), "num_hidden_layers")
    config = config_class(**_SMALL, **fields, **{depth: layers})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(config)
    with torch.no_grad():  # with transformers' initial scale, texts would hardly differ
        for parameter in model.parameters():
            if parameter.ndim == 2 and parameter.requires_grad:  # RoFormer's sines stay
                parameter.normal_(std=0.7 / parameter.shape[1] ** 0.5)
        model.get_input_embeddings().weight[0] = 0  # in a batch MobileBERT reads the padding beside a text
    model.save_pretrained(folder)
    for path in tokenizer.iterdir():
        content = path.read_text(encoding="utf-8")
        if path.name == "tokenizer_config.json":
            inputs = ["input_ids", "attention_mask"]
            content = json.dumps({**json.loads(content), "model_input_names": inputs})
        (folder / path.name).write_text(content, encoding="utf-8")
    width = getattr(config, "hidden_size", None) or config.dim
    write_pipeline(folder, width=width, pooling="lasttoken" if name in DECODERS else "mean")


def measure(folder: Path, texts: Sequence[str], rounds: int) -> dict[str, Any]:
    """Tokens per second of the fastest round of each engine, in turns, and the largest difference in float32."""
    from sentence_transformers import SentenceTransformer

    peer = SentenceTransformer(str(folder), device="cpu")
    with Engine(folder, device="cpu") as engine, Engine(folder, device="cpu", dtype="float32") as exact:
        tokens = engine.embed(texts).usage.prompt_tokens
        calls: dict[str, Callable[[], Any]] = {
            "millpond": lambda: engine.embed(texts).embeddings,
            "millpond, float32": lambda: exact.embed(texts).embeddings,
            PEER: lambda: peer.encode(list(texts), batch_size=32, show_progress_bar=False),
        }
        difference = float(np.abs(calls["millpond, float32"]() - calls[PEER]()).max())
        seconds = dict.fromkeys(calls, float("inf"))
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                seconds[name] = min(seconds[name], time.perf_counter() - start)
        return {
            "tokens": tokens,
            "dtype": engine.dtype,
            "tokens_per_second": {name: tokens / spent for name, spent in seconds.items()},
            "difference": difference,
        }


def export(folder: Path) -> int:
    """Write the encoder as ``model.onnx`` beside its weights; returns its width."""
    import torch
    from transformers import AutoModel

    class States(torch.nn.Module):
        """The states of the last layer alone."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, mask: Any) -> Any:
            return self.model(input_ids=ids, attention_mask=mask).last_hidden_state

    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.arange(4, 16).reshape(2, 6)
    names = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    axes = {name: {0: "texts", 1: "tokens"} for name in (*names, "last_hidden_state")}
    torch.onnx.export(
        States(),
        tuple(names.values()),
        str(folder / "model.onnx"),
        input_names=list(names),
        output_names=["last_hidden_state"],
        dynamic_axes=axes,
        dynamo=False,
    )
    (folder / "special_tokens_map.json").write_text('{"pad_token": "[PAD]"}', encoding="utf-8")
    return int(model.config.hidden_size)


def measure_fastembed(folder: Path, texts: Sequence[str], rounds: int, python: str) -> dict[str, float]:
    """Seconds of fastembed's fastest round, and the largest difference to millpond in float32."""
    width = export(folder)
    worker = subprocess.Popen(
        [python, "-c", WORKER, str(folder), str(width)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    seconds, difference = float("inf"), 0.0
    with worker, Engine(folder, device="cpu", dtype="float32") as exact:
        for i in range(rounds + 1):
            worker.stdin.write(json.dumps(list(texts)) + "\n")
            worker.stdin.flush()
            answer = json.loads(worker.stdout.readline())
            if i == 0:
                difference = float(np.abs(np.array(answer["vectors"]) - exact.embed(texts).embeddings).max())
            else:
                seconds = min(seconds, answer["seconds"])
        worker.stdin.close()
    return {"seconds": seconds, "difference": difference}


def line(family: str, found: dict[str, Any]) -> str:
    """A row of the table."""
    _, _, published, layers = SHAPES[family]
    rates = found["tokens_per_second"]
    depth = f"{layers}" if layers == published else f"{layers} of {published}"
    exact, peer, other = rates["millpond, float32"], rates[PEER], rates.get("fastembed")
    return (
        f"| {family} | {depth} | {rates['millpond']:,.0f} ({found['dtype']}) | {exact:,.0f} | {peer:,.0f} | "
        f"{rates['millpond'] / peer:.1f}\u00d7 | {exact / peer:.1f}\u00d7 | {found['difference']:.0e} | "
        f"{'-' if other is None else f'{other:,.0f}'} |"
    )


def table(results: dict[str, Any]) -> str:
    """A row for each family."""
    head = (
        "| family | layers | millpond, tokens/s | float32 | sentence-transformers, float32 | default | float32 | "
        "largest difference in float32 | fastembed |\n|---|---|---|---|---|---|---|---|---|"
    )
    return "\n".join([head, *(line(family, found) for family, found in results["families"].items())])


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two families, one round")
    parser.add_argument("--only", help="families, separated by commas")
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fastembed", metavar="PYTHON", help="interpreter that has fastembed")
    parser.add_argument("--record", action="store_true", help="keep the results in benchmarks/results")
    options = parser.parse_args()
    if options.smoke:
        options.only, options.texts, options.rounds = options.only or "distilbert,t5", 4, 1
    families = options.only.split(",") if options.only else list(SHAPES)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer"
        write_tokenizer(tokenizer)
        texts = Texts(tokenizer / "tokenizer.json", data=None).workload("docs", limit=512, count=options.texts).texts
        for family in families:
            with tempfile.TemporaryDirectory(dir=folder) as model:
                write_model(Path(model), family, tokenizer)
                results[family] = measure(Path(model), texts, options.rounds)
                if options.fastembed and family in FASTEMBED:
                    other = measure_fastembed(Path(model), texts, options.rounds, options.fastembed)
                    results[family]["tokens_per_second"]["fastembed"] = results[family]["tokens"] / other["seconds"]
                    results[family]["difference of fastembed"] = other["difference"]
            print(line(family, results[family]), flush=True)
            if options.record:  # after each: a run takes half an hour
                kept = recorded_here("families").get("families", {})
                record(
                    "families",
                    {"families": {each: found for each in SHAPES if (found := {**kept, **results}.get(each))}},
                )


if __name__ == "__main__":
    main()
