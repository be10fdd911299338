"""Tiny checkpoints with heads, in the file layouts of the hub: late interaction, sparse, cross-encoders, rewards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file, save_file
from tests.tiny.checkpoints import add_tokens, edit_json, token_id, write_checkpoint
from tests.tiny.families import FAMILIES
from tests.tiny.layouts import Dense, Layout, Normalize, Other, Pooling, save_pickle, save_weights
from tests.tiny.noise import Noise

DIM = 24
NLI = ("contradiction", "neutral", "entailment")
QUERY_LENGTH, DOCUMENT_LENGTH = 12, 24


def write_stanford(
    folder: Path, family: str = "bert", *, weights: Literal["safetensors", "bin"] = "safetensors", **metadata: Any
) -> Path:
    """Write an ``HF_ColBERT``: markers are plain entries of the vocabulary, ``linear.weight`` lies beside ``bert.*``.

    ``family="jina"`` is jina-colbert-v2: its tensor names, no adapters, markers that are added tokens.
    ``metadata`` replaces fields of artifact.metadata; ``None`` leaves a field out.
    """
    plain = {"lora_adaptations": None, "matryoshka_dimensions": None} if family == "jina" else {}
    write_checkpoint(folder, family, lowercase=family == "bert", config=plain)
    markers = ("[unused0]", "[unused1]") if family == "bert" else ("[QueryMarker]", "[DocumentMarker]")
    tensors = add_tokens(folder, markers, added=family != "bert")
    # The prefix of transformers' class; jina's tensors already have their own.
    prefix = f"{FAMILIES[family].config['model_type']}." if family == "bert" else ""
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    tensors["linear.weight"] = Noise(7).normal(DIM, 48) / np.float32(48**0.5)
    save_weights(tensors, folder, weights)
    edit_json(folder / "config.json", architectures=["HF_ColBERT"])
    content = {
        "query_token_id": markers[0],
        "doc_token_id": markers[1],
        "query_token": "[Q]",
        "doc_token": "[D]",
        "query_maxlen": QUERY_LENGTH,
        "doc_maxlen": DOCUMENT_LENGTH,
        "dim": 999,  # wrong on purpose: the tensor decides
        "mask_punctuation": True,
        "attend_to_mask_tokens": False,
        "similarity": "cosine",
        "interaction": "colbert",
        **metadata,
    }
    kept = {key: value for key, value in content.items() if value is not None}
    (folder / "artifact.metadata").write_text(json.dumps(kept), encoding="utf-8")
    return folder


def write_pylate(
    folder: Path, family: str = "modernbert", *, widths: Sequence[int] = (DIM,), residual: bool = False, **settings: Any
) -> Path:
    """Write a PyLate checkpoint: markers that end with a space, added after the vocabulary; one or more Dense layers.

    ``settings`` replaces keys of config_sentence_transformers.json; ``None`` leaves a key out.
    """
    modules = tuple(Dense(out_features=width, activation="Identity", bias=False, residual=residual) for width in widths)
    # PyLate's max_seq_length does not count the document's marker.
    layout = Layout(modules=modules, style="old", max_seq_length=DOCUMENT_LENGTH - 1, prompts={})
    # A window of 2 x 32: with a narrower one, some rows of the query expansion would have no key to attend to.
    config = {"local_attention": 64} if family == "modernbert" else {}
    write_checkpoint(folder, family, sentence_transformers=layout, config=config)
    save_weights(add_tokens(folder, ("[Q] ", "[D] "), added=True), folder)
    listed = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    for entry in listed[1:]:
        entry["type"] = "pylate.models.Dense.Dense"
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    path = folder / "config_sentence_transformers.json"
    content = {
        **json.loads(path.read_text(encoding="utf-8")),
        "model_type": "ColBERT",
        "similarity_fn_name": "MaxSim",
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": QUERY_LENGTH,
        "document_length": DOCUMENT_LENGTH,
        "do_query_expansion": True,
        "attend_to_expansion_tokens": False,
        "skiplist_words": [".", ",", "?", "!", ";", ":", "'"],
        **settings,
    }
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")
    return folder


_OLD = "sentence_transformers.sparse_encoder.models."
_NEW = "sentence_transformers.sparse_encoder.modules.splade_pooling."


def write_splade(
    folder: Path,
    family: str = "bert",
    *,
    style: Literal["old", "new"] = "new",
    strategy: str = "max",
    activation: str = "relu",
    **options: Any,
) -> Path:
    """Write a masked language model followed by SpladePooling; ``options`` are those of ``write_checkpoint``."""
    pooling = Other(
        dotted=(_OLD if style == "old" else _NEW) + "SpladePooling",
        config={"pooling_strategy": strategy, "activation_function": activation, "word_embedding_dimension": None},
    )
    layout = Layout(modules=(pooling,), style=style)
    write_checkpoint(folder, family, sentence_transformers=layout, wrapped=True, **options)
    edit_json(folder / "config_sentence_transformers.json", model_type="SparseEncoder", similarity_fn_name="dot")
    if style == "old":
        modules = json.loads((folder / "modules.json").read_text())
        modules[0]["type"] = _OLD + "MLMTransformer"
        (folder / "modules.json").write_text(json.dumps(modules))
    else:
        edit_json(
            folder / "sentence_bert_config.json",
            transformer_task="fill-mask",
            modality_config={"text": {"method": "forward", "method_output_name": "logits"}},
        )
    return folder


def write_m3(folder: Path, *, colbert_width: int = 48, weights: Literal["safetensors", "bin"] = "safetensors") -> Path:
    """Write a BGE-M3: XLM-R with CLS pooling, and two linear layers in half precision in files beside it.

    ``weights="bin"``: of those, as on the hub; else as ``millpond convert`` writes them.
    """
    layout = Layout(modules=(Pooling(modes=("cls",)), Normalize()), style="old")
    write_checkpoint(folder, "xlm-roberta", sentence_transformers=layout)
    noise = Noise(12)
    for name, rows in (("sparse_linear", 1), ("colbert_linear", colbert_width)):
        weight = noise.normal(rows, 48)  # some tokens get a weight, others zero
        layer = {"weight": weight, "bias": noise.normal(rows) * np.float32(0.3)}
        halves = {key: tensor.astype(np.float16) for key, tensor in layer.items()}
        if weights == "bin":
            save_pickle(halves, folder / f"{name}.pt")
        else:
            save_file(halves, folder / f"{name}.safetensors")
    return folder


def write_cross_encoder(folder: Path, *, activation: str | None = "Identity", seed: int = 3) -> Path:
    """Write a cross-encoder into ``folder``; ``activation`` is the class that config.json names, ``None``: none."""
    write_checkpoint(folder, "bert", lowercase=True, head="SequenceClassification", labels=1)
    tensors, noise = load_file(folder / "model.safetensors"), Noise(seed)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and tensor.dtype == np.float32:  # so that pairs have different scores
            tensors[name] = noise.normal(*tensor.shape) * np.float32(0.25)
        elif name.endswith("bias"):
            tensors[name] = np.zeros_like(tensor)
        elif "LayerNorm" in name:
            tensors[name] = np.ones_like(tensor)
    save_weights(tensors, folder)
    if activation is not None:
        function = {"activation_fn": f"torch.nn.modules.linear.{activation}"}
        edit_json(folder / "config.json", sentence_transformers=function)
    return folder


CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
)
STEP = "<extra_0>"
REWARD = "[UNUSED_TOKEN_130]"


def linears(*named: tuple[str, int, int]) -> dict[str, tuple[int, ...]]:
    """Shapes of weights and biases, for each ``(name, rows, columns)``."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in named:
        shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    return shapes


