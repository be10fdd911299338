"""sentence-transformers' layouts, old and new: modules.json and the files that it lists.

Every listed module is run, in order, or refused by name: skipping one would give wrong vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from millpond.checkpoints.layouts.chain import read_chain, read_dense, read_head, read_normalize
from millpond.checkpoints.layouts.gliner import Gliner
from millpond.checkpoints.layouts.late_interaction import LateInteraction, read_settings, read_stanford
from millpond.checkpoints.layouts.listwise import Listwise
from millpond.checkpoints.layouts.router import NAMES as ROUTERS
from millpond.checkpoints.layouts.router import read_router
from millpond.checkpoints.layouts.sparse import (
    Sparse,
    TokenVectors,
    read_sparse_code,
    read_splade,
    read_static_weights,
    read_token_vectors,
    read_token_weights,
)
from millpond.checkpoints.layouts.static import StaticTable, is_model2vec, read_model2vec, read_static, read_word_table
from millpond.checkpoints.modules import Dense, Head, LayerMean, Normalize, Pooling, TokenHead
from millpond.checkpoints.resolve import read_json, read_json_object
from millpond.checkpoints.unserved import MODULES, unserved
from millpond.errors import ModelLoadError
from millpond.tasks import SIMILARITIES, Role, Similarity

_TRANSFORMER_CONFIGS = ["sentence_bert_config.json"] + [
    f"sentence_{name}_config.json" for name in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
# ``model_type`` of a late-interaction checkpoint, PyLate's and sentence-transformers'.
_LATE = ("ColBERT", "MultiVectorEncoder")
# jina-embeddings-v3's own Transformer chooses an adapter, which the engine does here.
_WITH_ADAPTERS = "custom_st.Transformer"
_FIRST = ("Transformer", "StaticEmbedding", "SparseStaticEmbedding", "WordEmbeddings", "BoW")
_CODES = "st_quantize.FlexibleQuantizer"  # pplx-embed's own module


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """A checkpoint's pipeline: backbone, heads on tokens, pooling, heads on the pooled row, final normalization."""

    transformer: Path  # folder of the backbone
    layer_mean: LayerMean | None = None  # of several layers' states, in the place of the last one's
    token_heads: tuple[TokenHead, ...] = ()  # run on every token row before pooling
    pooling: Pooling | None = None  # `None` if the checkpoint does not name it
    heads: tuple[Head, ...] = ()  # run on the pooled row, up to the final Normalize
    normalize: bool | None = None  # whether the last module is Normalize; `None` if there is no list of modules
    max_seq_length: int | None = None  # most tokens of a text; `None`: the tokenizer's and the backbone's limit
    do_lower_case: bool = False  # texts are lower-cased before the tokenizer
    prompts: Mapping[str, str] = field(default_factory=dict)  # text put before an input, by name
    default_prompt_name: str | None = None  # the prompt that is used without one being named
    truncate_dim: int | None = None  # width that vectors are cut to by default
    similarity: Similarity = "cosine"  # how two vectors are compared
    # How a ColBERT reads queries and documents; `token_heads` give its vectors
    late_interaction: LateInteraction | None = None
    listwise: Listwise | None = None  # how a list of documents is read; `token_heads` give the rows to compare
    sparse: Sparse | None = None  # the head that weighs vocabulary entries; a SPLADE has no other output
    most_entries: int | None = None  # how many entries of a sparse vector are kept, the largest; `None`: all
    static: StaticTable | None = None  # a table of token vectors in the place of a backbone
    token_vectors: TokenVectors | None = None  # BGE-M3's projection for `token_embed`
    gliner: Gliner | None = None  # how it reads labels of the caller's, and which head scores them


