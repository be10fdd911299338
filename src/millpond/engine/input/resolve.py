"""Resolve: the options of a call, checked against the model before anything is queued, as a plan without gaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond.backends.backend import OutputSpec
from millpond.engine.input.model import LoadedModel
from millpond.engine.input.plan import EncodesPairs, Plan
from millpond.engine.input.validate import check_unicode
from millpond.errors import InvalidRequestError, UnsupportedTaskError
from millpond.tasks import SCORE_METHODS, TASKS, Role, ScoreMethod, ScoreType, Task
from millpond.values.inputs import Item, SpannedText
from millpond.values.params import PoolingParams, check_choice
from millpond.values.spec import ModelSpec
from millpond.vectors import matryoshka
from millpond.vectors.activations import by_width
from millpond.vectors.quantization import check_range

# The options that each task reads.
_ANY = frozenset("task truncate truncate_prompt_tokens".split())
_TEXT = _ANY | frozenset("role prompt prompt_name adapter".split())
_LOGITS = _ANY | frozenset({"activation"})
_VECTORS = _TEXT | frozenset("dimensions normalize".split())
_READS: dict[Task, frozenset[str]] = {
    "embed": _VECTORS | {"output_dtype", "long_texts"},
    "token_embed": _VECTORS | {"long_texts"},
    "sparse_embed": _TEXT,
    "classify": _LOGITS | {"prompt", "prompt_name", "labels", "template", "multi_label"},
    "token_classify": _LOGITS
    | {"aggregation", "step_tag_id", "returned_token_ids", "labels", "threshold", "nested", "multi_label"},
    "score": _LOGITS | {"instruction"},
    "reward": _LOGITS | {"step_tag_id", "returned_token_ids"},
}
# Columns of a vocabulary head in one call: more would be generation, and their rows stay in memory.
_MOST_COLUMNS = 256
# jina-embeddings-v3's names. vLLM merges text-matching into the weights; without a role it is the default here, too.
_ROLE_ADAPTERS: dict[Role | None, str] = {
    "query": "retrieval.query",
    "document": "retrieval.passage",
    None: "text-matching",
}


def check_task(task: Any, params: PoolingParams, loaded: LoadedModel) -> Task:
    """``task``, if the checkpoint serves it."""
    spec = loaded.spec
    if task not in TASKS:
        raise InvalidRequestError(f"task={task!r} is unknown; choose one of {', '.join(TASKS)}")
    apart = task == "score" and spec.score_type is not None  # two vectors score a pair; spec.tasks may not say so
    # The vocabulary head makes any language model a step reward model, if the caller names the entries.
    rows = params.returned_token_ids is not None and task in ("reward", "token_classify")
    if task not in spec.tasks and not apart and not (rows and loaded.language_head):
        raise UnsupportedTaskError(
            f"{spec.name} ({spec.architecture}) serves {', '.join(sorted(spec.tasks))}, not {task}; "
            f"load another model{_way_out(task, loaded)}"
        )
    checked: Task = task
    return checked


def check_params(task: Any, params: PoolingParams) -> None:
    """Refuse anything but PoolingParams, such as a dict, and those of another task."""
    if not isinstance(params, PoolingParams):
        raise TypeError(f"params is a {type(params).__name__}; pass millpond.PoolingParams(...)")
    if params.task is not None and params.task != task:
        raise InvalidRequestError(f"params.task={params.task!r} contradicts the task {task!r} of this call")


def _way_out(task: Task, loaded: LoadedModel) -> str:
    spec = loaded.spec
    if task == "reward" and loaded.language_head:
        return ", or pass returned_token_ids: the vocabulary entries whose logits are rewards"
    if task in ("embed", "token_embed") or (task == "score" and "sparse_embed" in spec.tasks):
        return ', or this one with convert="embed"'
    if task == "score" and spec.labels:
        return f" (a score is one number, and this head has {len(spec.labels)}: {', '.join(spec.labels[:4])})"
    if task in ("classify", "score") and not spec.labels:
        return ', or this one with convert="classify" if it has a classification head'
    return ""


def check_method(method: ScoreMethod, loaded: LoadedModel, *, ranking: bool = False) -> ScoreType | None:
    """How ``method`` scores a pair with this checkpoint."""
    if method == "auto":
        return loaded.spec.rerank_type if ranking else loaded.spec.score_type
    check_choice("method", method, SCORE_METHODS)
    spec = loaded.spec
    task: Task = "token_embed" if method == "maxsim" else "embed"
    if task not in spec.tasks:
        compared = "token vectors" if method == "maxsim" else "vectors"
        auto = "choose method='auto', " if spec.score_type else ""
        raise UnsupportedTaskError(
            f"method={method!r} compares {compared}, and {spec.name} ({spec.architecture}) serves "
            f"{', '.join(sorted(spec.tasks))}, not {task}; {auto}load another model{_way_out(task, loaded)}"
        )
    return "late-interaction" if method == "maxsim" else "bi-encoder"


def pairs_by(template: str, task: Task, method: ScoreMethod, loaded: LoadedModel) -> EncodesPairs:
    """A reader of the pairs of one call, by a template of the caller's."""
    if task != "score":
        raise InvalidRequestError(f"template means nothing to {task}; leave it out")
    score_type = check_method(method, loaded)
    if method != "auto":
        raise InvalidRequestError(f"method={method!r} reads no template; pass one of them only")
    if score_type != "cross-encoder":
        raise InvalidRequestError(f"{loaded.spec.name} scores by {score_type}, which reads no template; leave it out")
    return loaded.pairs_by(template)


