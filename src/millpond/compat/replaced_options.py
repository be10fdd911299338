"""The options of the classes that the adapters replace, as the adapters' own.

What their documentation has is translated, a hint about resources is accepted and changes nothing, and all others are
refused with the page that says what to write. Read from sentence-transformers 6.2.0, langchain-huggingface 1.2.3,
langchain-community 0.4.2, langchain-qdrant 1.1.0, llama-index-core 0.14.25, llama-index-embeddings-huggingface 0.8.0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from millpond.checkpoints.resolve import hub_ids
from millpond.compat.prompts import BGE_QUERY_PROMPTS, ReplacedClass, bge_instruction
from millpond.errors import InvalidRequestError
from millpond.tasks import ROLES, Role
from millpond.values.replacements import instead_of

GUIDE = "docs/migrate/index.md"
"""The page that the refusals name."""

Kind = Literal["loading", "embedding", "scoring", "sparse"]
"""What an adapter does beside loading a model."""

# fastembed's sparse models without a vocabulary head. Compared in lower case.
_WORD_COUNTERS = ("qdrant/bm25", "qdrant/bm42-all-minilm-l6-v2-attentions", "qdrant/minicoil-v1")
_SECRETS = frozenset("token use_auth_token hf_token auth_token api_key huggingfacehub_api_token".split())
_PROMPT_KINDS = ("prompt", "prompt_name")
# What HuggingFaceEmbeddings ignored in encode_kwargs with multi_process=True.
_UNPOOLED = ("normalize_embeddings", "truncate_dim", *_PROMPT_KINDS)
# Keys of config_kwargs that choose between implementations of a checkpoint's code.
_IMPLEMENTATION = ("trust_remote_code", "attn_implementation", "use_memory_efficient_attention", "unpad_inputs")


def translate_options(
    options: Mapping[str, Any], *, own: Collection[str], kind: Kind = "loading", replaced: ReplacedClass | None = None
) -> dict[str, Any]:
    """The options as those of an adapter; ``own`` are its own, aliases included, and win over others of their name."""
    if replaced == "HuggingFaceEmbedding":  # "deprecated" is the default of what it no longer takes
        options = {name: value for name, value in options.items() if name != "class_name" and value != "deprecated"}
    translation = _Translation(options, own, replaced)
    if kind == "sparse" and (translation.model or "").lower() in _WORD_COUNTERS:
        raise InvalidRequestError(
            f"{translation.model} counts words, with the collection's statistics, and runs in fastembed only; keep "
            "FastEmbedSparse for it, or write model= a SPLADE checkpoint or BAAI/bge-m3 and embed the collection again"
        )
    translation.read(_RULES[kind])
    if kind == "embedding":
        translation.read_encoding()
    for key in ("model", "model_name") if kind == "scoring" and not translation.is_folder else ():
        name = translation.result.get(key)
        if isinstance(name, str) and (ids := hub_ids(name, scoring=True)) != hub_ids(name):
            translation.result[key] = ids[0]  # the engine would take the embedder of this name
    return translation.result


def hide_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with tokens and keys hidden, before the validator that translates, whose input pydantic prints."""
    return {
        name: "**********"
        if name in _SECRETS and isinstance(value, str)
        else hide_secrets(value)
        if name.endswith(("kwargs", "args")) and isinstance(value, Mapping)
        else value
        for name, value in options.items()
    }


def _refusal(source: str, value: object, known: Collection[str] = ()) -> InvalidRequestError:
    name = source.partition(" with ")[0].rpartition("[")[2].strip("']")
    return InvalidRequestError(
        f"{source}={value!r:.200} is not available here; {instead_of(name, frozenset(known))}. {GUIDE} says more"
    )