def read_layout(folder: Path, role: Role | None = None) -> PipelineLayout:
    """The pipeline of a role's texts that ``folder`` describes; without modules.json, a bare backbone."""
    settings = read_json_object(folder / "config_sentence_transformers.json", optional=True)
    kind = settings.get("model_type", "SentenceTransformer")
    if kind not in ("SentenceTransformer", "SparseEncoder", *_LATE):
        raise ModelLoadError(
            f"{folder} is a {kind} checkpoint; this version of millpond embeds SentenceTransformer ones"
        )
    listed = folder / "modules.json"
    modules = read_modules(listed, role) if listed.is_file() else []
    transformer = modules[0][1] if modules else folder
    names = [name for name, _ in modules[1:]]
    stored = _readable_config(folder)
    first = modules[0][0] if modules else None
    if is_model2vec(stored) or first in ("StaticEmbedding", "BoW", "WordEmbeddings"):
        given = {**read_prompts(settings, folder), "similarity": _read_similarity(settings, folder)}
        given["truncate_dim"] = settings.get("truncate_dim")
        if first == "WordEmbeddings":
            table = read_word_table(*modules[0])
            chain = read_chain(modules[1:], listed, words=True)
            return PipelineLayout(transformer=transformer, **chain, **given, max_seq_length=table.length, static=table)
        return _static_layout(modules, folder, stored, given)
    if modules and [name for name, _ in modules] == ["SparseStaticEmbedding"]:
        weights = read_static_weights(modules[0][1])
        most = _most_entries(settings, folder)
        return PipelineLayout(
            transformer=modules[0][1], sparse=weights, most_entries=most, **read_prompts(settings, folder)
        )
    if names and names[-1] == "SparseAutoEncoder":
        code, chain = read_sparse_code(modules[-1][1]), read_chain(modules[1:-1], listed)
        if chain["normalize"]:  # before the code
            chain |= {"heads": (*chain["heads"], Normalize()), "normalize": False}
        return PipelineLayout(
            transformer=transformer,
            **chain,
            **read_transformer_settings(transformer),
            **read_prompts(settings, folder),
            sparse=code,
            most_entries=_most_entries(settings, folder) or code.most,
        )
    if modules and (kind == "SparseEncoder" or "SpladePooling" in names):  # no pooled vector, and so no heads
        return PipelineLayout(
            transformer=transformer,
            sparse=read_splade(modules, listed),
            most_entries=_most_entries(settings, folder),
            **read_transformer_settings(transformer),
            **read_prompts(settings, folder),
        )
    if kind in _LATE or ("Dense" in names and "Pooling" not in names):
        return _late_layout(modules, settings, folder)
    return PipelineLayout(
        transformer=transformer,
        **read_chain(modules[1:], listed),
        **read_transformer_settings(transformer),
        **read_prompts(settings, folder),
        truncate_dim=settings.get("truncate_dim"),
        similarity=_read_similarity(settings, folder),
        sparse=read_token_weights(folder, transformer),
        token_vectors=read_token_vectors(folder),
    )


def _most_entries(settings: Mapping[str, Any], folder: Path) -> int | None:
    """``max_active_dims``: how many entries of a sparse vector are kept; ``None``: all."""
    most = settings.get("max_active_dims")
    if most is not None and (type(most) is not int or most < 1):
        raise ModelLoadError(
            f"{folder / 'config_sentence_transformers.json'}: max_active_dims is {most!r}; it must be a positive int"
        )
    return most


def _read_similarity(settings: Mapping[str, Any], folder: Path) -> Similarity:
    """How the vectors of an embedder are compared; sentence-transformers' default is the cosine."""
    name = settings.get("similarity_fn_name") or "cosine"
    if name not in SIMILARITIES:
        raise ModelLoadError(
            f"{folder / 'config_sentence_transformers.json'}: similarity_fn_name {name!r} is not known; millpond "
            f"compares vectors by {', '.join(SIMILARITIES)}"
        )
    return cast("Similarity", name)


def _readable_config(folder: Path) -> dict[str, Any]:
    """config.json; empty if it cannot be read, which is said where the backbone is read."""
    try:
        return read_json_object(folder / "config.json", optional=True)
    except ModelLoadError:
        return {}


