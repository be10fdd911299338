"""Architecture: one row of the table of architectures, as pure data; code is named as a string and imported on use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

from millpond.checkpoints.classifier_steps import (
    DECODER_HEAD,
    ENCODER_HEAD,
    ConfigField,
    FamilyHead,
    FamilyStep,
    Linear,
    Norm,
    PoolingField,
)
from millpond.values.spec import PoolingMode

# Values of `position_embedding_type` with which BERT and its relatives in transformers 4 add to a score the product of
# the query, or of query and key, with the embedding of their distance.
RELATIVE = ("relative_key", "relative_key_query")
_WITH_DISTANCES = (
    "bert roberta xlm-roberta electra ernie data2vec-text megatron-bert xlm-roberta-xl".split()  # `model_type`
)


@dataclass(frozen=True, kw_only=True)
class EncoderFields:
    """The names of a BERT-like family's sizes in config.json; an empty name: the family does not have that size."""

    layers: str = "num_hidden_layers"  # number of layers
    heads: str = "num_attention_heads"  # number of attention heads
    hidden: str = "hidden_size"  # width of the hidden states
    embedding: str = ""  # width of the embeddings; empty: `hidden`
    inner: str = "intermediate_size"  # width inside the feed forward
    words: str = "vocab_size"  # rows of the vocabulary
    positions: str = "max_position_embeddings"  # rows of the position table
    types: str = "type_vocab_size"  # rows of the table of token types
    buckets: str = ""  # buckets of relative distances
    tasks: str = ""  # rows of the table of tasks, which counts if `use_task_id` is true
    window: str = ""  # tokens that a token attends to, itself and half of them to each side; of each layer, or of all
    epsilon: str = "layer_norm_eps"  # epsilon of every norm; empty: 1e-12
    activation: str = "hidden_act"  # activation of the feed forward


@dataclass(frozen=True, kw_only=True)
class EncoderNames:
    """Where a BERT-like family keeps its parts: paths of attributes in the loaded class, and names of its tensors."""

    prefix: str  # put before the backbone's tensors by a class with a head
    layers: str = "encoder.layer"  # the list of layers. The fields below are paths within a layer.
    query: str = "attention.self.query"  # projection to queries
    key: str = "attention.self.key"  # projection to keys
    value: str = "attention.self.value"  # projection to values
    attention_out: str = "attention.output.dense"  # projection of the attention's output
    attention_norm: str = "attention.output.LayerNorm"  # norm after the attention
    up: str = "intermediate.dense"  # first linear of the feed forward
    down: str = "output.dense"  # second linear of the feed forward
    norm: str = "output.LayerNorm"  # norm after the feed forward
    relative_bias: str = ""  # table of relative distances, in the backbone; empty: none
    widen: str = "embeddings_project"  # from the width of the embeddings, if they are narrower than the layers
    # Norm after the last layer of a family whose layers normalize what they read (pre-norm) rather than their sums, and
    # whose embeddings have no norm; empty: a post-norm family
    last_norm: str = ""
    # Table of sines and cosines, which rotate queries and keys by their positions; their rows are renamed to the order
    # in which the first half of a head's columns and the second are pairs. Empty: there is a table of positions
    rotary: str = ""
    fields: EncoderFields = EncoderFields()  # names in config.json


@dataclass(frozen=True, kw_only=True)
class DecoderTraits:
    """How a class of transformers differs from Llama's."""

    activation: str = "hidden_act"  # field of config.json that names the activation
    # Where a layer's sliding window is found: its attention, the config, or nowhere; `radius`: as `layer`, but that
    # of the config does not count the own position
    window: Literal["layer", "radius", "config"] | None = None
    centred: bool = False  # norms multiply by `1 + weight`, and embeddings come scaled
    softcap: bool = False  # attention scores are capped
    rotary_by_kind: bool = False  # rotary angles differ between kinds of layers
    # Parts that have biases if config.json says so: `attention`, `mlp`; `qkv`: queries, keys and values always do
    biases: tuple[str, ...] = ()
    head_norms: bool = False  # query and key heads are normalized
    whole_norms: bool = False  # those norms are of all heads as one row
    sandwich: bool = False  # each half of a layer has a norm after it too, and scores a scale of their own
    post_norms: bool = False  # each half of a layer has a norm after it, and none before
    # Words, scores and what a layer's halves add are multiplied by numbers of config.json (Granite)
    multipliers: bool = False
    partial: bool = False  # rotary positions of the default type may turn a part of a head
    experts: bool = False  # layers have a mixture of experts, but those that config.json leaves out
    unrotated: str = ""  # field of config.json with a 0 for each layer that has no positions; empty: none