class _Translation:
    """The options of one adapter, as they are translated into ``result``."""

    def __init__(self, options: Mapping[str, Any], own: Collection[str], replaced: ReplacedClass | None) -> None:
        self.options = options
        self.own = own
        self.replaced = replaced
        model = options.get("model") or options.get("model_name") or options.get("model_name_or_path")
        self.model = os.fspath(model) if isinstance(model, str | os.PathLike) else None
        self.is_folder = self.model is not None and Path(os.path.expanduser(self.model)).is_dir()
        self.result: dict[str, Any] = {}
        self._sources: dict[str, str] = {}  # each translated option as the caller wrote it
        self.prompts: dict[str, str] = {}  # of model_kwargs
        self.default_prompt_name: str | None = None
        self.documents: dict[str, Any] = {}  # encode_kwargs
        self.queries: dict[str, Any] = {}  # query_encode_kwargs

    def read(self, rules: Mapping[str, _Rule]) -> None:
        """Read the arguments themselves: first the adapter's own, then the others."""
        foreign = {}
        for name, value in self.options.items():
            if name == "trust_remote_code" and value is True:
                continue  # a permission, which is not needed
            other = self.options.get({"model": "model_name", "model_name": "model"}.get(name, ""))
            if other is not None and (value is None or (name == "model_name" and value == other)):
                continue  # the model under its other name
            if name not in self.own:
                foreign[name] = value
            elif name != "dtype" or value is not None:
                self.result[name] = {"device": _device, "dtype": _plain}.get(name, lambda value: value)(value)
        self.nested("", foreign, rules)

    def nested(self, where: str, options: Any, rules: Mapping[str, _Rule]) -> None:
        """Read a dict of options, or of arguments if ``where`` is empty."""
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise InvalidRequestError(f"{where}={options!r} must be a dict of options")
        for name, value in options.items():
            source = f"{where}[{name!r}]" if where else name
            if name not in rules:
                raise _refusal(source, value, self.own)
            if value is not None:
                rules[name](self, source, value)

    def set(self, name: str, value: Any, source: str) -> None:
        """Set an option, unless the caller has set it to something else, too."""
        if name not in self.own:
            raise _refusal(source, value)
        if self.result.get(name) is None:
            self.result[name], self._sources[name] = value, f"{source}={value!r}"
        elif self.result[name] != value:
            first = self._sources.get(name, f"{name}={self.result[name]!r}")
            raise InvalidRequestError(f"{first} and {source}={value!r} contradict each other; pass one of them")

    def read_encoding(self) -> None:
        """Read ``encode_kwargs`` and ``query_encode_kwargs``, which replaces it for queries unless it is empty."""
        roles: dict[Role, tuple[str, dict[str, Any]]] = {
            "document": ("encode_kwargs", self.documents),
            "query": ("query_encode_kwargs", self.queries) if self.queries else ("encode_kwargs", self.documents),
        }
        for where, passed in dict(roles.values()).items():
            self.nested(where, passed, _ENCODING)
        told = {f"{where}[{name!r}]" for where, passed in roles.values() for name in _UNPOOLED if passed.get(name)}
        if told and self.options.get("multi_process"):  # it ignored them, so an existing index has none of them
            raise _refusal(f"multi_process with {', '.join(sorted(told))}", True)
        for role, (where, passed) in roles.items():
            if self.replaced == "HuggingFaceBgeEmbeddings" and any(map(passed.get, _PROMPT_KINDS)):
                raise _refusal(f"{where} with a prompt", passed)  # it stood before the class's own instruction
            self._prompt(role, where, passed)
        self._other_role()
        if self.prompts and not any(map(self._has_prompt, ROLES)):  # encode() never applied them
            raise _refusal("model_kwargs['prompts']", self.prompts)
        if self.documents.get("normalize_embeddings"):  # False leaves it to the checkpoint's modules
            self.set("normalize", True, "encode_kwargs['normalize_embeddings']")

    def _prompt(self, role: Role, where: str, passed: Mapping[str, Any]) -> None:
        """The prompt of one role, chosen as ``SentenceTransformer.encode`` chooses it."""
        if passed.get("prompt") is not None:
            self.set(f"{role}_prompt", passed["prompt"], f"{where}['prompt']")
            return
        source, name = f"{where}['prompt_name']", passed.get("prompt_name")
        if name is None:
            source, name = "model_kwargs['default_prompt_name']", self.default_prompt_name
        if name in self.prompts:
            self.set(f"{role}_prompt", self.prompts[name], source)
        elif name is not None:
            self.set(f"{role}_prompt_name", name, source)

    def _other_role(self) -> None:
        """A role without a prompt, beside one that has one, gets what the replaced class gave it."""
        if self.options.get("query_instruction") is not None and not self._has_prompt("document"):
            self.set("document_prompt", "", "the prompt of documents")
        chosen = any(each.get(kind) is not None for each in (self.documents, self.queries) for kind in _PROMPT_KINDS)
        for role in ROLES:
            if (chosen or self.default_prompt_name is not None) and not self._has_prompt(role):
                self.set(f"{role}_prompt_name", "", f"the prompt of a {role}")
            given = [f"{name}={self.result[name]!r}" for kind in _PROMPT_KINDS if self._has(name := f"{role}_{kind}")]
            if len(given) == 2:
                raise InvalidRequestError(f"{' and '.join(given)} contradict each other; pass one of them")

    def _has(self, name: str) -> bool:
        return self.result.get(name) is not None

    def _has_prompt(self, role: Role) -> bool:
        return any(self._has(f"{role}_{kind}") for kind in _PROMPT_KINDS)


