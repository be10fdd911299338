"""Checkpoint: a folder, its config with the user's overrides, and the pipeline that its files describe."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from millpond.checkpoints.adapter import merged
from millpond.checkpoints.gguf.tensors import LINK
from millpond.checkpoints.layouts.cross_encoder import CrossEncoder, is_cross_encoder, read_cross_encoder
from millpond.checkpoints.layouts.gliner import CONFIG as GLINER
from millpond.checkpoints.layouts.gliner import is_gliner2, read_gliner, read_gliner2
from millpond.checkpoints.layouts.kalm import is_kalm, read_kalm
from millpond.checkpoints.layouts.late_interaction import names_colbert
from millpond.checkpoints.layouts.latent_attention import with_latent_attention
from millpond.checkpoints.layouts.listwise import read_listwise
from millpond.checkpoints.layouts.sentence_transformers import (
    PipelineLayout,
    read_layout,
    stanford_layout,
    transformer_config,
)
from millpond.checkpoints.layouts.sparse import (
    SparseCode,
    Splade,
    StaticWeights,
    TokenVectors,
    TokenWeights,
    names_splade,
)
from millpond.checkpoints.layouts.static import static_config, weights_config
from millpond.checkpoints.modules import Convolution, Dense, LayerNorm, Lstm
from millpond.checkpoints.resolve import Source, read_json_object, resolve
from millpond.checkpoints.unserved import NAMES, unserved
from millpond.checkpoints.weight_checks import check_quantization, check_whole
from millpond.checkpoints.weights import check_config, check_pickles, check_weights
from millpond.errors import ModelLoadError, UnsupportedArchitectureError
from millpond.tasks import Role

# Keys of config.json that do not change a vector.
NOT_ARITHMETIC = ("is_matryoshka", "matryoshka_dimensions", "_name_or_path", "transformers_version")
# Classes of a checkpoint's own code for its config, and the `model_type` that they stand for.
_CODE_FAMILIES = {
    "XLMRobertaFlashConfig": "xlm-roberta",  # jina-reranker-v2-base-multilingual
    "MiniCPMConfig": "minicpm",  # MiniCPM-Embedding
}
# Arguments of a loader among them that are no fields of config.json.
_OF_THE_HUB = ("trust_remote_code", "revision", "code_revision", "token", "cache_dir", "subfolder", "local_files_only")
_TRANSFORMER_FILES = (
    "sentence_*_config.json wordembedding_config.json tokenizer*.json *tokenizer_config.json special_tokens_map.json "
    "added_tokens.json vocab.* merges.txt *.model *.tiktoken chat_template.jinja"
).split()


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything that a checkpoint's files describe; no weights."""

    source: Source  # where the files are
    config: Mapping[str, Any]  # config.json of the backbone, the user's `hf_overrides` merged in
    layout: PipelineLayout  # the pipeline around the backbone
    # How it scores pairs, if it is one of sentence-transformers' cross-encoders
    cross_encoder: CrossEncoder | None = None
    # The files that decide a vector, with what changes when one is written (size, time, inode), taken before any was
    # read; empty for a hub revision, which cannot change.
    files: Mapping[Path, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def architecture(self) -> str | None:
        """The first name in ``architectures``, if there is one."""
        names = self.config.get("architectures")
        return str(names[0]) if names else None

    def digest(self, *settings: object) -> str:
        """SHA-256, in hex, over the files that decide a vector and ``settings`` (what the engine overrides).

        A hub revision stands for its files; the files of a local folder are read whole.
        """
        whole = hashlib.sha256()
        config = {key: value for key, value in self.config.items() if key not in NOT_ARITHMETIC}
        if self.layout.late_interaction is not None:
            settings = (*settings, repr(self.layout.late_interaction))
        whole.update(json.dumps([config, settings], sort_keys=True, default=str).encode())
        if self.source.revision is not None:
            whole.update(f"{self.source.name}@{self.source.revision}".encode())
            return whole.hexdigest()
        self._check_unchanged()
        try:
            for path in self.files:
                whole.update(os.fspath(path.relative_to(self.source.folder)).encode() + b"\0")
                with path.open("rb") as file:
                    whole.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ModelLoadError(
                f"{self.source.name} cannot be read any more ({error}), so the fingerprint of what was loaded from it "
                "cannot be computed; load the model again from a folder that stays"
            ) from error
        self._check_unchanged()  # nor during the reading
        return whole.hexdigest()

    def _check_unchanged(self) -> None:
        before, now = self.files, _states(self.source.folder, self.layout.transformer)
        changed = sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
        if changed:
            raise ModelLoadError(
                f"{changed[0]} has changed since the model was loaded, so its fingerprint, which the cache and "
                "collections go by, cannot be computed any more; load the model again (and, to write new weights while "
                "an engine runs, write them to another folder)"
            )


def _states(folder: Path, transformer: Path) -> dict[Path, tuple[int, int, int]]:
    """The files that decide a vector, in order, with what changes when one is written."""
    patterns = ("*.safetensors", "*.bin", "*_linear.pt", "*.onnx", "*.onnx_data", LINK)
    try:
        weights = [path for name in patterns for path in (*folder.glob(name), *folder.glob(f"*/{name}"))]
        routed = [*folder.glob("router_config.json"), *folder.glob("idf.json"), *folder.glob(GLINER)]
        more = folder.glob("*/*.json") if routed else ()
        configs = [*routed, *more, *folder.glob("modules.json"), *folder.glob("[0-9]*/*.json")]
        of_transformer = [path for name in _TRANSFORMER_FILES for path in transformer.glob(name)]
        files = [path for path in sorted({*weights, *configs, *of_transformer}) if path.is_file()]
        return {path: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for path in files for stat in [path.stat()]}
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be read ({error}); is somebody writing to it?") from error


def read_checkpoint(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
    has_weights: bool = False,
    role: Role | None = None,
    cache: Path | None = None,
) -> Checkpoint:
    """Read the descriptions in a checkpoint's files, but no weights; ``has_weights``: check that there are some.

    ``role``: that of the texts, which a Router has modules for. ``cache``: where an adapter is merged into its base
    model; ``None``: in millpond's cache.
    """
    _check_name(os.fspath(model))
    source = merged(resolve(model, revision), hf_overrides, cache)
    labelled = None
    if (source.folder / GLINER).is_file():
        labelled = read_gliner(source.folder, source.name)
    elif is_gliner2(source.folder):
        labelled = read_gliner2(source.folder, source.name)
    pairs = read_cross_encoder(source.folder) if is_cross_encoder(source.folder) else None
    if labelled is not None:
        layout = PipelineLayout(transformer=labelled.folder, max_seq_length=labelled.max_tokens, gliner=labelled)
    elif is_kalm(source.folder):
        layout = PipelineLayout(transformer=source.folder)
    else:
        layout = read_layout(source.folder, role) if pairs is None else _layout_of(pairs)
    is_table = layout.static is not None or isinstance(layout.sparse, StaticWeights)
    if not is_table and labelled is None:
        check_config(layout.transformer, source)
    if has_weights:
        check_readable(layout, source)
    stored = read_json_object(layout.transformer / "config.json", optional=is_table or labelled is not None)
    stored = {**stored, **read_kalm(source.folder)}
    of_backbone = stored if labelled is None else labelled.config
    config = merge(merge(of_backbone, _module_overrides(layout.transformer)), hf_overrides or {})
    if config.get("model_type") is None and (family := _family_of_code(config)) is not None:
        config["model_type"] = family
    if not is_table:
        check_quantization(config, source.name)
    if isinstance(layout.sparse, StaticWeights):
        config = weights_config(layout.sparse)
    if layout.static is not None:
        config = static_config(layout.static, config)
    if isinstance(config.get("architectures"), str):
        config["architectures"] = [config["architectures"]]
    if names_colbert(config) and layout.late_interaction is None:
        layout = stanford_layout(layout, config)
    if not config.get("output_hidden_states"):  # without the other layers' states sentence-transformers takes the last
        layout = replace(layout, layer_mean=None)
    listwise = read_listwise(layout.transformer, config)
    if listwise is not None:
        layout = replace(layout, listwise=listwise[0], token_heads=listwise[1], normalize=False)
    layout = with_latent_attention(layout, config)
    if names_splade(config) and layout.sparse is None:
        layout = replace(layout, sparse=Splade(folder=layout.transformer))
    # Taken before tokenizer and weights are read, so that every later write is noticed.
    files = _states(source.folder, layout.transformer) if source.revision is None else {}
    instructions = config.get("task_instructions")  # jina's prompts, if sentence-transformers' files have none
    if not layout.prompts and isinstance(instructions, Mapping) and layout.late_interaction is None:
        layout = replace(layout, prompts={str(name): str(text) for name, text in instructions.items()})
    return Checkpoint(source=source, config=config, layout=layout, cross_encoder=pairs, files=files)


def _check_name(name: str) -> None:
    """Refuse a hub id, or a folder of such a name, that is known to hold no checkpoint, before it is fetched."""
    kind = unserved("/".join(Path(name).parts[-2:]), NAMES)
    if kind is not None:
        raise UnsupportedArchitectureError(f"{name} is {kind.kind}, which millpond does not run; {kind.nearest}")


def _module_overrides(folder: Path) -> Mapping[str, Any]:
    """Fields of config.json that the settings of a Transformer module replace, as sentence-transformers does."""
    settings = transformer_config(folder)
    given = settings.get("config_args", settings.get("config_kwargs"))  # the first: until sentence-transformers 5
    if given is not None and not isinstance(given, Mapping):
        raise ModelLoadError(f"{folder}: config_kwargs {given!r} of its Transformer module must be an object")
    return {key: value for key, value in (given or {}).items() if key not in _OF_THE_HUB}


def _family_of_code(config: Mapping[str, Any]) -> str | None:
    """The ``model_type`` that a config without one leaves to a class of its own code."""
    code = config.get("auto_map")
    named = code.get("AutoConfig") if isinstance(code, Mapping) else None
    return _CODE_FAMILIES.get(str(named).rpartition(".")[2])


def check_readable(layout: PipelineLayout, source: Source) -> None:
    """Raise ModelLoadError unless the weights of a pipeline are there, and no pickles without torch."""
    if not (isinstance(layout.sparse, StaticWeights) and layout.sparse.idf) and not _is_bag(layout):
        check_weights(layout.transformer, source)
    check_pickles(weights_of(layout))


def check_numbers(layout: PipelineLayout, source: Source) -> None:
    """Raise ModelLoadError if the weights of a pipeline are quantized; tables may be, in int8."""
    if layout.static is None and not isinstance(layout.sparse, StaticWeights):
        check_whole(weights_of(layout), source.name)


def weights_of(layout: PipelineLayout) -> list[Path]:
    """The folders and files with the weights of a pipeline, the backbone's first."""
    heads = (*layout.token_heads, *layout.heads)
    modules = [head.folder for head in heads if isinstance(head, Dense | LayerNorm | Convolution | Lstm)]
    modules += [] if layout.layer_mean is None else [layout.layer_mean.folder]
    code = [layout.sparse.folder] if isinstance(layout.sparse, SparseCode) else []
    beside = (layout.sparse, layout.token_vectors)
    files = [layer.path for layer in beside if isinstance(layer, TokenWeights | TokenVectors)]
    backbone = [] if _is_bag(layout) else [layout.transformer]
    return [*backbone, *modules, *code, *files]


def _is_bag(layout: PipelineLayout) -> bool:
    """Whether the first module is a BoW, whose weights are in its config.json."""
    return layout.static is not None and layout.static.bag is not None


def _layout_of(pairs: CrossEncoder) -> PipelineLayout:
    """The pipeline around a cross-encoder's backbone; its last head gives logits, so nothing is normalized."""
    return PipelineLayout(
        transformer=pairs.transformer,
        pooling=pairs.pooling,
        heads=pairs.heads,
        normalize=None if pairs.pooling is None else False,
        max_seq_length=pairs.max_seq_length,
        do_lower_case=pairs.do_lower_case,
        prompts=pairs.prompts,
    )


def merge(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the values of ``overrides``, nested objects merged key by key."""
    merged = dict(config)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