@dataclass(frozen=True, kw_only=True)
class MaskedHeadNames:
    """Where a family's masked language model keeps its head: projection, activation, norm, decoder."""

    backbone: str  # prefix of the backbone's tensors
    dense: str  # the projection; empty: neither it nor a norm, as in a language model with a causal mask
    norm: str  # the norm after its activation
    decoder: str  # the product with the vocabulary, absent where it is the embedding table
    biases: tuple[str, ...]  # names of the decoder's bias; the first that the files have counts
    table: str = "embeddings.word_embeddings.weight"  # the embedding table, in the backbone
    activation: str = ""  # field of config.json that names the activation; empty or missing: gelu
    epsilon: str = "layer_norm_eps"  # field of config.json with the norm's epsilon; empty: `default_epsilon`
    default_epsilon: float = 1e-12  # the epsilon where config.json gives none

    def tensors(self) -> tuple[str, ...]:
        """Every tensor of this head that a file may have, under any of its names."""
        vocabulary = (self.decoder, *self.biases, self.table, f"{self.backbone}.{self.table}")
        if not self.dense:
            return vocabulary
        parts = [f"{part}.{kind}" for part in (self.dense, self.norm) for kind in ("weight", "bias")]
        older = [f"{self.norm}.gamma", f"{self.norm}.beta"]
        return (*parts, *older, *vocabulary)


# Qwen2ForRewardModel and Qwen2ForProcessRewardModel.
QWEN_REWARD: tuple[FamilyStep, ...] = (Linear(name="score.0"), "relu", Linear(name="score.2"))


