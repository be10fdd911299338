"""Renaming: tensor names of a family's checkpoints on the hub to those of transformers' class.

transformers has such tables too, but not for every prefix, nor in every version that millpond supports. Tensors are
stored ones or torch's: a name's tensor is taken apart by its rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeVar

from millpond.checkpoints.architecture import MaskedHeadNames


class Rows(Protocol):
    """A tensor of either kind."""

    @property
    def shape(self) -> Sequence[int]:
        """Its shape."""
        ...

    def __getitem__(self, rows: slice | list[int], /) -> Self:
        """Rows of its first axis."""
        ...


AnyTensor = TypeVar("AnyTensor", bound=Rows)

# Parts of a fused tensor, in order.
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# What torch.compile, data parallel training and sentence-transformers put before a model's names.
_WRAPPERS = ("_orig_mod", "module", "0.auto_model", "auto_model")
# Names of TensorFlow's BERT.
_OLD = re.compile(r"(?<=LayerNorm\.)(gamma|beta)$")
# The table of word vectors, which every backbone has once; what precedes its name is a wrapper's.
_WORDS = re.compile(r"^(.*?)(?:embeddings\.(?:word|tok)_embeddings|(?<!encoder\.)(?<!decoder\.)embed_tokens)\.weight$")


@dataclass(frozen=True, kw_only=True)
class Renaming:
    """A family's names; tensors that already have native names pass unchanged."""

    # Names of the backbone inside a larger model; one of them, or none, precedes a tensor's name
    prefixes: tuple[str, ...]
    parts: Mapping[str, str]  # the checkpoint's name of a module to the native one; whole components of a path
    fused: Mapping[str, tuple[str, ...]]  # modules whose tensors hold several native ones of equal size, concatenated

    def apply(self, tensors: Mapping[str, AnyTensor]) -> dict[str, AnyTensor]:
        """``tensors`` under the native names."""
        lead, parts, fused = (
            re.compile(rf"^(?:{'|'.join(self.prefixes)})\."),
            _between_dots(self.parts),
            _between_dots(self.fused),
        )
        renamed: dict[str, AnyTensor] = {}
        for original, tensor in tensors.items():
            name = parts.sub(lambda match: self.parts[match[0]], lead.sub("", original))
            match = fused.search(name)
            if match is None:
                renamed[name] = tensor
                continue
            targets = self.fused[match[0]]
            rows = tensor.shape[0] // len(targets)
            for i, target in enumerate(targets):
                renamed[name.replace(match[0], target)] = tensor[i * rows : (i + 1) * rows]
        return renamed


def _between_dots(names: Mapping[str, object]) -> re.Pattern[str]:
    return re.compile(rf"(?<![^.])(?:{'|'.join(map(re.escape, names))})(?=\.)")


def without_prefixes(stored: Mapping[str, AnyTensor], prefix: str) -> dict[str, AnyTensor]:
    """Tensors without what precedes their names: ``prefix``, the backbone's name in a larger model, and wrappers."""
    known = re.compile(rf"^(?:(?:{'|'.join(map(re.escape, (*_WRAPPERS, prefix)))})\.)+")
    names = {
        original: _OLD.sub(lambda match: {"gamma": "weight", "beta": "bias"}[match[0]], known.sub("", original))
        for original in stored
    }
    lead = _lead(names.values())
    names = {original: name.removeprefix(lead) for original, name in names.items()}
    # Of two that would have one name, that which has it already counts, and the other keeps its own, which is unknown.
    return {
        original if name != original and name in stored else name: stored[original] for original, name in names.items()
    }


def is_wrapped(names: Iterable[str], prefix: str) -> bool:
    """Whether the backbone's tensors have another prefix than transformers' classes give them."""
    return _lead(names) not in ("", f"{prefix}.")


def wrapped_head(head: MaskedHeadNames, stored: Iterable[str]) -> MaskedHeadNames:
    """``head`` under the names that it has in files whose class holds the whole language model as a part."""
    lead = _lead(stored)
    if not lead.endswith(f".{head.backbone}."):
        return head
    outer = lead.removesuffix(f"{head.backbone}.")
    return replace(
        head,
        backbone=outer + head.backbone,
        dense=head.dense and outer + head.dense,
        norm=head.norm and outer + head.norm,
        decoder=outer + head.decoder,
        biases=tuple(outer + name for name in head.biases),
    )


def _lead(names: Iterable[str]) -> str:
    """What precedes the names of the only backbone; empty if there are several, or its names are not known here."""
    leads = [match[1] for name in names if (match := _WORDS.search(name))]
    return leads[0] if len(leads) == 1 else ""
