"""Loading: an EngineConfig turned into a tokenizer, a runner and the description of both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.architectures import find
from millpond.checkpoints.checkpoint import Checkpoint, read_checkpoint
from millpond.checkpoints.modules import Pooling
from millpond.checkpoints.native_config import translate
from millpond.checkpoints.score_template import plain_template, read_template
from millpond.checkpoints.sentence_transformers import PipelineLayout
from millpond.config import EngineConfig
from millpond.engine.execute.cuda.buckets import Buckets
from millpond.engine.execute.cuda.streams import Backend, Cuda
from millpond.engine.execute.runner import Runner
from millpond.engine.input.encode import InputEncoder
from millpond.engine.input.pair_tokenizer import PairTokenizer, TemplateTokenizer
from millpond.engine.input.plan import EncodesPairs
from millpond.engine.input.text_tokenizer import TextTokenizer
from millpond.errors import InvalidRequestError
from millpond.models.build_spec import SpecOptions, backbone_width, build_spec, complete_layout, override_head
from millpond.models.linear import bound_compiled_products
from millpond.models.load import load_backbone
from millpond.models.placement import resolve_devices, resolve_dtype
from millpond.models.quantize import check_quantization
from millpond.models.task_detection import DetectedTasks, detect_tasks
from millpond.pooling.classifier import build_classifier
from millpond.pooling.pooler import Pooler, Readout
from millpond.pooling.sparse import build_sparse, build_token_vectors
from millpond.spec import ModelSpec
from millpond.tasks import Quantization, Task


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A checkpoint in memory.

    Attributes:
        spec: What it is.
        forms: How it reads texts, pairs, queries and documents.
        runners: Backbone and pooler, once on each device.
        dtype: Precision of the backbone, by name.
        include_prompt: Whether pooling counts the prompt's tokens.
        vocabulary: Token ids run from 0 to below this.
        readouts: What each task reads from the hidden states.
        first_kept: Leading rows that ``token_embed`` leaves out.
        mean_maxsim: MaxSim is divided by the query's tokens.
        shares: Pairs that begin alike may compute their beginning once.
    """

    spec: ModelSpec
    encoder: InputEncoder
    runners: tuple[Runner, ...]
    dtype: str
    include_prompt: bool
    vocabulary: int
    readouts: Mapping[Task, Readout]
    first_kept: int = 0
    mean_maxsim: bool = False
    shares: bool = False

    @property
    def runner(self) -> Runner:
        """The first one; all have the same weights."""
        return self.runners[0]

    @property
    def device(self) -> str:
        """Where it runs; several devices joined by commas."""
        return ",".join(str(runner.device) for runner in self.runners)

    def pairs_by(self, template: str) -> EncodesPairs:
        """How pairs are read by another template; its own errors as the engine's."""
        return TemplateTokenizer(self.encoder.texts, read_template(template))

    def width(self, readout: Readout) -> int:
        """Columns of what a readout gives."""
        if readout.kind == "pooled":
            return self.spec.dimensions
        if readout.kind == "tokens":
            return self.spec.hidden_size
        if readout.kind == "sparse":
            return 2
        return len(self.labels(readout))

    def labels(self, readout: Readout) -> tuple[str, ...]:
        """Names of the columns of a readout's logits; a vocabulary entry's is its id."""
        if readout.kind == "head_rows":
            return tuple(str(token) for token in readout.token_ids)
        labels = self.spec.labels
        return tuple(labels[i] for i in readout.token_ids) if readout.token_ids else labels


@dataclass(frozen=True, kw_only=True)
class _Described:
    """What the files say, before any weight is read."""

    checkpoint: Checkpoint
    architecture: Architecture
    layout: PipelineLayout
    purpose: DetectedTasks
    tokenizer: TextTokenizer
    spec: ModelSpec


def describe(config: EngineConfig) -> ModelSpec:
    """What an engine of this configuration would be; no weights are read."""
    return _read(config).spec


def load(config: EngineConfig) -> LoadedModel:
    """Read, check and build; every question that the files can answer wrongly is asked before the weights are read."""
    devices = resolve_devices(config.device)
    if any(device.type == "cpu" for device in devices):
        bound_compiled_products()
    found = _read(config)
    pooling = found.layout.pooling
    assert pooling is not None  # complete_layout() set it
    encoder = _encoder(found, config)
    quantization = cast("Quantization | None", config.quantization)  # one of these, as the config has checked
    wanted = "bfloat16" if quantization == "fp8" and config.dtype == "auto" else config.dtype
    dtype = resolve_dtype(wanted, devices[0], found.architecture, _stored_dtype(found.checkpoint.config))
    for device in devices:
        check_quantization(quantization, device, dtype)
        if config.compile:
            from millpond.models.compiled import check_compiler

            check_compiler(device)
    vectors = found.layout.token_vectors
    return LoadedModel(
        spec=found.spec,
        encoder=encoder,
        runners=tuple(
            _runner(found, pooling, device, dtype, quantization, compiled=config.compile) for device in devices
        ),
        dtype=str(dtype).removeprefix("torch."),
        include_prompt=pooling.include_prompt,
        vocabulary=int(found.checkpoint.config.get("vocab_size", 1 << 30)),
        readouts=_readouts(found.purpose),
        first_kept=0 if vectors is None else 1,  # BGE-M3's code drops the first token's vector
        shares=_shares(found, devices[0]),
        mean_maxsim=found.layout.late_interaction is not None
        and found.layout.late_interaction.similarity == "meanmaxsim",
    )