# What precedes the backbone's tensors in files of these families, by `model_type`.
_PREFIXES = {
    "albert": "albert",
    "deberta": "deberta",
    "deberta-v2": "deberta",
    "mobilebert": "mobilebert",
    "gpt_neox": "gpt_neox",
    "jina_bert": "bert",
    **dict.fromkeys(("t5", "umt5"), "transformer"),
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A family of backbones, with all its properties."""

    prefix: str  # start of the checkpoints' class names: `Bert` for `BertModel`
    model_type: str  # `model_type` in config.json
    pooling: PoolingMode  # how a repository without modules.json is pooled
    # `absolute` (a learned table), `rotary`, `relative` (distances only) or `none`
    positions: Literal["absolute", "rotary", "relative", "none"]
    example: str  # a well-known checkpoint
    aliases: tuple[str, ...] = ()  # other `model_type` values of the family
    # Fields of config.json that mark this family where `model_type` is another family's; a number: at least so much
    recognized_by: Mapping[str, str | int] = field(default_factory=dict, hash=False)
    names: tuple[str, ...] = ()  # class names besides `prefix` and a suffix
    # Endings of class names that are not run, and why not
    refused: Mapping[str, str] = field(default_factory=dict, hash=False)
    native: str = ""  # transformers' class, if it is not `{prefix}Model`
    # `model_type` of the decoder that it is without the causal mask, under a name of its own; empty: none
    unmasked: str = ""
    # The module of :mod:`millpond.checkpoints.families` with the terms of its checkpoints, either or both of
    # `translate(config, name) -> dict` (config.json as the native class reads it, its `model_type` included) and
    # `rename(tensors, config) -> dict` (the checkpoint's tensors under the native names)
    family: str | None = None
    # A module with what transformers lacks: `backbone_class() -> type` (the class to load the tensors into, if
    # transformers may lack it) and `finish(backbone, checkpoint) -> module` (the loaded class completed)
    module: str | None = None
    # `module:class` of millpond's own packed forward. The class takes the loaded backbone and this row; its
    # `fits(backbone, row)`, if it has one, says whether the forward does all that the loaded class would. One with
    # `read(checkpoint, row, device=, dtype=)` takes the files instead. `None`: transformers' class runs.
    forward: str | None = None
    # Names of a BERT-like family's parts, which :mod:`millpond.backends.torch.forwards.encoder` runs and
    # :mod:`millpond.backends.torch.forwards.encoder_file` reads without transformers
    encoder: EncoderNames | None = None
    traits: DecoderTraits | None = (
        None  # differences of a family like Llama, which :mod:`millpond.backends.torch.forwards.decoder` runs
    )
    # Its classifiers; `None`: `score` on a decoder's last token, `classifier` on an encoder's first
    head: FamilyHead | None = None
    mlm: MaskedHeadNames | None = None  # its masked-language-model head, which SPLADE reads; `None`: not known
    reward_head: tuple[FamilyStep, ...] = QWEN_REWARD  # steps of its `*ForRewardModel`
    # Id of the token that is appended to a conversation and at which its reward models read the score
    reward_token: ConfigField | None = None
    # Class of a token classifier that is a dense model if it has one label, the weight of a token
    weighted_tokens: str = ""
    pooling_field: PoolingField | None = None  # field of config.json that has precedence over `pooling`
    offset_positions: bool = False  # the learned table begins after the padding row (RoBERTa): `padding_idx + 1`
    token_types: bool = False  # the class reads `token_type_ids`
    adapters: bool = False  # the backbone takes `adapter_ids [1, tokens]`, an adapter for each token (-1: none)
    decoder: bool = False  # a causal language model, with a key-value cache to switch off
    recurrent: bool = False  # some layers carry a state from token to token instead of attending
    # An encoder reads the first part of a text (token type 0), and a decoder the second (1), which it writes on
    encodes_apart: bool = False
    pooler: bool = False  # the class would build BERT's pooler, which millpond does not use
    half: str = "float16"  # its half precision on a GPU

    @property
    def takes_distances(self) -> bool:
        """Whether its class in transformers 4 has the positions of :data:`RELATIVE`."""
        return self.model_type in _WITH_DISTANCES

    @property
    def model_class(self) -> str:
        """transformers' class of the backbone."""
        return self.native or f"{self.prefix}Model"

    @property
    def tensor_prefix(self) -> str:
        """What precedes the backbone's tensors in a class with a head, as transformers names them."""
        if self.encoder is not None:
            return self.encoder.prefix
        return _PREFIXES.get(self.model_type, "model")

    @property
    def classifiers(self) -> FamilyHead:
        """The steps that its classifiers compute."""
        return self.head or (DECODER_HEAD if self.decoder else ENCODER_HEAD)

    def is_recognized(self, config: Mapping[str, Any]) -> bool:
        """Whether config.json has the fields that mark this family."""

        def agrees(given: object, wanted: str | int) -> bool:
            return given == wanted if isinstance(wanted, str) else isinstance(given, int) and given >= wanted

        return bool(self.recognized_by) and all(
            agrees(config.get(name), own) for name, own in self.recognized_by.items()
        )

    def terms(self) -> ModuleType | None:
        """The module of its checkpoints' terms, if they have their own."""
        return None if self.family is None else import_module(f"millpond.checkpoints.families.{self.family}")

    def hooks(self) -> ModuleType | None:
        """The family's own code, if it has any."""
        return None if self.module is None else import_module(self.module)

    def forward_class(self) -> Any:
        """The class of its packed forward; ``None`` where transformers' class runs."""
        if self.forward is None:
            return None
        module, _, name = self.forward.partition(":")
        return getattr(import_module(module), name)

    @property
    def averages_layers(self) -> bool:
        """Whether its plan can give the mean of several layers' states: a post-norm encoder's, whose layers end so."""
        return self.encoder is not None and not self.encoder.last_norm

    def head_names(self) -> tuple[str, ...]:
        """Modules and tensors of its heads, which a backbone leaves alone."""
        steps = (*self.classifiers.sequence, *self.classifiers.tokens, *self.reward_head)
        names = [step.name for step in steps if isinstance(step, Linear | Norm)]
        if self.encoder is not None:  # a pooler is saved with the layers, with the same prefix
            names += [f"{self.encoder.prefix}.{name}" for name in names]
        if self.mlm is not None:
            named = (self.mlm.dense, self.mlm.norm, self.mlm.decoder, *self.mlm.biases)
            names += [name for name in named if name]
        return tuple(names)

    def position_offset(self, config: Mapping[str, Any]) -> int:
        """Position of a text's first token."""
        if not self.offset_positions:
            return 0
        given = None if self.model_type == "mpnet" else config.get("pad_token_id")  # MPNet's class has a constant
        padding = 1 if given is None else int(given)
        # A first token that counts as padding is where the padding is (bilingual-embedding-small: both ids are 0).
        is_padding = self.model_type == "xlm-roberta" and given is not None and config.get("bos_token_id") == given
        return padding if is_padding else padding + 1

    def capacity(self, config: Mapping[str, Any]) -> int | None:
        """Most tokens the position table (or the rotary training length) covers; ``None`` if the config names none.

        A family's ``translate`` may give fewer, ``longest_text``.
        """
        length, least = config.get("max_position_embeddings"), config.get("longest_text")
        covered = None if length is None else int(length) - self.position_offset(config)
        return covered if least is None or covered is None else min(covered, int(least))

    def bounded(self, config: Mapping[str, Any]) -> bool:
        """Whether a text must end where :meth:`capacity` does; a family's ``translate`` may say ``positions_end``."""
        return self.positions == "absolute" or bool(config.get("positions_end"))


# Masked-language-model heads.
BERT_MLM = MaskedHeadNames(
    backbone="bert",
    dense="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    decoder="cls.predictions.decoder.weight",
    biases=("cls.predictions.decoder.bias", "cls.predictions.bias"),
    activation="hidden_act",
)
ROFORMER_MLM = replace(BERT_MLM, backbone="roformer")
REMBERT_MLM = MaskedHeadNames(
    backbone="rembert",
    dense="cls.predictions.dense",
    norm="cls.predictions.LayerNorm",
    decoder="cls.predictions.decoder.weight",
    biases=("cls.predictions.decoder.bias",),
    activation="hidden_act",
)
DISTILBERT_MLM = MaskedHeadNames(
    backbone="distilbert",
    dense="vocab_transform",
    norm="vocab_layer_norm",
    decoder="vocab_projector.weight",
    biases=("vocab_projector.bias",),
    activation="activation",
    epsilon="",
)
MODERNBERT_MLM = MaskedHeadNames(
    backbone="model",
    dense="head.dense",
    norm="head.norm",
    decoder="decoder.weight",
    biases=("decoder.bias",),
    table="embeddings.tok_embeddings.weight",
    activation="classifier_activation",
    epsilon="norm_eps",
    default_epsilon=1e-5,
)
# The head of a language model with a causal mask, which SPLADE reads too.
CAUSAL_LM = MaskedHeadNames(
    backbone="model", dense="", norm="", decoder="lm_head.weight", biases=(), table="embed_tokens.weight"
)
GTE_MLM = MaskedHeadNames(
    backbone="new",
    dense="lm_head.dense",
    norm="lm_head.norm",
    decoder="lm_head.decoder.weight",
    biases=("lm_head.decoder.bias",),
    activation="hidden_act",
)


def roberta_mlm(backbone: str) -> MaskedHeadNames:
    """RoBERTa's head beside a backbone of this name."""
    return MaskedHeadNames(
        backbone=backbone,
        dense="lm_head.dense",
        norm="lm_head.layer_norm",
        decoder="lm_head.decoder.weight",
        biases=("lm_head.decoder.bias", "lm_head.bias"),
    )