_HEADS = {
    "InternLM2ForRewardModel": {"v_head.weight": (1, 48)},
    "Qwen2ForRewardModel": linears(("score.0", 48, 48), ("score.2", 1, 48)),
    "Qwen2ForProcessRewardModel": linears(("score.0", 48, 48), ("score.2", 2, 48)),
}


def write_reward(folder: Path, architecture: str, *, stray: bool = False, **config: Any) -> Path:
    """Write a backbone with the prefix ``model.``, the head of ``architecture`` and a chat template.

    InternLM2's reward token and Qwen's step token are appended to the vocabulary. ``stray`` keeps the language model's
    head, as Qwen's files do.
    """
    intern = architecture.startswith("InternLM2")
    # The reward is read at the last token, so no special token follows a text.
    template = "<s> $A" if intern else "$A"
    family = "internlm2" if intern else "qwen2"
    write_checkpoint(folder, family, wrapped=True, template=template, config=config)
    tensors = add_tokens(folder, ("<|im_start|>", "<|im_end|>", REWARD if intern else STEP), added=True)
    if not stray:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("output.weight", "lm_head.weight")}
    noise = Noise(7)
    for name, shape in _HEADS[architecture].items():
        tensors[name] = noise.normal(*shape) * np.float32(shape[-1] ** -0.5 if len(shape) > 1 else 0.3)
    save_weights(tensors, folder)
    edit_json(folder / "config.json", architectures=[architecture])
    if intern:
        edit_json(folder / "config.json", reward_token_id=token_id(folder, REWARD))
    (folder / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    return folder


def write_language_model(folder: Path, family: str, tokens: Sequence[str], **options: Any) -> Path:
    """Write a ``*ForCausalLM`` with its head; ``tokens`` are appended to the vocabulary."""
    write_checkpoint(folder, family, wrapped=True, **options)
    save_weights(add_tokens(folder, tokens, added=True), folder)
    row = FAMILIES[family]
    if row.wrapped == f"{row.prefix}Model":  # a family without a language model: the class that one would have
        edit_json(folder / "config.json", architectures=[row.prefix + row.head])
    return folder


def headed(
    family: str,
    size: Mapping[str, Any],
    architecture: str,
    heads: Mapping[str, tuple[int, ...]],
    *,
    prefix: str,
    tokens: Sequence[str] = (),
    wrapped: bool = False,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> Callable[[Path], Path]:
    """A writer of a backbone with ``prefix`` and random heads; ``tokens`` are added to the vocabulary."""

    def write(folder: Path) -> Path:
        write_checkpoint(folder, family, config=dict(size), wrapped=wrapped, **options)
        tensors = add_tokens(folder, tokens, added=True) if tokens else load_file(folder / "model.safetensors")
        tensors = tensors if wrapped else {prefix + name: tensor for name, tensor in tensors.items()}
        noise = Noise(7)
        for name, shape in heads.items():
            tensors[name] = _random(name, noise.normal(*shape))
        save_weights(tensors, folder)
        edit_json(folder / "config.json", architectures=[architecture], **(config or {}))
        _pair_template(folder)
        return folder

    return write


def _random(name: str, numbers: np.ndarray) -> np.ndarray:
    if numbers.ndim > 1:
        return numbers * np.float32(1.3) / np.float32(numbers.shape[-1] ** 0.5)
    return numbers * np.float32(0.2) + np.float32("norm" in name and name.endswith("weight"))


def _pair_template(folder: Path) -> None:
    """Add the family's pair template to an encoder's tokenizer.json, if that has none."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    processor = content["post_processor"]
    if "single" not in processor:  # RoBERTa's processor has a pair template already
        return
    single = [next(iter(part.values()))["id"] for part in processor["single"]]
    if len(single) != 3 or any("SpecialToken" in part for part in processor["pair"]):
        return
    first, _, last = single
    roberta = first == "<s>"
    pair = [(first, 0), ("A", 0), (last, 0), *([(last, 0)] if roberta else []), ("B", 1), (last, 1)]
    processor["pair"] = [
        {"Sequence" if name in ("A", "B") else "SpecialToken": {"id": name, "type_id": 0 if roberta else kind}}
        for name, kind in pair
    ]
    path.write_text(json.dumps(content), encoding="utf-8")


def write_nli(folder: Path, family: str = "bert", names: Sequence[str] = NLI) -> Path:
    """Write a classifier of natural language inference, which config.json says by the names of its classes."""
    write_checkpoint(folder, family, head="SequenceClassification", labels=len(names))
    edit_json(
        folder / "config.json",
        id2label={str(i): name for i, name in enumerate(names)},
        label2id={name: i for i, name in enumerate(names)},
    )
    return folder
