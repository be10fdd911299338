"""Loading: an EngineConfig turned into a checked checkpoint and a runner on each device."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from millpond.backends.backend import OutputSpec
from millpond.backends.entity_head import EntityHead
from millpond.backends.kernel_check import KernelCheck
from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.architectures import STATIC, find
from millpond.checkpoints.build_spec import SpecOptions, build_spec, complete_layout, override_head
from millpond.checkpoints.checkpoint import Checkpoint, check_numbers, check_readable, read_checkpoint, weights_of
from millpond.checkpoints.description import ModelDescription
from millpond.checkpoints.families import remote_code
from millpond.checkpoints.families.native import translate, with_stored_vocabulary
from millpond.checkpoints.layouts.late_interaction import LateInteraction
from millpond.checkpoints.layouts.sentence_transformers import PipelineLayout
from millpond.checkpoints.layouts.sentence_transformers import routes as route_names
from millpond.checkpoints.layouts.sparse import StaticWeights
from millpond.checkpoints.resolve import Source
from millpond.checkpoints.task_detection import MISSING_TEMPLATE, DetectedTasks, detect_tasks
from millpond.checkpoints.templates.score_template import read_template, shipped_template
from millpond.checkpoints.tokenizers.read import read_tokenizer
from millpond.checkpoints.weight_checks import why_not_finite
from millpond.engine.execute.runner import Runner
from millpond.engine.input.encode import InputEncoder
from millpond.engine.input.entity_prompt import EntityPrompt
from millpond.engine.input.model import LoadedModel
from millpond.engine.input.pair_tokenizer import PairTokenizer, TemplateTokenizer
from millpond.engine.input.plan import EncodesPairs
from millpond.engine.tokenize.static_tokenizer import StaticTokenizer, without_specials
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.engine.tokenize.word_tokenizer import read_word_tokenizer
from millpond.errors import InvalidRequestError, ModelLoadError, UnsupportedArchitectureError
from millpond.support.cached_property import cached_property
from millpond.tasks import Role, Task
from millpond.values.config import EngineConfig
from millpond.values.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """A checkpoint in memory: its weights on each device."""

    model: LoadedModel  # description of the checkpoint and of its inputs
    source: Source  # where its files are
    weights: tuple[Path, ...]  # the folders and files of its weights
    runners: tuple[Runner, ...]  # one for each device
    dtype: str  # precision of the backbone, by name
    checks: tuple[KernelCheck, ...] = ()  # what the self-check compared; see :mod:`millpond.backends.kernel_check`
    entity_head: EntityHead | None = None  # of a GLiNER
    # What a Router sends the texts of a role to, where that is another model than for texts without a role
    routes: Mapping[Role, Replicas] = field(default_factory=dict)
    unrouted: frozenset[Role] = frozenset()  # roles that a Router has no route for

    @property
    def runner(self) -> Runner:
        """The first replica; all have the same weights."""
        return self.runners[0]

    @property
    def device(self) -> str:
        """Name of the device; several are joined by commas."""
        return ",".join(runner.model.device for runner in self.runners)

    @cached_property
    def why_not_finite(self) -> str:
        """Why a result is not finite, for people; reads all weights."""
        return why_not_finite(self.weights, self.dtype)

    def prepare(self, output: OutputSpec) -> None:
        """Read the weights of an output's vocabulary entries now, so that no batch waits for them."""
        for runner in self.runners:
            runner.model.prepare(output)


def describe(config: EngineConfig) -> ModelSpec:
    """The spec that an engine of this configuration would have; no weights are read."""
    return _read(config)[0].spec


def backend_of(config: EngineConfig) -> str:
    """The backend that an engine of this configuration would have, and why, for people; no weights are read."""
    from millpond.backends import choose

    try:
        description, _ = _read(config)
        check_readable(description.layout, description.checkpoint.source)
        check_numbers(description.layout, description.checkpoint.source)
        choice = choose.choose(description.checkpoint, description.architecture, config)
        choice = choose.choose_with_heads(choice, description, config)
    except ModelLoadError as error:
        return f"none here: {error}"
    return f"{choice.backend} ({choice.reason})"