def plan(
    task: Task, params: PoolingParams, loaded: LoadedModel, *, count: int, pairs: EncodesPairs | None = None
) -> Plan:
    """The plan of a call: ``params`` for ``task``, with every default filled in."""
    spec = loaded.spec
    if params.instruction is not None:
        check_unicode(params.instruction, "instruction")
    unread = sorted(params.given() - _READS[task])
    if unread:
        raise InvalidRequestError(f"{unread[0]}={getattr(params, unread[0])!r} means nothing to {task}; leave it out")
    if params.long_texts == ("windows" if task == "embed" else "mean"):
        other = "mean" if task == "embed" else "windows"
        raise InvalidRequestError(
            f"long_texts={params.long_texts!r} means nothing to {task}; pass {other!r}, or leave it out"
        )
    for name in ("template", "multi_label", "threshold", "nested"):
        if name in params.given() and params.labels is None:
            raise InvalidRequestError(f"{name}={getattr(params, name)!r} means nothing without labels; leave it out")
    normalize = spec.normalize if params.normalize is None else params.normalize
    codes = task == "embed" and spec.codes and not normalize
    if not codes:
        check_range(params.output_dtype, count)
    output = _output(task, params, loaded)
    vectors = task in ("embed", "token_embed")
    colbert = loaded.encoder.colbert is not None and task == "token_embed"
    prompt = _prompt(params, spec, task) if "prompt" in _READS[task] else ""
    return Plan(
        task=task,
        output=output,
        form="colbert" if colbert else "text",
        role=(params.role or "document") if colbert else params.role,
        prompt=prompt,
        skip=loaded.encoder.texts.prompt_length(prompt) if prompt and not loaded.include_prompt else 0,
        limit=_limit(params, spec),
        truncate=loaded.encoder.texts.side if params.truncate == "auto" else params.truncate,
        width=_width(task, params, spec) if vectors else loaded.width(output),
        normalize=vectors and normalize,
        output_dtype=params.output_dtype,
        codes=codes,
        activation=_activation(task, params, loaded, output),
        instruction=params.instruction,
        aggregation=params.aggregation,
        step_tag_id=_step_tag(task, params, loaded),
        adapter=_adapter(params, spec) if "adapter" in _READS[task] else -1,
        shares=loaded.shares and task == "score",
        pairs=pairs,
        most_entries=loaded.most_entries if task == "sparse_embed" else None,
        first_kept=loaded.first_kept if task == "token_embed" and not colbert else 0,
    )


def _output(task: Task, params: PoolingParams, loaded: LoadedModel) -> OutputSpec:
    """The output of the task: the result to read from the hidden states."""
    tokens = params.returned_token_ids
    if tokens is None:
        return loaded.outputs[task]
    if not loaded.language_head and not loaded.spec.labels:
        raise InvalidRequestError(
            f"returned_token_ids={list(tokens)} picks columns of a vocabulary head, which {loaded.spec.name} "
            f"({loaded.spec.architecture}) does not have; leave it out"
        )
    columns = loaded.vocabulary if loaded.language_head else len(loaded.spec.labels)
    if max(tokens) >= columns:
        raise InvalidRequestError(
            f"returned_token_ids holds {max(tokens)}; the columns of {loaded.spec.name} run from 0 to {columns - 1}"
        )
    if not loaded.language_head:
        return OutputSpec(kind="token_logits", token_ids=tokens)
    if len(tokens) > _MOST_COLUMNS:
        raise InvalidRequestError(
            f"returned_token_ids asks for {len(tokens)} columns of the vocabulary; at most {_MOST_COLUMNS} are computed"
        )
    return OutputSpec(kind="head_rows", token_ids=tokens)