_Rule = Callable[[_Translation, str, Any], None]
"""Reads one option: called with the translation, the option as the caller wrote it, and its value, never ``None``."""


def _plain(value: Any) -> Any:
    """A device or dtype of torch by its name, without importing torch; anything else as it is."""
    of_torch = type(value).__module__.partition(".")[0] == "torch"
    return str(value).removeprefix("torch.") if of_torch else value


def _device(value: Any) -> Any:
    """A device as millpond spells it; what is none is returned as it is, for the adapter to refuse."""
    if isinstance(value, list | tuple) and value:
        names = [_device(name) for name in value]
        return ",".join(dict.fromkeys(names)) if all(isinstance(name, str) for name in names) else value
    if type(value) is int and value >= 0:
        return f"cuda:{value}"
    return "auto" if value is None else _plain(value)


def _ignore(translation: _Translation, source: str, value: Any) -> None:
    """A hint about resources or appearance: it changes no vector."""


def _rename(name: str, read: Callable[[Any], Any] = lambda value: value) -> _Rule:
    """An option that has another name here, and its value as ``read`` spells it."""
    return lambda translation, source, value: translation.set(name, read(value), source)


def _one_of(meanings: Mapping[Any, tuple[str, Any] | None], read: Callable[[Any], Any] = lambda value: value) -> _Rule:
    """For each known value the option that it sets, or ``None`` if it changes nothing; others are refused."""

    def rule(translation: _Translation, source: str, value: Any) -> None:
        known = [meaning for key, meaning in meanings.items() if type(read(value)) is type(key) and read(value) == key]
        if not known:
            raise _refusal(source, value)
        if known[0] is not None:
            translation.set(*known[0], source)

    return rule


def _nested(name: str) -> _Rule:
    """A dict of options with rules of their own."""
    return lambda translation, source, value: translation.nested(source, value, _NESTED[name])