def _static_layout(
    modules: list[tuple[str, Path]],
    folder: Path,
    config: Mapping[str, Any],
    given: Mapping[str, Any],
) -> PipelineLayout:
    """A table of token vectors, or the words of a BoW, and the modules after it.

    model2vec's config.json says whether it normalizes.
    """
    listed = folder / "modules.json"
    after = [module for module in modules[1:] if module[0] != "Dropout"]
    wrong = next((name for name, _ in after if name not in ("Dense", "LayerNorm", "Normalize")), None)
    if wrong is not None:
        raise ModelLoadError(
            f"{listed} lists {wrong} after {modules[0][0]}, which millpond does not run "
            "(it runs Dense, LayerNorm, Normalize and Dropout there); refusing to skip it"
        )
    heads = [read_head(name, place, listed) for name, place in after]
    normalize = bool(heads) and isinstance(heads[-1], Normalize)
    if is_model2vec(config):
        table = read_model2vec(folder, config)
    else:
        table = read_word_table(*modules[0]) if modules[0][0] == "BoW" else read_static(modules[0][1])
    return PipelineLayout(
        transformer=table.folder,
        pooling=Pooling(modes=("mean",)),
        heads=tuple(heads[:-1] if normalize else heads),
        normalize=bool(config.get("normalize", normalize)) if table.model2vec else normalize,
        max_seq_length=table.length,
        **given,
        static=table,
    )


def read_modules(listed: Path, role: Role | None = None) -> list[tuple[str, Path]]:
    """(class name, folder) of each module, the Transformer first; of a Router those of the role's route."""
    content = read_json(listed)
    if not isinstance(content, list) or not content or not all(isinstance(entry, dict) for entry in content):
        raise ModelLoadError(f"{listed} must be a list of modules")
    entries = sorted(content, key=lambda entry: entry.get("idx", 0))
    modules = [(_class_name(entry, listed), listed.parent / entry.get("path", "")) for entry in entries]
    if modules[0][0] in ROUTERS:
        modules = [*_route(modules[0][1], role), *modules[1:]]
    # MLMTransformer is the old name of a Transformer with its language-model head.
    names = [name for name, _ in modules]
    if names[0] not in _FIRST and names != ["MLMTransformer", "SpladePooling"]:
        raise ModelLoadError(
            f"{listed} begins with {names[0]}, which millpond does not run; "
            "of first modules it runs Transformer, StaticEmbedding, WordEmbeddings and BoW"
        )
    return modules


def routes(folder: Path) -> dict[Role | None, str]:
    """The route of each role, and of texts without one, if the checkpoint has a Router and a route for them."""
    listed = folder / "modules.json"
    content = read_json(listed) if listed.is_file() else None
    if not isinstance(content, list) or not content or not isinstance(content[0], dict):
        return {}
    if str(content[0].get("type", "")).rsplit(".", 1)[-1] not in ROUTERS:
        return {}
    router = read_router(folder / content[0].get("path", ""))
    roles: tuple[Role | None, ...] = (None, "query", "document")
    return {role: route for role in roles if (route := router.route(role)) is not None}


def _route(folder: Path, role: Role | None) -> list[tuple[str, Path]]:
    """The modules of a role's route."""
    router = read_router(folder)
    route = router.route(role)
    if route is None:
        raise ModelLoadError(
            f"{router.path} has no route for {role or 'a text without a role'}: {list(router.structure)}"
        )
    entries = ({"type": router.types[name], "path": name} for name in router.structure[route])
    return [(_class_name(entry, router.path), folder / entry["path"]) for entry in entries]


def _class_name(entry: Mapping[str, Any], listed: Path) -> str:
    dotted = str(entry.get("type", ""))
    config = listed.parent / entry.get("path", "") / "config.json"
    if dotted == _WITH_ADAPTERS and read_json_object(config, optional=True).get("lora_adaptations"):
        return "Transformer"
    if dotted == _CODES:
        return "Codes"
    kind = unserved(dotted, MODULES)
    if kind is not None:
        raise ModelLoadError(f"{listed} names {dotted}: {kind.kind}, which millpond does not run; {kind.nearest}")
    if not dotted.startswith(("sentence_transformers.", "pylate.")):
        raise ModelLoadError(
            f"{listed} names {dotted or 'a module without type'}, which is code of the checkpoint's own, and millpond "
            "runs none"
        )
    return dotted.rsplit(".", 1)[-1]


