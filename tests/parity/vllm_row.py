"""Rows of the comparison with vLLM, and functions that write their checkpoints.

vLLM's CPU attention requires head sizes of 32, 64, ..., so these models are 64 wide with two heads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.tiny import SENTENCES, edit_json, write_checkpoint
from tests.tiny.checkpoints import token_id

LONG = 512  # tokens; enough for a reranker's template with these small vocabularies
# Texts of one token, of several, in other scripts, and longer than the limit.
TEXTS = (
    "a",
    "How deep is it?",
    SENTENCES[0],
    "The wheel.",
    SENTENCES[4] + " Ein Teich, une étang, 池。",
    " ".join(SENTENCES[1:8]),
    SENTENCES[1],
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One checkpoint with one task.

    Attributes:
        name: Name of the test.
        task: vLLM's task: ``embed``, ``token_embed``, ``classify``, ``token_classify`` or ``score``.
        write: Writes the checkpoint in its hub layout into a folder.
        inputs: Texts, or pairs for ``score``.
        vllm: Options of ``vllm.LLM``.
        params: Arguments of vLLM's ``PoolingParams``.
        template: Chat template for vLLM, which does not know the model's own.
        ours: millpond's task, if its name differs from vLLM's.
        last: Compare the last row only: vLLM returns a reward for every token, and the last one is the text's.
        call: Options of the engine's method.
        step: The token after each step, whose id vLLM gets as an option.
        configuration: Name of the remote config class that vLLM requires; the class itself is empty.
        configured_as: transformers' config class that it derives from.
        mistake: Changed fields of config.json, whose effect the comparison must detect.
        mistaken_call: Changed options of the engine's method, whose effect the comparison must detect.
    """

    name: str
    task: str
    write: Callable[[Path], Path]
    inputs: Sequence[Any] = TEXTS
    vllm: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    ours: str = ""
    last: bool = False
    call: Mapping[str, Any] = field(default_factory=dict)
    step: str = ""
    configuration: str = ""
    configured_as: str = "PretrainedConfig"
    mistake: Mapping[str, Any] = field(default_factory=dict)
    mistaken_call: Mapping[str, Any] | None = None

    def job(self, folder: Path) -> dict[str, Any]:
        """The row in the oracle's input format."""
        options = {"max_model_len": LONG if self.template else 64, **self.vllm}
        if self.step:
            options["pooler_config"] = {"step_tag_id": token_id(folder, self.step)}
        if self.configuration:
            folder = _with_configuration(folder, self.configuration, self.configured_as)
            options["trust_remote_code"] = True
        return {
            "name": self.name,
            "folder": str(folder),
            "task": self.task,
            "inputs": [list(item) if isinstance(item, tuple) else item for item in self.inputs],
            "options": options,
            "params": dict(self.params),
            "template": self.template,
        }


def _with_configuration(folder: Path, name: str, base: str) -> Path:
    """A copy of ``folder`` for vLLM, with a remote config class of this name."""
    copy = folder.with_name(f"{folder.name}-with-configuration")
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    (copy / "configuration_tiny.py").write_text(
        f"from transformers import {base}\n\n\nclass {name}({base}):\n    model_type = {config['model_type']!r}\n",
        encoding="utf-8",
    )
    edit_json(copy / "config.json", auto_map={"AutoConfig": f"configuration_tiny.{name}"})
    return copy


def plain(family: str, size: Mapping[str, Any], **options: Any) -> Callable[[Path], Path]:
    config = {**size, **options.pop("config", {})}
    return lambda folder: write_checkpoint(folder, family, config=config, **options)


def nomic(folder: Path) -> Path:
    """Write a NomicBert as on the hub: config.json has the widths under GPT-2's names only."""
    widths = {"hidden_size": 64, "num_attention_heads": 2}
    write_checkpoint(folder, "nomic", config={**widths, "n_embd": 64, "n_head": 2})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in widths}
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return folder