def _keep(attribute: str, kind: type) -> _Rule:
    """An option that is read together with others, at the end."""

    def rule(translation: _Translation, source: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise InvalidRequestError(f"{source}={value!r} must be a {kind.__name__}")
        setattr(translation, attribute, value)

    return rule


def _of_the_hub(translation: _Translation, source: str, value: Any) -> None:
    """The place of the hub's files is that of the environment, and means nothing for a folder."""
    if value is not False and not translation.is_folder:
        raise _refusal(source, value)


def _revision(translation: _Translation, source: str, value: Any) -> None:
    if not translation.is_folder:  # sentence-transformers does not read it for a folder, either
        translation.set("revision", value, source)


def _config_kwargs(translation: _Translation, source: str, value: Any) -> None:
    kept = {name: inner for name, inner in dict(value).items() if name not in _IMPLEMENTATION}
    if kept:
        translation.set("hf_overrides", kept, source)


def _show_progress(translation: _Translation, source: str, value: Any) -> None:
    if "show_progress" in translation.own:  # other adapters draw no bar
        translation.set("show_progress", value, source)


def _instruction(name: str) -> _Rule:
    """An instruction, which is put before the text as it is."""

    def rule(translation: _Translation, source: str, value: Any) -> None:
        # HuggingFaceEmbedding put its own prompt before queries of some models, in spite of an empty instruction.
        own_prompt = translation.replaced == "HuggingFaceEmbedding" and translation.model in BGE_QUERY_PROMPTS
        if not isinstance(value, str) or (source == "query_instruction" and value == "" and own_prompt):
            raise _refusal(source, value)
        # HuggingFaceBgeEmbeddings replaced every instruction of the caller's by the Chinese one.
        model = translation.model or ""
        fixed = translation.replaced == "HuggingFaceBgeEmbeddings" and "-zh" in model
        if fixed and source == "query_instruction" and value != bge_instruction(model):
            raise _refusal(source, value)
        translation.set(name, value, source)

    return rule


def _parallel_process(translation: _Translation, source: str, value: Any) -> None:
    devices = translation.options.get("target_devices")
    if value is True and devices is not None:
        translation.result["device"] = _device(devices)  # device is only where the model is loaded first


def _first_provider(value: Any) -> Any:
    """Of ONNX's places of execution, each a name or a name with its options, the first one counts."""
    first = value[0] if value else None
    return first[0] if isinstance(first, tuple) and first else first


def _activation_name(value: Any) -> str:
    path = value if isinstance(value, str) else (value if isinstance(value, type) else type(value)).__name__
    return path.rsplit(".", 1)[-1].lower()


def _tokenizer(translation: _Translation, source: str, value: Any) -> None:
    if value != translation.model:  # ColbertRerank names it beside the model
        raise _refusal(source, value)


_DTYPES: dict[str, tuple[str, str] | None] = {
    "auto": None,  # the default here, too; it is not the dtype of the files, either
    **dict.fromkeys(("float32", "float", "fp32"), ("dtype", "float32")),
    **dict.fromkeys(("float16", "half", "fp16"), ("dtype", "float16")),
    **dict.fromkeys(("bfloat16", "bf16"), ("dtype", "bfloat16")),
}
# Keys of the classes and of their model_kwargs, which are mixed with those of from_pretrained() in practice.
_LOADING: dict[str, _Rule] = {
    "model_name_or_path": _rename("model"),
    **{name: _rename("max_length") for name in ("max_length", "max_seq_length", "model_max_length")},
    **dict.fromkeys(("trust_remote_code", "attn_implementation", "low_cpu_mem_usage", "use_safetensors"), _ignore),
    **dict.fromkeys(("batch_size", "embed_batch_size", "padding_side", "similarity_fn_name"), _ignore),
    **dict.fromkeys(("threads", "parallel", "lazy_load"), _ignore),  # fastembed's
    **{name: _one_of({True: None}) for name in ("token", "use_auth_token")},  # that of the environment
    **dict.fromkeys(("cache_folder", "cache_dir", "local_files_only"), _of_the_hub),
    **dict.fromkeys(("dtype", "torch_dtype"), _one_of(_DTYPES, _plain)),
    **dict.fromkeys(("show_progress", "show_progress_bar"), _show_progress),
    **{name: _nested("loading") for name in ("model_kwargs", "tokenizer_kwargs", "processor_kwargs")},
    "config_kwargs": _config_kwargs,
    "revision": _revision,
    "device": _rename("device", _device),
    "providers": _one_of(
        {"CPUExecutionProvider": ("device", "cpu"), "CUDAExecutionProvider": ("device", "cuda")}, _first_provider
    ),
    "device_map": _one_of({"auto": None}),
    "backend": _one_of({"torch": None}),
    "truncation_side": _one_of({"right": None, "left": ("truncate", "start")}),
}
_EMBEDDING_MODEL: dict[str, _Rule] = {
    **_LOADING,
    "model_kwargs": _nested("model"),
    "prompts": _keep("prompts", dict),
    "default_prompt_name": _keep("default_prompt_name", str),
    "truncate_dim": _rename("dimensions"),
}
_EMBEDDING: dict[str, _Rule] = {
    **_EMBEDDING_MODEL,
    "encode_kwargs": _keep("documents", dict),
    "query_encode_kwargs": _keep("queries", dict),
    "normalize_embeddings": _one_of({False: None, True: ("normalize", True)}),
    "multi_process": _one_of({False: None, True: None}),
    "parallel_process": _parallel_process,
    "target_devices": _ignore,  # parallel_process reads it
    "query_instruction": _instruction("query_prompt"),
    **dict.fromkeys(("text_instruction", "embed_instruction"), _instruction("document_prompt")),
    "doc_embed_type": _one_of({"default": ("document_prompt", ""), "passage": None}),
}
# SentenceTransformer.encode.
_ENCODING: dict[str, _Rule] = {
    **dict.fromkeys(_PROMPT_KINDS, _ignore),  # read together, at the end
    **dict.fromkeys(("batch_size", "chunk_size", "convert_to_numpy", "convert_to_tensor"), _ignore),
    "normalize_embeddings": _one_of({False: None, True: None}),
    "show_progress_bar": _show_progress,
    "device": _rename("device", _device),
    "truncate_dim": _rename("dimensions"),
    "precision": _one_of({"float32": None}),
    "output_value": _one_of({"sentence_embedding": None}),
}
_SCORING: dict[str, _Rule] = {
    **_LOADING,
    **{name: _nested("scoring") for name in ("model_kwargs", "automodel_args", "cross_encoder_kwargs")},
    **dict.fromkeys(
        ("activation_fn", "default_activation_function"),
        _one_of({name: ("activation", name) for name in ("identity", "sigmoid", "softmax")}, _activation_name),
    ),
    "num_labels": _one_of({1: None}),
    "tokenizer": _tokenizer,
    "use_fp16": _one_of({False: ("dtype", "float32"), True: None}),
}
_SPARSE: dict[str, _Rule] = {
    **_LOADING,
    "cuda": _one_of({False: None, True: ("device", "cuda")}),
}
_RULES = {"loading": _LOADING, "embedding": _EMBEDDING, "scoring": _SCORING, "sparse": _SPARSE}
_NESTED = _RULES | {"model": _EMBEDDING_MODEL}