def read_model(config: EngineConfig) -> LoadedModel:
    """What an engine of this configuration would know of its model and of its inputs; no weights are read."""
    return _model(*_read(config), device="cpu")


def load(config: EngineConfig, *, check: bool | None = None) -> Replicas:
    """Read, check and build; everything that config and tokenizer files decide is checked before weights are read.

    ``check``: whether to compare the kernels that the model may use with float32, those that were right before, too;
    by default those that were not compared yet, unless ``MILLPOND_SELF_CHECK=0`` is set.
    """
    base = _load(config, check, None)
    routes = route_names(base.source.folder)
    others = {role: _load(config, check, role) for role, route in routes.items() if role and route != routes.get(None)}
    for role, other in others.items():
        _check_route(role, other.model.spec, base.model.spec)
    roles: tuple[Role, ...] = ("query", "document")
    unrouted = frozenset(role for role in roles if routes and role not in routes)
    return replace(base, routes=others, unrouted=unrouted)


def _check_route(role: Role, other: ModelSpec, base: ModelSpec) -> None:
    """Refuse routes whose results cannot be compared."""
    if other.tasks != base.tasks or ("embed" in base.tasks and other.dimensions != base.dimensions):
        raise ModelLoadError(
            f"{base.name}: its Router's route for {role} serves {', '.join(sorted(other.tasks))} of "
            f"{other.dimensions} columns, and the default {', '.join(sorted(base.tasks))} of {base.dimensions}"
        )


def _load(config: EngineConfig, check: bool | None, role: Role | None) -> Replicas:
    """As :func:`load`, for the texts of a role."""
    checkpoint, architecture, layout = identify(config, has_weights=True, role=role)
    # The tokenizer is read without the GIL, meanwhile the backend is imported; what needs torch is said first.
    with ThreadPoolExecutor(1, thread_name_prefix="millpond-tokenizer") as thread:
        tokenizer = thread.submit(_tokenizer, checkpoint, architecture, layout)
        from millpond.backends import choose

        config = choose.resolve_quantization(checkpoint, architecture, config)
        choice = choose.choose(checkpoint, architecture, config)
        check_numbers(layout, checkpoint.source)
    description, encoder = _describe(checkpoint, architecture, layout, tokenizer.result(), config)
    loaded = choose.load(choice, description, config, check=check)
    return Replicas(
        source=checkpoint.source,
        weights=tuple(weights_of(layout)),
        model=_model(description, encoder, device=loaded.models[0].device),
        runners=tuple(map(Runner, loaded.models)),
        dtype=loaded.dtype,
        checks=loaded.checks,
        entity_head=None if layout.gliner is None else EntityHead(layout.gliner),
    )


def _model(description: ModelDescription, encoder: InputEncoder, *, device: str) -> LoadedModel:
    vectors, late = description.layout.token_vectors, description.layout.late_interaction
    gliner = description.layout.gliner
    return LoadedModel(
        spec=description.spec,
        encoder=encoder,
        include_prompt=description.pooling.include_prompt,
        vocabulary=int(description.checkpoint.config.get("vocab_size", 1 << 30)),
        outputs=_outputs(description.detected),
        language_head=description.has_language_head,
        listwise=description.layout.listwise,
        most_entries=description.layout.most_entries,
        first_kept=0 if vectors is None else 1,  # BGE-M3's code drops the first token's vector
        mean_maxsim=late is not None and late.similarity == "meanmaxsim",
        shares=_shares_prefixes(description, device),
        entities=None if gliner is None else EntityPrompt(gliner, encoder.texts),
    )