def _runner(
    found: _Described,
    pooling: Pooling,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization | None,
    *,
    compiled: bool,
) -> Runner:
    """A replica on one device, its weights read for it."""
    architecture, head = found.architecture, found.purpose.classifier
    width = backbone_width(found.checkpoint.config)
    decoder_head = architecture.decoder and (found.checkpoint.architecture or "").endswith(("ForCausalLM", "HeadModel"))
    sparse, vectors = found.layout.sparse, found.layout.token_vectors
    pooler = Pooler(
        pooling,
        token_heads=found.layout.token_heads,
        heads=found.layout.heads,
        device=device,
        classifier=None if head is None else build_classifier(head, width=width, device=device),
        sparse=None if sparse is None else build_sparse(sparse, found.checkpoint.config, width=width, device=device),
        token_vectors=None if vectors is None else build_token_vectors(vectors, width=width, device=device),
        language_head=found.layout.transformer if decoder_head else None,
    )
    backbone = load_backbone(found.checkpoint, architecture, device=device, dtype=dtype, quantization=quantization)
    offset = architecture.position_offset(found.checkpoint.config)
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
        buckets=Buckets(longest=found.spec.max_length) if graphs else None,
    )


def _backend(device: torch.device) -> Backend | None:
    """The device's streams, where batches can overlap."""
    return Cuda(device) if device.type == "cuda" else None


def _encoder(found: _Described, config: EngineConfig) -> InputEncoder:
    """How the checkpoint reads; a template that cannot be used is refused here."""
    tokenizer, late = found.tokenizer, found.layout.late_interaction
    pairs: EncodesPairs | None = None
    if found.purpose.score_type == "cross-encoder":
        pairs = _pair_reader(found, config.score_template)
    elif "classify" in found.purpose.tasks and config.score_template is None:
        pairs = _pair_reader(found, None)  # of two texts, classes such as entailment
    elif config.score_template is not None:
        raise InvalidRequestError(
            f"score_template means nothing to {found.spec.name}, which is no cross-encoder; leave it out"
        )
    colbert = None
    if found.purpose.score_type == "late-interaction" and late is not None:
        if config.max_length is not None:  # the user's word on how much of a document is read
            late = replace(late, document_length=config.max_length)
        colbert = tokenizer.colbert(late)
    return InputEncoder(texts=tokenizer, pairs=pairs, colbert=colbert)


def _pair_reader(found: _Described, template: str | None) -> EncodesPairs:
    """The user's template, else the checkpoint's, else its tokenizer's pairs."""
    if template is not None:
        return TemplateTokenizer(found.tokenizer, read_template(template))
    if found.purpose.template is not None:
        return TemplateTokenizer(found.tokenizer, found.purpose.template)
    if found.architecture.decoder:
        return TemplateTokenizer(found.tokenizer, plain_template())
    return PairTokenizer(found.tokenizer, prompt=found.purpose.prompt)


def _shares(found: _Described, device: torch.device) -> bool:
    """A causal model's beginning does not depend on what follows, and its answer is read at the end.

    Measured on a CPU only: the packed CUDA kernels would need keys of their own for it.
    """
    head = found.purpose.classifier
    causal = found.architecture.decoder and found.checkpoint.config.get("is_causal", True) is not False
    bidirectional = bool(found.checkpoint.config.get("use_bidirectional_attention"))
    last = head is not None and head.pooling == "lasttoken"
    return device.type == "cpu" and causal and not found.architecture.recurrent and last and not bidirectional


def _readouts(purpose: DetectedTasks) -> dict[Task, Readout]:
    """What each task reads; which of them are served is the spec's to say."""
    head = purpose.classifier
    pooled, each = Readout(kind="pooled"), Readout(kind="token_logits")
    whole = pooled if purpose.pooled_logits else Readout(kind="logits")
    by_token = head is not None and (head.per_token or head.pooling is None)
    return {
        "embed": pooled,
        "token_embed": Readout(kind="tokens"),
        "sparse_embed": Readout(kind="sparse"),
        "classify": whole,
        "token_classify": each,
        "score": whole,
        "reward": each if by_token else whole,
    }


def _read(config: EngineConfig) -> _Described:
    checkpoint = read_checkpoint(config.model, revision=config.revision, hf_overrides=config.hf_overrides)
    architecture = find(checkpoint.config, checkpoint.source.name)
    checkpoint = replace(checkpoint, config=translate(architecture, checkpoint.config, checkpoint.source.name))
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
    purpose = detect_tasks(checkpoint, architecture, convert=config.convert, token_id=tokenizer.token_id)
    purpose = override_head(purpose, options)
    spec = build_spec(
        checkpoint,
        architecture,
        layout,
        options,
        purpose,
        tokenizer_limit=tokenizer.limit,
        token_id=tokenizer.token_id,
    )
    return _Described(
        checkpoint=checkpoint,
        architecture=architecture,
        layout=layout,
        purpose=purpose,
        tokenizer=tokenizer,
        spec=spec,
    )


def _reward_token(checkpoint: Checkpoint, architecture: Architecture) -> int | None:
    """The token behind a conversation at which a reward model reads its score, where the family has one."""
    token, claimed = architecture.reward_token, checkpoint.architecture or ""
    if token is None or not claimed.startswith(f"{architecture.prefix}ForReward"):
        return None
    return int(token.read(checkpoint.config))


def _stored_dtype(config: Mapping[str, Any]) -> str | None:
    stored = config.get("dtype") or config.get("torch_dtype")
    return None if stored is None else str(stored).removeprefix("torch.")
