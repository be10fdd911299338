"""Tiny reward models in the file layouts of the hub, with the backbones of :mod:`tests.tiny`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.tiny import edit_json, write_checkpoint
from tests.tiny_late import add_tokens

if TYPE_CHECKING:
    import torch

CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
)
STEP = "<extra_0>"
REWARD = "[UNUSED_TOKEN_130]"
_HEADS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "InternLM2ForRewardModel": {"v_head.weight": (1, 48)},
    "Qwen2ForRewardModel": {
        "score.0.weight": (48, 48),
        "score.0.bias": (48,),
        "score.2.weight": (1, 48),
        "score.2.bias": (1,),
    },
    "Qwen2ForProcessRewardModel": {
        "score.0.weight": (48, 48),
        "score.0.bias": (48,),
        "score.2.weight": (2, 48),
        "score.2.bias": (2,),
    },
}


def write_reward(folder: Path, architecture: str, *, stray: bool = False, **config: Any) -> Path:
    """Write a backbone with the prefix ``model.``, the head of ``architecture`` and a chat template.

    InternLM2's reward token and Qwen's step token are appended to the vocabulary. ``stray`` keeps the language model's
    head, as Qwen's files do.
    """
    import torch

    intern = architecture.startswith("InternLM2")
    # The reward is read at the last token, so no special token follows a text.
    template = "<s> $A" if intern else "$A"
    family = "internlm2" if intern else "qwen2"
    write_checkpoint(folder, family, wrapped=True, template=template, config=config)
    tensors = add_tokens(folder, ("<|im_start|>", "<|im_end|>", REWARD if intern else STEP), added=True)
    if not stray:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("output.weight", "lm_head.weight")}
    generator = torch.Generator().manual_seed(7)
    for name, shape in _HEADS[architecture].items():
        tensors[name] = torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)
    save(tensors, folder)
    edit_json(folder / "config.json", architectures=[architecture])
    if intern:
        edit_json(folder / "config.json", reward_token_id=token_id(folder, REWARD))
    (folder / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    return folder


def write_language_model(folder: Path, family: str, tokens: Sequence[str], **options: Any) -> Path:
    """Write a ``*ForCausalLM`` with its head; ``tokens`` are appended to the vocabulary."""
    write_checkpoint(folder, family, wrapped=True, **options)
    save(add_tokens(folder, tokens, added=True), folder)
    return folder


def token_id(folder: Path, token: str) -> int:
    """A token's id, read with the tokenizers library only."""
    from tokenizers import Tokenizer

    number: int | None = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(token)
    assert number is not None
    return number


def save(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