def _encoder(
    tokenizer: TextTokenizer,
    late: LateInteraction | None,
    detected: DetectedTasks,
    config: EngineConfig,
    *,
    decoder: bool,
) -> InputEncoder:
    """How the checkpoint reads; raises for a template that cannot be used.

    Pairs are read by the user's template, else the checkpoint's, else the tokenizer's own pair format.
    """
    pairs: EncodesPairs | None = None
    ranks = detected.score_type == "cross-encoder"
    if config.score_template is not None and not ranks:
        raise InvalidRequestError(
            f"score_template means nothing to {config.model}, which is not a cross-encoder; leave it out"
        )
    if ranks or "classify" in detected.tasks:  # classes of two texts, such as entailment
        template = detected.template if config.score_template is None else read_template(config.score_template)
        if template is None and detected.needs_template:
            raise UnsupportedArchitectureError(MISSING_TEMPLATE.format(config.model))
        if template is None and decoder:
            # The query followed by the document, which vLLM gives a decoder without a template.
            template = shipped_template("plain", special_tokens=True)
        pairs = (
            PairTokenizer(tokenizer, prompt=detected.prompt)
            if template is None
            else TemplateTokenizer(tokenizer, template, parts=detected.parts)
        )
    colbert = None
    if detected.score_type == "late-interaction" and late is not None:
        if config.max_length is not None:  # the user's max_length replaces the checkpoint's document length
            late = replace(late, document_length=config.max_length)
        colbert = tokenizer.colbert(late)
    return InputEncoder(texts=tokenizer, pairs=pairs, colbert=colbert)


def _shares_prefixes(description: ModelDescription, device: str) -> bool:
    """Whether pairs may share a prefix: in a causal model it does not depend on what follows, and the end is read.

    On a CPU only, where it was measured: the packed CUDA kernels would need separate keys for it.
    """
    head, config = description.detected.classifier, description.checkpoint.config
    row = description.architecture
    causal = row.decoder and not row.encodes_apart and config.get("is_causal", True) is not False
    bidirectional = bool(config.get("use_bidirectional_attention"))
    last = head is not None and head.pooling == "lasttoken"
    return device == "cpu" and causal and not row.recurrent and last and not bidirectional


def _outputs(detected: DetectedTasks) -> dict[Task, OutputSpec]:
    """The output of each task; ``ModelSpec.tasks`` lists the tasks that are served."""
    head = detected.classifier
    pooled, token_logits = OutputSpec(kind="pooled"), OutputSpec(kind="token_logits")
    text_logits = pooled if detected.pooled_logits else OutputSpec(kind="logits")
    by_token = head is not None and (head.per_token or head.pooling is None)
    return {
        "embed": pooled,
        "token_embed": OutputSpec(kind="tokens"),
        "sparse_embed": OutputSpec(kind="sparse"),
        "classify": text_logits,
        "token_classify": token_logits,
        "score": text_logits,
        "reward": token_logits if by_token else text_logits,
    }


def _read(config: EngineConfig) -> tuple[ModelDescription, InputEncoder]:
    from millpond.backends import choose

    checkpoint, architecture, layout = identify(config)
    config = choose.resolve_quantization(checkpoint, architecture, config)
    return _describe(checkpoint, architecture, layout, _tokenizer(checkpoint, architecture, layout), config)


def identify(
    config: EngineConfig, *, has_weights: bool = False, role: Role | None = None, cache: Path | None = None
) -> tuple[Checkpoint, Architecture, PipelineLayout]:
    """What the configuration files say; ``cache``: as for :func:`read_checkpoint`."""
    checkpoint = read_checkpoint(
        config.model,
        revision=config.revision,
        hf_overrides=config.hf_overrides,
        has_weights=has_weights,
        role=role,
        cache=cache,
    )
    layout = checkpoint.layout
    is_table = layout.static is not None or isinstance(layout.sparse, StaticWeights)
    architecture = STATIC if is_table else find(checkpoint.config, checkpoint.source.name)
    checkpoint = remote_code.apply(checkpoint, architecture)
    layout = checkpoint.layout
    native = translate(architecture, checkpoint.config, checkpoint.source.name)
    checkpoint = replace(checkpoint, config=with_stored_vocabulary(native, checkpoint.layout.transformer))
    return checkpoint, architecture, complete_layout(checkpoint, architecture, _options(config))