def stanford_layout(layout: PipelineLayout, config: Mapping[str, Any]) -> PipelineLayout:
    """The layout of a plain repository that names itself a ColBERT, with Stanford's files read."""
    if layout.pooling is not None:
        raise ModelLoadError(
            f"{layout.transformer} is called a {config['architectures'][0]}, but its modules.json describes a pooled "
            "embedder; leave the override of architectures out"
        )
    late, projection = read_stanford(layout.transformer, config)
    return replace(
        layout, token_heads=(projection,), normalize=True, max_seq_length=late.longest, late_interaction=late
    )


def _late_layout(modules: list[tuple[str, Path]], settings: Mapping[str, Any], folder: Path) -> PipelineLayout:
    """PyLate's layout (Transformer and Dense, the rest implied) or MultiVectorEncoder's (every module listed)."""
    listed = folder / "modules.json"
    if not modules:
        raise ModelLoadError(f"{listed} is missing; is {folder} a complete checkpoint?")
    native = settings.get("model_type") == "MultiVectorEncoder"
    heads: list[Dense] = []
    mask: dict[str, Any] | None = None
    normalize = False
    for name, place in modules[1:]:
        if name == "Dense" and not normalize:
            heads.append(read_dense(place, "token_embeddings", unnamed="token_embeddings"))
        elif name == "MultiVectorMask" and mask is None:
            mask = read_json_object(place / "config.json")
        elif name == "Normalize":
            normalize = read_normalize(place, "token_embeddings") is not None
        elif name != "Dropout":
            raise ModelLoadError(
                f"{listed} lists {name} in a place where a {settings.get('model_type', 'ColBERT')} checkpoint has none "
                "that millpond runs (it runs Transformer, Dense, MultiVectorMask, Normalize and Dropout); "
                "refusing to skip it"
            )
    transformer = modules[0][1]
    late = read_settings(settings, transformer, mask, folder / "config_sentence_transformers.json")
    prompts = read_prompts(settings, folder)
    markers = {"query": late.query_marker, "document": late.document_marker}
    texts = {name: text.removeprefix(markers.get(name, "")) for name, text in prompts["prompts"].items()}
    transformer_settings = read_transformer_settings(transformer)
    return PipelineLayout(
        transformer=transformer,
        token_heads=tuple(heads),
        normalize=normalize or not native,
        **transformer_settings | {"max_seq_length": late.longest or transformer_settings.get("max_seq_length")},
        **prompts | {"prompts": texts},
        truncate_dim=settings.get("truncate_dim"),
        late_interaction=late,
    )


def read_transformer_settings(folder: Path) -> dict[str, Any]:
    """Length limit and lower-casing of a Transformer module, as fields of :class:`PipelineLayout`."""
    config = transformer_config(folder)
    limit, lower = config.get("max_seq_length"), bool(config.get("do_lower_case", False))
    return {"max_seq_length": limit, "do_lower_case": lower}


def transformer_config(folder: Path) -> dict[str, Any]:
    """A Transformer module's settings, from the first of its files that exists."""
    path = next((folder / name for name in _TRANSFORMER_CONFIGS if (folder / name).is_file()), None)
    return {} if path is None else read_json_object(path)


def read_prompts(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Prompts and the name of the default one, as fields of :class:`PipelineLayout`."""
    path, prompts = folder / "config_sentence_transformers.json", settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelLoadError(f"{path}: prompts must map names to texts")
    default = settings.get("default_prompt_name")
    if default is not None and default not in {"query", "document", *prompts}:
        raise ModelLoadError(f"{path}: default_prompt_name {default!r} is none of {sorted(prompts)}")
    return {"prompts": prompts, "default_prompt_name": default}
