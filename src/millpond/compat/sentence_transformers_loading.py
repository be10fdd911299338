"""The options that fetch and load a checkpoint: of sentence-transformers' models and transformers' from_pretrained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from millpond.compat.option_translation import (
    OptionTranslation,
    Rule,
    device_text,
    dtype_text,
    flag,
    ignore,
    mapping,
    nested,
    only,
    positive,
    refuse,
    rename,
)
from millpond.errors import InvalidRequestError


def show_progress(translation: OptionTranslation, source: str, value: Any) -> None:
    """A progress bar, for adapters that draw one."""
    if "show_progress" in translation.own:
        translation.set("show_progress", flag(source, value), source)


def device(translation: OptionTranslation, source: str, value: Any) -> None:
    """Where the model runs."""
    translation.set("device", device_text(value), source)


def _device_map(translation: OptionTranslation, source: str, value: Any) -> None:
    if isinstance(value, dict):
        if set(value) != {""}:
            refuse(
                "a model is never split over devices",
                'write device=["cuda:0", "cuda:1"] instead, for a copy on each',
            )(translation, source, value)
        value = value[""]
    if value not in ("auto", "balanced", "balanced_low_0", "sequential"):
        translation.set("device", f"cuda:{value}" if isinstance(value, int) else device_text(value), source)


def _dtype(translation: OptionTranslation, source: str, value: Any) -> None:
    name = dtype_text(value)
    if name == "auto":
        return  # as the default here, which is not the dtype of the files, either
    if name not in ("float32", "float16", "bfloat16"):
        refuse("a model runs in float32, float16 or bfloat16", 'write dtype="float32" instead')(
            translation, source, value
        )
    translation.set("dtype", name, source)


def _backend(translation: OptionTranslation, source: str, value: Any) -> None:
    if value not in ("torch", "ipex"):  # HuggingFaceEmbeddings takes ipex for torch, too
        refuse(
            "millpond runs the checkpoint's own weights by torch and its own kernels",
            'leave it out, and write dtype="bfloat16" or quantization="int8" for speed',
        )(translation, source, value)


def _token(translation: OptionTranslation, source: str, value: Any) -> None:
    if value is True:
        return  # the token of the environment, or the saved one: as without the option
    line = "HF_HUB_DISABLE_IMPLICIT_TOKEN=1" if value is False else "HF_TOKEN"
    raise InvalidRequestError(
        f"{source} is not an option here, since options are serialized: set the environment variable {line} before "
        "Python starts, and leave it out"
    )


def _cache_folder(translation: OptionTranslation, source: str, value: Any) -> None:
    """Where the hub's files are: of no meaning for a folder, and else that of the environment."""
    if translation.is_folder:
        return
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if path is None or Path(path).expanduser().absolute() != _hub_cache().absolute():
        refuse(
            "the place of the hub's files is that of the environment",
            f"set HF_HUB_CACHE={path or '...'} before Python starts, and leave it out",
        )(translation, source, value)


def _hub_cache() -> Path:
    """The hub's cache, as huggingface_hub finds it."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(cache)).expanduser()


def _local_files_only(translation: OptionTranslation, source: str, value: Any) -> None:
    if not flag(source, value) or os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE:
        return
    if not translation.is_folder:
        refuse("it is the environment's", "set HF_HUB_OFFLINE=1 before Python starts, and leave it out")(
            translation, source, value
        )


_TRUE = ("1", "ON", "YES", "TRUE")


def _config_kwargs(translation: OptionTranslation, source: str, value: Any) -> None:
    """What is merged into config.json, but for what is no key of it."""
    passed = dict(mapping(source, value))
    rules = _HUB | _CONFIG_HINTS
    translation.nested(source, {name: inner for name, inner in passed.items() if name in rules}, rules)
    overrides = {name: inner for name, inner in passed.items() if name not in rules}
    if overrides:
        translation.set("hf_overrides", overrides, source)


def _truncation_side(translation: OptionTranslation, source: str, value: Any) -> None:
    if value == "left":
        translation.set("truncate", "start", source)
    elif value != "right":
        raise InvalidRequestError(
            f'{source}={value!r} must be "right" or "left"; write truncate="end" or "start" instead'
        )


def _revision(translation: OptionTranslation, source: str, value: Any) -> None:
    if not translation.is_folder:  # sentence-transformers does not read it for a folder, either
        translation.set("revision", value, source)


_EIGHT_BITS = 'write quantization="int8" instead'

# Where the files of a checkpoint come from.
_HUB: dict[str, Rule] = {
    "revision": _revision,
    "trust_remote_code": ignore,
    "code_revision": ignore,
    "token": _token,
    "use_auth_token": _token,
    "local_files_only": _local_files_only,
    "cache_dir": _cache_folder,
    "force_download": only(False, reason="files are fetched once", line="leave it out"),
}
# Keys of config.json for the code of a checkpoint that choose between implementations.
_CONFIG_HINTS: dict[str, Rule] = {
    "attn_implementation": ignore,
    "use_memory_efficient_attention": ignore,
    "unpad_inputs": ignore,
}
# AutoModel.from_pretrained.
FROM_PRETRAINED: dict[str, Rule] = _HUB | {
    "dtype": _dtype,
    "torch_dtype": _dtype,
    "attn_implementation": ignore,
    "device_map": _device_map,
    "max_memory": ignore,
    "offload_folder": ignore,
    "low_cpu_mem_usage": ignore,
    "use_safetensors": ignore,
    "add_pooling_layer": ignore,
    "load_in_8bit": only(False, reason="weights are quantized by millpond itself", line=_EIGHT_BITS),
    "load_in_4bit": only(False, reason="weights are quantized by millpond itself", line=_EIGHT_BITS),
    "quantization_config": refuse("weights are quantized by millpond itself", _EIGHT_BITS),
    "variant": refuse("the files without a variant are read", 'leave it out, and write dtype="float16" instead'),
    "subfolder": refuse("a checkpoint is a folder", "pass that folder as model= instead"),
    "provider": refuse("it belongs to ONNX", "leave it out"),
    "file_name": refuse("it belongs to ONNX and OpenVINO", "leave it out"),
    "export": only(False, reason="it belongs to ONNX and OpenVINO", line="leave it out"),
}
# AutoTokenizer.from_pretrained.
_TOKENIZER: dict[str, Rule] = _HUB | {
    "model_max_length": rename("max_length"),
    "max_length": rename("max_length"),
    "truncation_side": _truncation_side,
    "truncation": only(True, reason="over-long texts are cut", line='write truncate="error" instead'),
    "padding": ignore,
    "padding_side": ignore,  # rows are packed, without padding
    "use_fast": ignore,
    "clean_up_tokenization_spaces": ignore,
}
# SentenceTransformer and CrossEncoder; some classes mix the arguments of from_pretrained into them.
LOADING: dict[str, Rule] = FROM_PRETRAINED | {
    "model_name_or_path": rename("model"),
    "device": device,
    "backend": _backend,
    "cache_folder": _cache_folder,
    "max_length": rename("max_length"),
    "max_seq_length": rename("max_length"),
    "model_card_data": ignore,
    "modules": refuse("modules are read from the checkpoint", "save them and pass the folder as model= instead"),
    "tokenizer_kwargs": nested(_TOKENIZER),
    "processor_kwargs": nested(_TOKENIZER),
    "tokenizer_args": nested(_TOKENIZER),
    "config_kwargs": _config_kwargs,
    "config_args": _config_kwargs,
    "batch_size": positive,
    "embed_batch_size": positive,
    "show_progress_bar": show_progress,
    "show_progress": show_progress,
}