def _options(config: EngineConfig) -> SpecOptions:
    return SpecOptions(
        max_length=config.max_length,
        pooling=config.pooling,
        normalize=config.normalize,
        hf_overrides=config.hf_overrides,
        activation=config.activation,
        quantization=config.quantization,
    )


def _tokenizer(checkpoint: Checkpoint, architecture: Architecture, layout: PipelineLayout) -> TextTokenizer:
    if layout.static is not None and (layout.static.words is not None or layout.static.whole):
        return read_word_tokenizer(layout.static, rows=int(checkpoint.config["vocab_size"]))
    if layout.static is not None:
        return StaticTokenizer.read(layout.static, rows=int(checkpoint.config["vocab_size"]))
    if isinstance(layout.sparse, StaticWeights):
        return without_specials(read_tokenizer(layout.transformer), rows=int(checkpoint.config["vocab_size"]))
    if layout.gliner is not None:
        return TextTokenizer.load(layout.gliner.tokenizer, lower=False, added=layout.gliner.added_tokens)
    reward_token = _reward_token(checkpoint, architecture)
    return TextTokenizer.load(layout.transformer, lower=layout.do_lower_case, reward_token=reward_token)


def _describe(
    checkpoint: Checkpoint,
    architecture: Architecture,
    layout: PipelineLayout,
    tokenizer: TextTokenizer,
    config: EngineConfig,
) -> tuple[ModelDescription, InputEncoder]:
    options = _options(config)
    detected = detect_tasks(checkpoint, architecture, convert=config.convert, token_id=tokenizer.token_id)
    detected = override_head(detected, options)
    spec = build_spec(
        checkpoint,
        architecture,
        layout,
        options,
        detected,
        tokenizer_limit=tokenizer.limit,
        token_id=tokenizer.token_id,
    )
    if config.max_length is not None:
        _check_room(config.max_length, spec, tokenizer)
    assert layout.pooling is not None  # complete_layout() fills it in
    encoder = _encoder(tokenizer, layout.late_interaction, detected, config, decoder=architecture.decoder)
    # The id behind a static table stands for no token.
    rows = checkpoint.config.get("vocab_size")
    rows = None if rows is None else int(rows) + (layout.static is not None or isinstance(layout.sparse, StaticWeights))
    if rows is not None and tokenizer.reaches(rows):
        encoder = replace(encoder, rows=rows)
    description = ModelDescription(
        checkpoint=checkpoint,
        architecture=architecture,
        layout=layout,
        pooling=layout.pooling,
        detected=detected,
        spec=spec,
    )
    return description, encoder


def _check_room(max_length: int, spec: ModelSpec, tokenizer: TextTokenizer) -> None:
    """Refuse a limit that leaves no room for text; what a template or a prompt needs is known at the call."""
    pairs, late = spec.score_type == "cross-encoder", spec.score_type == "late-interaction"
    special = tokenizer.special_tokens(is_pair=pairs) + late  # the marker of a query or document
    least = special + (2 if pairs else 1)
    if max_length < least:
        what = "a pair" if pairs else "a text"
        raise InvalidRequestError(
            f"max_length={max_length} leaves no room for text: {what} of {spec.name} has {special} special tokens; "
            f"choose at least {least}, or leave it out for the checkpoint's own limit"
        )


def _reward_token(checkpoint: Checkpoint, architecture: Architecture) -> int | None:
    """The token after a conversation at which a reward model reads its score, if the family has one."""
    token, claimed = architecture.reward_token, checkpoint.architecture or ""
    if token is None or not claimed.startswith(f"{architecture.prefix}ForReward"):
        return None
    return int(token.read(checkpoint.config))
