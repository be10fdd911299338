"""sentence-transformers' CrossEncoder layouts: how a repository scores a pair, as a description.

There are three kinds: a ``*ForSequenceClassification`` model alone, a language model scored by the logits of one or two
tokens (``LogitScore``), and a bare encoder followed by Pooling and Dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from millpond.checkpoints.classifiers import torch_activation
from millpond.checkpoints.layouts.chain import read_head, read_pooling
from millpond.checkpoints.layouts.kalm import is_kalm
from millpond.checkpoints.layouts.sentence_transformers import (
    read_modules,
    read_prompts,
    read_transformer_settings,
    transformer_config,
)
from millpond.checkpoints.modules import Head, Pooling
from millpond.checkpoints.resolve import read_json_object
from millpond.checkpoints.templates.chat_template import read_chat_template
from millpond.checkpoints.templates.score_template import ScoreTemplate
from millpond.errors import ModelLoadError

Kind = Literal["sequence-classification", "text-generation", "feature-extraction"]

# Options of apply_chat_template that are no variables of the template.
_NO_VARIABLES = frozenset(
    ("restore_suffix", "chat_template", "padding", "truncation", "max_length", "return_tensors", "tokenize")
)


@dataclass(frozen=True, kw_only=True)
class CrossEncoder:
    """A CrossEncoder repository."""

    transformer: Path  # folder of the backbone
    # Source of the logits: the model's own head (`sequence-classification`), the language model's logits of `tokens`
    # (`text-generation`), or `pooling` and `heads` (`feature-extraction`)
    kind: Kind = "sequence-classification"
    # `(false, true)`: the score is the difference of their logits; `(true,)`: the logit of this one
    tokens: tuple[int, ...] = ()
    pooling: Pooling | None = None  # pooling of a bare encoder
    heads: tuple[Head, ...] = ()  # run on the pooled row, in order; the last gives the logits
    # Renders the pair as a chat; `None`: pairs go through the tokenizer's pair template
    template: ScoreTemplate | None = None
    # Applied to the logits; `None`: by the number of labels (one: sigmoid, more: identity)
    activation: str | None = None
    prompt: str = ""  # put before every query by default, if there is no template
    prompts: Mapping[str, str] = field(default_factory=dict)
    max_seq_length: int | None = None
    do_lower_case: bool = False

    def activation_of(self, width: int) -> str:
        """The activation of ``width`` logits."""
        return self.activation or ("sigmoid" if width == 1 else "identity")


def is_cross_encoder(folder: Path) -> bool:
    """Whether the files in ``folder`` name it a cross-encoder of sentence-transformers, by modules of its own."""
    if is_kalm(folder):
        return False
    settings = read_json_object(folder / "config_sentence_transformers.json", optional=True)
    if "model_type" in settings:
        return bool(settings["model_type"] == "CrossEncoder")
    return (folder / "modules.json").is_file() and any(
        name == "LogitScore" for name, _ in read_modules(folder / "modules.json")
    )


def read_cross_encoder(folder: Path) -> CrossEncoder:
    """How the cross-encoder in ``folder`` scores a pair."""
    settings = read_json_object(folder / "config_sentence_transformers.json", optional=True)
    listed = folder / "modules.json"
    modules = read_modules(listed) if listed.is_file() else []
    transformer = modules[0][1] if modules else folder
    config = read_json_object(transformer / "config.json")
    module = transformer_config(transformer)
    kind = _kind(module, config, listed if modules else None)
    prompts = read_prompts(settings, folder)
    default = prompts["prompts"].get(prompts["default_prompt_name"], "")
    template = _template(module, transformer, instruction=default or None)
    return CrossEncoder(
        transformer=transformer,
        kind=kind,
        **_read_scoring(kind, modules, listed),
        template=template,
        activation=_activation(settings, config),
        prompt="" if template is not None else default,
        prompts=prompts["prompts"],
        **read_transformer_settings(transformer),
    )


def _kind(module: Mapping[str, Any], config: Mapping[str, Any], listed: Path | None) -> Kind:
    if listed is None:
        names = config.get("architectures") or [""]
        return "text-generation" if str(names[0]).endswith("ForCausalLM") else "sequence-classification"
    kind: Kind
    task = module.get("transformer_task", "feature-extraction")
    if task == "any-to-any":  # a language model that may read images too
        return "text-generation"
    for kind in ("sequence-classification", "text-generation", "feature-extraction"):
        if task == kind:
            return kind
    raise ModelLoadError(
        f"{listed}: its Transformer is for {module['transformer_task']!r}, from which millpond scores no "
        "pairs (it does from sequence-classification, text-generation and feature-extraction)"
    )


def _read_scoring(kind: Kind, modules: list[tuple[str, Path]], listed: Path) -> dict[str, Any]:
    """Everything after the backbone, as fields of :class:`CrossEncoder`."""
    following = [(name, path) for name, path in modules[1:] if name != "Dropout"]
    names = [name for name, _ in following]
    if kind == "sequence-classification" and not following:
        return {}
    if kind == "text-generation" and names == ["LogitScore"]:
        return {"tokens": _read_logit_score(following[0][1] / "config.json")}
    if kind == "text-generation" and not modules:
        return {}  # the tokens "yes" and "no", as in the rerankers' table
    if kind == "feature-extraction" and names[:1] == ["Pooling"] and names[-1] == "Dense":
        last = following[-1][1]
        heads = tuple(
            read_head(name, path, listed, output="scores" if path == last else None) for name, path in following[1:]
        )
        return {"pooling": read_pooling(following[0][1]), "heads": heads}
    raise ModelLoadError(
        f"{listed} lists {' and '.join(names) or 'nothing'} behind a Transformer for {kind}, which millpond does not "
        "run (it runs LogitScore behind text-generation, and Pooling with Dense last behind feature-extraction); "
        "refusing to skip it"
    )


def _read_logit_score(path: Path) -> tuple[int, ...]:
    config = read_json_object(path)
    true, false = config.get("true_token_id"), config.get("false_token_id")
    if not isinstance(true, int) or not isinstance(false, int | None):
        raise ModelLoadError(f"{path} must give true_token_id (and false_token_id, if any) as ints")
    if config.get("module_input_name", "causal_logits") != "causal_logits":
        raise ModelLoadError(f"{path} reads {config['module_input_name']!r}; it must be causal_logits")
    return (true,) if false is None else (false, true)


def _template(settings: Mapping[str, Any], folder: Path, *, instruction: str | None) -> ScoreTemplate | None:
    """The chat template, if the Transformer's settings say that pairs are messages."""
    message = (settings.get("modality_config") or {}).get("message")
    if message is None:
        return None
    options = (settings.get("processing_kwargs") or {}).get("chat_template") or {}
    variables = {key: value for key, value in options.items() if key not in _NO_VARIABLES}
    variant = options.get("chat_template") or "default"
    if "{" in variant:  # it is the source
        template = ScoreTemplate(source=variant, special_tokens=False, instruction=instruction, variables=variables)
    else:
        chat_template = read_chat_template(folder, variant=variant, instruction=instruction, variables=variables)
        if chat_template is None:
            raise ModelLoadError(f"{folder} reads pairs as messages, but has no chat template {variant!r}")
        template = chat_template
    if template.failure is not None:
        raise ModelLoadError(
            f"{folder} reads pairs as messages, but its chat template {template.failure}; pass a score_template"
        )
    return template


def _activation(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """The activation in the files, as sentence-transformers 6.x, 4.x and earlier versions write it, in this order."""
    dotted = (
        settings.get("activation_fn")
        or (config.get("sentence_transformers") or {}).get("activation_fn")
        or config.get("sbert_ce_default_activation_function")
    )
    # The number of logits is not known yet: 2 keeps a softmax as it is.
    return None if dotted is None else torch_activation(str(dotted), 2)
