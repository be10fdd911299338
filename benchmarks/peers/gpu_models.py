"""Checkpoints with random weights for the GPU benchmark: shapes that are in use, with one tokenizer for all.

The tokenizer is trained on the standard library's docstrings, which are also the texts, so nothing is downloaded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from peers.texts import docstrings

VOCABULARY = 30_522
LIMIT = 512
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
    "eos_token": "[SEP]",
}
_IDS = {"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2, "sep_token_id": 3, "eos_token_id": 3}
_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}


def _minilm() -> Any:
    from transformers import BertConfig, BertModel

    return BertModel, BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=VOCABULARY
    )


def _bert_base() -> Any:
    from transformers import BertConfig, BertModel

    return BertModel, BertConfig(vocab_size=VOCABULARY)


def _bge_m3() -> Any:
    from transformers import XLMRobertaConfig, XLMRobertaModel

    return XLMRobertaModel, XLMRobertaConfig(
        vocab_size=250_002,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        max_position_embeddings=8194,
        type_vocab_size=1,
        pad_token_id=1,
    )


def _modernbert() -> Any:
    from transformers import ModernBertConfig, ModernBertModel

    return ModernBertModel, ModernBertConfig(**_IDS)


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3Model

    return Qwen3Model, Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32_768,
        **{name: _IDS[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    )


def _cross_encoder() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification, BertConfig(vocab_size=VOCABULARY, num_labels=1)


SHAPES: dict[str, Callable[[], Any]] = {
    "minilm": _minilm,
    "bert-base": _bert_base,
    "bge-m3": _bge_m3,
    "modernbert-base": _modernbert,
    "qwen3-0.6b": _qwen3,
    "cross-encoder": _cross_encoder,
}
POOLING = {"qwen3-0.6b": "lasttoken"}  # the others: the mean


def write_tokenizer(folder: Path) -> None:
    """A WordPiece tokenizer of the docstrings' words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = list(dict.fromkeys(SPECIAL.values()))
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(docstrings(), trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LIMIT, **SPECIAL).save_pretrained(folder)


def write_model(folder: Path, name: str, tokenizer: Path, *, device: str, tiny: bool = False) -> int:
    """Write the checkpoint ``name``, a key of ``SHAPES``; returns its parameters outside embedding tables.

    ``tokenizer``: a folder written by :func:`write_tokenizer`; ``tiny``: two narrow layers of the same kind.
    """
    kind, config = SHAPES[name]()
    if tiny:
        kv = {"num_key_value_heads": 1, "head_dim": 32} if "qwen" in name else {}
        config = type(config)(**{**config.to_dict(), **_TINY, **kv, "layer_types": None})
    torch.manual_seed(0)
    with torch.device(device):
        model = kind(config)
    with torch.no_grad():  # with transformers' initial scale, texts and pairs would hardly differ
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=1.5 / config.hidden_size**0.5)
    model.to(torch.bfloat16 if "qwen" in name else torch.float32).save_pretrained(folder)
    for path in tokenizer.iterdir():
        shutil.copy(path, folder / path.name)
    if "xlm" in config.model_type or "modernbert" in config.model_type or "qwen" in config.model_type:
        _without_token_types(folder)
    if name != "cross-encoder":
        write_pipeline(folder, width=config.hidden_size, pooling=POOLING.get(name, "mean"))
    tables = sum(part.weight.numel() for part in model.modules() if isinstance(part, torch.nn.Embedding))
    return sum(parameter.numel() for parameter in model.parameters()) - tables


def _without_token_types(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    _write(path, {**content, "model_input_names": ["input_ids", "attention_mask"]})


def write_pipeline(folder: Path, *, width: int, pooling: str) -> None:
    """The files of a sentence-transformers pipeline around a backbone in the same folder."""
    names = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(names.items())
    ]
    _write(folder / "modules.json", modules)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": LIMIT, "do_lower_case": False})
    (folder / "1_Pooling").mkdir()
    modes = {"mean": "mean_tokens", "lasttoken": "lasttoken"}
    flags = {f"pooling_mode_{mode}": kind == pooling for kind, mode in modes.items()}
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **flags})


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
