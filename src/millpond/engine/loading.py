"""Loading: an EngineConfig turned into a checked checkpoint and a runner on each device."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import cast

import torch

from millpond.attention.self_check import KernelCheck, is_on
from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.architectures import find
from millpond.checkpoints.checkpoint import Checkpoint, read_checkpoint
from millpond.checkpoints.families.native import translate, with_stored_vocabulary
from millpond.checkpoints.layouts.late_interaction import LateInteraction
from millpond.checkpoints.layouts.sentence_transformers import PipelineLayout
from millpond.checkpoints.modules import Pooling
from millpond.checkpoints.templates.score_template import read_template, shipped_template
from millpond.engine.execute.cuda.buckets import Buckets
from millpond.engine.execute.cuda.streams import Backend, Cuda
from millpond.engine.execute.runner import Runner
from millpond.engine.execute.self_check import check_graphs, check_kernels
from millpond.engine.input.encode import InputEncoder
from millpond.engine.input.model import LoadedModel
from millpond.engine.input.pair_tokenizer import PairTokenizer, TemplateTokenizer
from millpond.engine.input.plan import EncodesPairs
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.errors import InvalidRequestError
from millpond.models.build_spec import SpecOptions, backbone_width, build_spec, complete_layout, override_head
from millpond.models.linear import bound_compiled_products
from millpond.models.load import load_backbone
from millpond.models.placement import resolve_devices, resolve_dtype
from millpond.models.quantize import check_quantization
from millpond.models.task_detection import DetectedTasks, detect_tasks
from millpond.pooling.classifier import build_classifier
from millpond.pooling.pooler import OutputSpec, Pooler
from millpond.pooling.sparse import build_sparse, build_token_vectors
from millpond.support.load_progress import loading_bar
from millpond.tasks import Quantization, Task
from millpond.values.config import EngineConfig
from millpond.values.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """A checkpoint in memory: its weights on each device."""

    model: LoadedModel  # description of the checkpoint and of its inputs
    runners: tuple[Runner, ...]  # backbone and pooler, one replica for each device
    dtype: str  # precision of the backbone, by name
    checks: tuple[KernelCheck, ...] = ()  # what the self-check compared; see :mod:`millpond.attention.self_check`

    @property
    def runner(self) -> Runner:
        """The first replica; all have the same weights."""
        return self.runners[0]

    @property
    def device(self) -> str:
        """Name of the device; several are joined by commas."""
        return ",".join(str(runner.device) for runner in self.runners)

    def prepare(self, output: OutputSpec) -> None:
        """Read the weights of an output's vocabulary entries now, so that no batch waits for them."""
        if output.kind == "head_rows":
            for runner in self.runners:
                runner.pooler.rows_of(output.token_ids, runner.device)


@dataclass(frozen=True, kw_only=True)
class _Description:
    """The description in the checkpoint's files, read before any weights."""

    checkpoint: Checkpoint
    architecture: Architecture
    layout: PipelineLayout
    pooling: Pooling
    detected: DetectedTasks
    encoder: InputEncoder
    spec: ModelSpec

    @property
    def has_language_head(self) -> bool:
        """Whether the checkpoint is a decoder with the head of a language model."""
        name = self.checkpoint.architecture or ""
        return self.architecture.decoder and name.endswith(("ForCausalLM", "HeadModel"))


def describe(config: EngineConfig) -> ModelSpec:
    """The spec that an engine of this configuration would have; no weights are read."""
    return _read(config).spec


def read_model(config: EngineConfig) -> LoadedModel:
    """What an engine of this configuration would know of its model and of its inputs; no weights are read."""
    return _model(_read(config), torch.device("cpu"))


def load(config: EngineConfig, *, check: bool | None = None) -> Replicas:
    """Read, check and build; everything that config and tokenizer files decide is checked before weights are read.

    ``check``: whether to compare the kernels that the model may use with float32, those that were right before, too;
    by default those that were not compared yet, unless ``MILLPOND_SELF_CHECK=0`` is set.
    """
    devices = resolve_devices(config.device)
    if any(device.type == "cpu" for device in devices):
        bound_compiled_products()
    description = _read(config, has_weights=True)
    stored = description.checkpoint.config
    quantization = cast("Quantization | None", config.quantization)  # checked by the config
    requested = "bfloat16" if quantization == "fp8" and config.dtype == "auto" else config.dtype
    stored_dtype = str(stored.get("dtype") or stored.get("torch_dtype")).removeprefix("torch.")
    dtype = resolve_dtype(requested, devices[0], description.architecture, stored_dtype)
    for device in devices:
        check_quantization(quantization, device, dtype)
        if config.compile:
            from millpond.models.compiled import check_compiler

            check_compiler(device)
    checked = is_on() if check is None else check
    checks = check_kernels(devices, dtype, quantization, remembered=not check) if checked else []
    with loading_bar(os.path.basename(description.spec.name.rstrip("/"))):
        runners = tuple(
            _runner(description, device, dtype, quantization, compiled=config.compile) for device in devices
        )
    for runner in runners if checked else ():
        if runner.device.type == "cuda":
            vocabulary = int(stored.get("vocab_size") or 1)
            checks += check_graphs(runner, vocabulary=vocabulary, longest=description.spec.max_length)
    return Replicas(
        model=_model(description, devices[0]),
        runners=runners,
        dtype=str(dtype).removeprefix("torch."),
        checks=tuple(checks),
    )