def _activation(task: Task, params: PoolingParams, loaded: LoadedModel, output: OutputSpec) -> str:
    """The activation of logits; by default, rewards are raw and other tasks use the checkpoint's activation."""
    if task in ("embed", "token_embed", "sparse_embed"):
        return "identity"
    activation = task != "reward" if params.activation is None else params.activation
    if activation == "softmax" and loaded.width(output) == 1:
        raise InvalidRequestError(
            f"activation='softmax' of the one logit that {loaded.spec.name} has is 1 for every text; choose sigmoid"
        )
    if isinstance(activation, str):
        return activation
    if not activation:
        return "identity"
    return by_width(len(output.token_ids)) if output.token_ids else loaded.spec.activation


def _step_tag(task: Task, params: PoolingParams, loaded: LoadedModel) -> int | None:
    if task not in ("reward", "token_classify"):
        return None
    if params.step_tag_id is None:
        return loaded.spec.step_tag_id if task == "reward" else None
    if params.step_tag_id >= loaded.vocabulary:
        raise InvalidRequestError(
            f"step_tag_id={params.step_tag_id} is not a token; this model's ids run from 0 to {loaded.vocabulary - 1}"
        )
    if not loaded.outputs[task].per_token and params.returned_token_ids is None:
        raise InvalidRequestError(
            f"step_tag_id={params.step_tag_id} means nothing to {loaded.spec.name}, which rewards whole texts; "
            "leave it out"
        )
    return params.step_tag_id


def _adapter(params: PoolingParams, spec: ModelSpec) -> int:
    """Index of the adapter: the caller's, else the adapter for the role; -1 for none."""
    if params.adapter is not None:
        if params.adapter not in spec.adapters:
            known = ", ".join(spec.adapters) or "none"
            raise InvalidRequestError(f"adapter={params.adapter!r} is unknown to {spec.name}; it has {known}")
        return spec.adapters.index(params.adapter)
    name = _ROLE_ADAPTERS[params.role]
    return spec.adapters.index(name) if name in spec.adapters else -1


def check_spans(items: Sequence[Item], task: Task, plan: Plan, *, windows: bool = False) -> None:
    """Refuse texts with spans, except for plain token embeddings; with ``windows`` every item must have some."""
    bare = next((i for i, item in enumerate(items) if windows and not isinstance(item, SpannedText)), None)
    if bare is not None:
        raise InvalidRequestError(
            f"long_texts='windows' pools spans, and the text at index {bare} has none; pass spans"
        )
    if (plan.form == "colbert" or task != "token_embed") and SpannedText in set(map(type, items)):
        for i, item in enumerate(items):
            if isinstance(item, SpannedText):
                what = "a late-interaction checkpoint" if plan.form == "colbert" else task
                raise InvalidRequestError(
                    f"the text at index {i} has spans, which {what} does not pool; leave them out"
                )


def _prompt(params: PoolingParams, spec: ModelSpec, task: Task) -> str:
    """The caller's prompt, else the prompt by name, else the prompt for the role, else the checkpoint's default."""
    if params.prompt is not None:
        check_unicode(params.prompt, "prompt")
        return params.prompt
    if params.prompt_name is not None:
        if params.prompt_name not in spec.prompts:
            known = ", ".join(sorted(spec.prompts)) or "none"
            raise InvalidRequestError(
                f"prompt_name={params.prompt_name!r} is not a prompt of {spec.name}; it has {known}"
            )
        return spec.prompts[params.prompt_name]
    if params.role is not None:
        # A role without a prompt gets none: the default prompt may be for the other role.
        return spec.role_prompt(params.role) or ""
    if params.adapter is not None:
        return spec.prompts.get(params.adapter, "")
    if task in ("classify", "token_classify"):
        return ""  # the checkpoint's prompts are for embeddings
    return spec.prompts.get(spec.default_prompt_name or "", "")


def _limit(params: PoolingParams, spec: ModelSpec) -> int:
    limit = params.truncate_prompt_tokens
    if limit is None or limit == -1:
        return spec.max_length
    if limit > spec.max_length:
        raise InvalidRequestError(
            f"truncate_prompt_tokens={limit} is more than {spec.name} reads ({spec.max_length}); "
            f"choose 1 to {spec.max_length}"
        )
    return limit


def _width(task: Task, params: PoolingParams, spec: ModelSpec) -> int:
    if task == "embed":
        return spec.check_dimensions(params.dimensions)
    return matryoshka.check(
        params.dimensions,
        native=spec.hidden_size,
        trained=spec.matryoshka,
        declared=spec.matryoshka_dimensions,
        model=spec.name,
        smallest=spec.matryoshka_smallest,
    )
