"""sentence-transformers' layouts, old and new: modules.json and the files that it lists.

Every listed module is run, in order, or refused by name: skipping one would give wrong vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

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
from millpond.checkpoints.layouts.static import StaticTable, is_model2vec, read_model2vec, read_static
from millpond.checkpoints.modules import Codes, Dense, Head, LayerNorm, Normalize, Pooling
from millpond.checkpoints.resolve import read_json, read_json_object
from millpond.checkpoints.unserved import MODULES, unserved
from millpond.errors import ModelLoadError
from millpond.tasks import SIMILARITIES, Role, Similarity
from millpond.values.spec import PoolingMode

# In the order in which sentence-transformers concatenates the modes of an old config.
_OLD_MODES: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_NEW_MODES: dict[str, PoolingMode] = {"mean_sqrt_len_tokens": "mean_sqrt_len"}
_TRANSFORMER_CONFIGS = ["sentence_bert_config.json"] + [
    f"sentence_{name}_config.json" for name in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
# ``model_type`` of a late-interaction checkpoint, PyLate's and sentence-transformers'.
_LATE = ("ColBERT", "MultiVectorEncoder")
# jina-embeddings-v3's own Transformer chooses an adapter, which the engine does here.
_WITH_ADAPTERS = "custom_st.Transformer"
_CODES = "st_quantize.FlexibleQuantizer"  # pplx-embed's own module


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """A checkpoint's pipeline: backbone, heads on tokens, pooling, heads on the pooled row, final normalization."""

    transformer: Path  # folder of the backbone
    token_heads: tuple[Dense, ...] = ()  # run on every token row before pooling
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
    if is_model2vec(stored) or (modules and modules[0][0] == "StaticEmbedding"):
        given = {**read_prompts(settings, folder), "similarity": _read_similarity(settings, folder)}
        return _static_layout(modules, folder, stored, given, settings.get("truncate_dim"))
    if modules and [name for name, _ in modules] == ["SparseStaticEmbedding"]:
        weights = read_static_weights(modules[0][1])
        most = _most_entries(settings, folder)
        return PipelineLayout(
            transformer=modules[0][1], sparse=weights, most_entries=most, **read_prompts(settings, folder)
        )
    if names and names[-1] == "SparseAutoEncoder":
        code, chain = read_sparse_code(modules[-1][1]), _read_chain(modules[1:-1], listed)
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
        **_read_chain(modules[1:], listed),
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
    truncate_dim: int | None,
) -> PipelineLayout:
    """A table of token vectors and the modules after its mean; model2vec's config.json says whether it normalizes."""
    listed = folder / "modules.json"
    after = [module for module in modules[1:] if module[0] != "Dropout"]
    wrong = next((name for name, _ in after if name not in ("Dense", "LayerNorm", "Normalize")), None)
    if wrong is not None:
        raise ModelLoadError(
            f"{listed} lists {wrong} after StaticEmbedding, which millpond does not run "
            "(it runs Dense, LayerNorm, Normalize and Dropout there); refusing to skip it"
        )
    heads = [read_head(name, place, listed) for name, place in after]
    normalize = bool(heads) and isinstance(heads[-1], Normalize)
    table = read_model2vec(folder, config) if is_model2vec(config) else read_static(modules[0][1])
    return PipelineLayout(
        transformer=table.folder,
        pooling=Pooling(modes=("mean",)),
        heads=tuple(heads[:-1] if normalize else heads),
        normalize=bool(config.get("normalize", normalize)) if table.model2vec else normalize,
        max_seq_length=table.length,
        **given,
        truncate_dim=truncate_dim,
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
    if modules[0][0] not in ("Transformer", "StaticEmbedding", "SparseStaticEmbedding") and [
        name for name, _ in modules
    ] != [
        "MLMTransformer",
        "SpladePooling",
    ]:
        raise ModelLoadError(
            f"{listed} begins with {modules[0][0]}, which millpond does not run; "
            "of first modules it runs Transformer and StaticEmbedding"
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


def _read_chain(modules: list[tuple[str, Path]], listed: Path) -> dict[str, Any]:
    """Everything after the backbone, as fields of :class:`PipelineLayout`."""
    if not modules and not listed.is_file():
        return {}
    token_heads: list[Dense] = []
    heads: list[Head] = []
    pooling: Pooling | None = None
    for name, folder in modules:
        if name == "Dropout":
            continue
        if pooling is not None:
            heads.append(read_head(name, folder, listed))
        elif name == "Pooling":
            pooling = read_pooling(folder)
        elif name == "Dense":
            token_heads.append(read_dense(folder, "token_embeddings"))
        else:
            raise _not_run(name, "before", listed)
    if pooling is None:
        raise ModelLoadError(f"{listed} lists no Pooling, and no Dense on tokens either, so it describes no embedder")
    normalize = bool(heads) and isinstance(heads[-1], Normalize)
    return {
        "token_heads": tuple(token_heads),
        "pooling": pooling,
        "heads": tuple(heads[:-1] if normalize else heads),
        "normalize": normalize,
    }


def read_head(name: str, folder: Path, listed: Path, *, output: str | None = None) -> Head:
    """A module after the pooling; a Dense may write ``output``."""
    if name == "Dense":
        return read_dense(folder, "sentence_embedding", output=output)
    if name == "Normalize":
        return read_normalize(folder)
    if name == "Codes":
        return Codes()
    if name != "LayerNorm":
        raise _not_run(name, "after", listed)
    config = read_json_object(folder / "config.json")
    width = config.get("dimension", config.get("embedding_dimension"))
    if not isinstance(width, int):
        raise ModelLoadError(f"{folder / 'config.json'} must give dimension as an int")
    return LayerNorm(folder=folder, dimensions=width)


def _not_run(name: str, place: str, listed: Path) -> ModelLoadError:
    return ModelLoadError(
        f"{listed} lists {name} {place} Pooling, which millpond does not run "
        "(it runs Transformer, Pooling, Dense, LayerNorm, Normalize and Dropout); refusing to skip it"
    )


def read_pooling(folder: Path) -> Pooling:
    """A Pooling module's config: ``pooling_mode`` (new) or the ``pooling_mode_*`` booleans (old)."""
    path = folder / "config.json"
    config = read_json_object(path)
    modes: list[PoolingMode] = []
    if "pooling_mode" in config:
        names = config["pooling_mode"]
        for name in [names] if isinstance(names, str) else names:
            mode = _NEW_MODES.get(name, name)
            if mode not in get_args(PoolingMode):
                raise ModelLoadError(f"{path}: pooling_mode {name!r} is unknown; millpond has {get_args(PoolingMode)}")
            modes.append(cast("PoolingMode", mode))
    else:
        unknown = [k for k, v in config.items() if k.startswith("pooling_mode_") and v and k not in _OLD_MODES]
        if unknown:
            raise ModelLoadError(f"{path}: {unknown[0]} is a pooling mode that millpond does not have")
        # As in sentence-transformers, a file that switches no mode on means the mean.
        modes = [mode for key, mode in _OLD_MODES.items() if config.get(key)] or ["mean"]
    if not modes:
        raise ModelLoadError(f"{path} switches every pooling mode off")
    return Pooling(modes=tuple(modes), include_prompt=bool(config.get("include_prompt", True)))


def read_dense(folder: Path, stage: str, *, unnamed: str = "sentence_embedding", output: str | None = None) -> Dense:
    """A Dense module's config.

    It must read ``stage`` and write the same or ``output``; ``unnamed`` is the stage of a config that names none.
    """
    path = folder / "config.json"
    config = read_json_object(path)
    reads = config.get("module_input_name") or unnamed
    writes = config.get("module_output_name") or reads
    if (reads, writes) not in ((stage, stage), (stage, output)):
        raise ModelLoadError(f"{path}: a Dense from {reads} to {writes} does not fit its place; it must be on {stage}")
    try:
        widths = int(config["in_features"]), int(config["out_features"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{path} must give in_features and out_features as ints") from error
    activation = config.get("activation_function") or "torch.nn.modules.activation.Tanh"
    if not str(activation).startswith("torch.nn."):
        raise ModelLoadError(f"{path}: activation_function {activation!r} is code of the checkpoint's own; refusing it")
    return Dense(
        folder=folder,
        in_features=widths[0],
        out_features=widths[1],
        bias=bool(config.get("bias", True)),
        activation=str(activation),
        residual=bool(config.get("use_residual", False)),
    )


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


def read_normalize(folder: Path, stage: str = "sentence_embedding") -> Normalize:
    """A Normalize module's config; it must read ``stage``."""
    path = folder / "config.json"
    reads = read_json_object(path, optional=True).get("module_input_name") or "sentence_embedding"
    if reads != stage:
        raise ModelLoadError(f"{path}: a Normalize of {reads} in the place of one of {stage}; refusing to skip it")
    return Normalize()


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