def _model(description: _Description, device: torch.device) -> LoadedModel:
    vectors, late = description.layout.token_vectors, description.layout.late_interaction
    return LoadedModel(
        spec=description.spec,
        encoder=description.encoder,
        include_prompt=description.pooling.include_prompt,
        vocabulary=int(description.checkpoint.config.get("vocab_size", 1 << 30)),
        outputs=_outputs(description.detected),
        language_head=description.has_language_head,
        first_kept=0 if vectors is None else 1,  # BGE-M3's code drops the first token's vector
        mean_maxsim=late is not None and late.similarity == "meanmaxsim",
        shares=_shares_prefixes(description, device),
    )


def _runner(
    description: _Description,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization | None,
    *,
    compiled: bool,
) -> Runner:
    """A replica on one device; its weights are read here."""
    architecture, layout, head = description.architecture, description.layout, description.detected.classifier
    config = description.checkpoint.config
    width = backbone_width(config)
    sparse, vectors = layout.sparse, layout.token_vectors
    pooler = Pooler(
        description.pooling,
        token_heads=layout.token_heads,
        heads=layout.heads,
        device=device,
        classifier=None if head is None else build_classifier(head, width=width, device=device),
        sparse=None if sparse is None else build_sparse(sparse, config, width=width, device=device),
        token_vectors=None if vectors is None else build_token_vectors(vectors, width=width, device=device),
        language_head=layout.transformer if description.has_language_head else None,
    )
    backbone = load_backbone(
        description.checkpoint, architecture, device=device, dtype=dtype, quantization=quantization, native=not compiled
    )
    offset = architecture.position_offset(config)
    if compiled:
        from millpond.models.compiled import compile_parts

        compile_parts(backbone, architecture, offset=offset)
    backend = _backend(device)
    graphs = backend is not None and os.environ.get("MILLPOND_CUDA_GRAPHS") != "0"
    return Runner(
        backbone,
        pooler,
        architecture=architecture,
        device=device,
        offset=offset,
        backend=backend,
        buckets=Buckets(longest=description.spec.max_length) if graphs else None,
    )


def _backend(device: torch.device) -> Backend | None:
    """The device's streams, where batches can overlap."""
    return Cuda(device) if device.type == "cuda" else None


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
        if template is None and decoder:
            # The query followed by the document, which vLLM gives a decoder without a template.
            template = shipped_template("plain", special_tokens=True)
        pairs = (
            PairTokenizer(tokenizer, prompt=detected.prompt)
            if template is None
            else TemplateTokenizer(tokenizer, template)
        )
    colbert = None
    if detected.score_type == "late-interaction" and late is not None:
        if config.max_length is not None:  # the user's max_length replaces the checkpoint's document length
            late = replace(late, document_length=config.max_length)
        colbert = tokenizer.colbert(late)
    return InputEncoder(texts=tokenizer, pairs=pairs, colbert=colbert)


def _shares_prefixes(description: _Description, device: torch.device) -> bool:
    """Whether pairs may share a prefix: in a causal model it does not depend on what follows, and the end is read.

    On a CPU only, where it was measured: the packed CUDA kernels would need separate keys for it.
    """
    head, config = description.detected.classifier, description.checkpoint.config
    causal = description.architecture.decoder and config.get("is_causal", True) is not False
    bidirectional = bool(config.get("use_bidirectional_attention"))
    last = head is not None and head.pooling == "lasttoken"
    return device.type == "cpu" and causal and not description.architecture.recurrent and last and not bidirectional


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


def _read(config: EngineConfig, *, has_weights: bool = False) -> _Description:
    checkpoint = read_checkpoint(
        config.model, revision=config.revision, hf_overrides=config.hf_overrides, has_weights=has_weights
    )
    architecture = find(checkpoint.config, checkpoint.source.name)
    native = translate(architecture, checkpoint.config, checkpoint.source.name)
    checkpoint = replace(checkpoint, config=with_stored_vocabulary(native, checkpoint.layout.transformer))
    options = SpecOptions(
        max_length=config.max_length,
        pooling=config.pooling,
        normalize=config.normalize,
        hf_overrides=config.hf_overrides,
        activation=config.activation,
        quantization=config.quantization,
    )
    layout = complete_layout(checkpoint, architecture, options)
    tokenizer = TextTokenizer.load(
        layout.transformer, lower=layout.do_lower_case, reward_token=_reward_token(checkpoint, architecture)
    )
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
    return _Description(
        checkpoint=checkpoint,
        architecture=architecture,
        layout=layout,
        pooling=layout.pooling,
        detected=detected,
        encoder=_encoder(tokenizer, layout.late_interaction, detected, config, decoder=architecture.decoder),
        spec=spec,
    )


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
