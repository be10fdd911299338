"""Classifier heads in float32, built from their descriptions and the checkpoint's tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.pooling.methods import METHODS
from millpond.backends.torch.weights import read_rows, read_tensors
from millpond.checkpoints.classifier_steps import HeadRows, Linear, Norm, Step
from millpond.checkpoints.classifiers import Classifier
from millpond.checkpoints.resolve import read_json_object
from millpond.checkpoints.weights import find_tensor, tensor_shapes
from millpond.errors import ModelLoadError, WeightMismatchError

# Names of a language model's head, and of its input embeddings, which are the head if the two are tied.
_HEAD_NAMES = ("lm_head", "output", "embed_out", "lm_head.out_proj")
_EMBEDDING_NAMES = ("embed_tokens", "tok_embeddings", "wte")


class ClassifierHead(nn.Module):
    """Hidden states to logits, of a text or of each token."""

    def __init__(self, description: Classifier, *, width: int) -> None:
        super().__init__()
        self.description = description
        self.steps, self.out_features = _build(description, width)

    def tokens(self, hidden: torch.Tensor) -> torch.Tensor:  # float32 [tokens, hidden] -> [tokens, labels]
        """Logits of every token."""
        out: torch.Tensor = self.steps(hidden)
        return out / self.description.divisor

    def pool(self, hidden: torch.Tensor, segments: Segments) -> torch.Tensor:  # -> [n, labels]
        """Logits of every text, from ``hidden [tokens, hidden]``."""
        assert self.description.pooling is not None
        method = METHODS[self.description.pooling]
        if self.description.pool_logits:
            return method(self.tokens(hidden.float()), segments, None)
        if self.description.pooling in ("cls", "lasttoken"):  # converts only the one row of each text
            return self.tokens(method(hidden, segments, None).float())
        return self.tokens(method(hidden.float(), segments, None))


def build_classifier(description: Classifier, *, width: int, device: torch.device) -> ClassifierHead:
    """The head with its weights, in evaluation mode."""
    head = ClassifierHead(description, width=width)
    count = len(description.labels)
    if count and count != head.out_features:
        raise WeightMismatchError(
            f"{description.folder}: config.json names {count} labels ({', '.join(description.labels[:4])}...) "
            f"and the head has {head.out_features}; check that the files belong together"
        )
    if not count:
        names = tuple(f"LABEL_{index}" for index in range(head.out_features))
        head.description = replace(description, labels=names)
    return head.to(device=device, dtype=torch.float32).eval().requires_grad_(False)


class VocabularyRows(nn.Module):
    """Logits of a few vocabulary entries; capped if the model caps its logits (Gemma 2)."""

    def __init__(self, weight: torch.Tensor, *, softcap: float | None) -> None:  # weight [tokens, hidden]
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.softcap = softcap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [n, hidden] -> [n, tokens]
        """The logits."""
        logits = hidden @ self.weight.T
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class _Difference(nn.Module):
    """The second column minus the first."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:  # [n, 2] -> [n, 1]
        return logits[..., 1:2] - logits[..., 0:1]


def head_rows(folder: Path, tokens: tuple[int, ...]) -> VocabularyRows:
    """The rows of ``tokens`` in the language-model head of ``folder``, in float32."""
    names, config = tensor_shapes(folder), read_json_object(folder / "config.json")
    tied = config.get("tie_word_embeddings", True)
    for name in (*_HEAD_NAMES, *(_EMBEDDING_NAMES if tied else ())):
        head = find_tensor(names, f"{name}.weight")
        if head is not None:
            break
    else:
        raise WeightMismatchError(
            f"{folder} has no language-model head to take the tokens' rows from; is it a bare backbone?"
        )
    if max(tokens) >= names[head][0]:
        raise WeightMismatchError(f"{folder}: token {max(tokens)} is past the head's {names[head][0]} rows")
    return VocabularyRows(read_rows(folder, head, tokens).float(), softcap=config.get("final_logit_softcapping"))


def _build(description: Classifier, width: int) -> tuple[nn.Sequential, int]:
    modules: list[nn.Module] = []
    for step in description.steps:
        module = _module(step, description)
        if isinstance(module, nn.Linear | VocabularyRows):
            rows, columns = module.weight.shape
            if columns != width:
                name = step.name if isinstance(step, Linear | Norm) else "the language-model head"
                raise WeightMismatchError(
                    f"{description.folder}: {name} takes {columns} features, and gets {width}; "
                    "check that config.json and weights belong together"
                )
            width = rows
        modules.append(module)
        if isinstance(step, HeadRows) and step.difference and width == 2:
            modules.append(_Difference())
            width = 1
    return nn.Sequential(*modules), width


def _module(step: Step, description: Classifier) -> nn.Module:
    if isinstance(step, str):
        from transformers.activations import ACT2FN

        if step not in ACT2FN:
            raise ModelLoadError(f"{description.folder}: activation {step!r} of its head is unknown")
        activation: nn.Module = ACT2FN[step]
        return activation
    if isinstance(step, HeadRows):
        rows = head_rows(description.folder, step.tokens)
        if step.difference and rows.softcap is None:  # one row instead of two
            return VocabularyRows(rows.weight[1:2] - rows.weight[0:1], softcap=None)
        return rows
    weight, bias = _weights(step.name, description, biased=isinstance(step, Linear) and step.biased)
    biased = bias is not None
    if isinstance(step, Linear) and step.softcap is not None:
        return VocabularyRows(weight, softcap=step.softcap)
    if isinstance(step, Linear):
        module: nn.Module = nn.Linear(weight.shape[1], weight.shape[0], bias=biased)
    else:
        module = nn.LayerNorm(len(weight), eps=step.eps, bias=biased)
    module.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    return module


def _weights(name: str, description: Classifier, *, biased: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    names = tensor_shapes(description.folder)
    keys = find_tensor(names, f"{name}.weight"), find_tensor(names, f"{name}.bias")
    if keys[0] is None or (biased and keys[1] is None):
        raise WeightMismatchError(
            f"{description.folder} has no tensor {name}.{'bias' if keys[0] else 'weight'}, which its head needs; "
            'is it a classifier? (a bare backbone embeds: convert="embed"; a language model needs '
            'hf_overrides={"classifier_from_token": [...]})'
        )
    tensors = read_tensors(description.folder, only=tuple(key for key in keys if key is not None))
    return tensors[keys[0]].float(), None if keys[1] is None else tensors[keys[1]].float()
