"""Names and shapes of the parameters of transformers' classes, in their order, so that none of them has to be built.

Entries of the tables: ``name:rows,columns`` is a weight and a bias, ``name/rows,columns`` a weight alone, and
``name=rows,columns`` a parameter of that name; a norm has only rows. ``?field`` after an entry: its bias depends on
that field of config.json. Entries with ``#`` are repeated for each layer, those with ``+`` for all but the first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

Config = Mapping[str, Any]
Shape = tuple[int, ...]

_ENTRY = re.compile(r"(?P<name>[^:/=]+)(?P<kind>[:/=])(?P<dims>[^?]+)(\?(?P<field>\w+))?")


def parameters(architecture: str, config: Config) -> dict[str, Shape]:
    """Shapes by name, of a class such as ``BertModel`` or ``Qwen2ForCausalLM``; tied parameters once.

    Raises:
        AttributeError: transformers has no such class.
    """
    family, head = (*re.split("For(?=[A-Z])", architecture.replace("LMHeadModel", "ForCausalLM"), maxsplit=1), "")[:2]
    named = {"Gemma3ForCausalLM": "Gemma3Text", "Qwen3_5ForCausalLM": "Qwen3_5Text"}
    family = named.get(architecture, family.removesuffix("Model"))
    if family.lstrip("MU").removesuffix("Encoder") == "T5":
        return _t5(family, head, config)
    if family == "Bart":
        return _bart(head, config)
    prefix, pooler = _PREFIXES[family], _POOLERS.get(family, "").split()
    backbone = _MIXED[family](config) if family in _MIXED else _BACKBONES[family].split()
    if not head:
        return dict(_expand(_with(backbone, pooler, family), config))
    entries = _HEADS.get((family, head)) or _HEADS.get((_LIKE.get(family, ""), head))
    if entries is None:
        raise AttributeError(f"transformers has no {architecture}")
    heads = entries.split()
    pooled = _with(backbone, pooler if "+pooler" in heads else [], family)
    own = dict(_expand((entry for entry in heads if entry != "+pooler"), config))
    if config.get("tie_word_embeddings", True):
        own.pop("lm_head.weight", None)
    inside = {f"{prefix}.{name}": shape for name, shape in _expand(pooled, config)}
    return own | inside if head == "MaskedLM" and family in _HEAD_FIRST else inside | own


def _with(backbone: list[str], pooler: list[str], family: str) -> list[str]:
    """A backbone and its pooler, which comes before the layers in Jina's class."""
    first = (
        [entry for entry in backbone if entry.startswith("embeddings")] if family == "JinaEmbeddingsV3" else backbone
    )
    return [*first, *pooler, *backbone[len(first) :]]


def _expand(entries: Iterable[str], config: Config) -> Iterator[tuple[str, Shape]]:
    sizes = _sizes(config)
    for layered, block in groupby(entries, key=lambda entry: "#" in entry or "+" in entry):
        parts = list(block)
        for layer in range(sizes["N"] if layered else 1):
            for entry in parts:
                if "+" not in entry or layer:
                    yield from _parameters(entry.replace("#", str(layer)).replace("+", str(layer)), sizes, config)


def _parameters(entry: str, sizes: Mapping[str, int], config: Config) -> Iterator[tuple[str, Shape]]:
    parsed = _ENTRY.fullmatch(entry)
    assert parsed is not None, entry
    shape = tuple(
        math.prod(sizes[part] if part in sizes else int(part) for part in dim.split("*"))
        for dim in parsed["dims"].split(",")
    )
    name = parsed["name"]
    if 0 in shape or (name.endswith("embeddings_project") and sizes["E"] == sizes["H"]):
        return
    yield (name if parsed["kind"] == "=" else f"{name}.weight"), shape
    bias = config.get(parsed["field"]) if parsed["field"] else parsed["kind"] == ":"
    if bias:
        yield f"{name}.bias", shape[:1]


def _sizes(config: Config) -> dict[str, int]:
    """What the letters of the tables are."""

    def first(*names: str, default: int = 0) -> int:
        return next((int(config[name]) for name in names if config.get(name) is not None), default)

    width, heads = (
        first("hidden_size", "dim", "n_embd", "d_model"),
        first("num_attention_heads", "n_heads", "n_head", "num_heads", "encoder_attention_heads"),
    )
    dim = first("head_dim", "d_kv", default=width // max(heads, 1))
    return {
        "N": first("num_hidden_layers", "n_layers", "n_layer", "num_layers"),
        "V": first("vocab_size"),
        "P": first("max_position_embeddings", "n_positions"),
        "T": first("type_vocab_size"),
        "H": width,
        "I": first("intermediate_size", "hidden_dim", "d_ff", "n_inner", default=4 * width),
        "E": first("embedding_size", "input_embedding_size", default=width),
        "G": first("intra_bottleneck_size"),
        "Z": width - first("embedding_size"),
        "O": first("output_embedding_size"),
        "U": first("task_type_vocab_size"),
        "A": heads,
        "D": dim,
        "Q": heads * dim,
        "K": first("num_key_value_heads", default=heads) * dim,
        "B": first("relative_attention_num_buckets", "position_buckets"),
        "L": len(config.get("id2label") or (0, 1)),
        "X": first("num_experts"),
        "J": first("embedding_rank"),
        "F": first("moe_intermediate_size"),
        "W": (heads + 2 * first("num_key_value_heads", default=heads)) * dim,
        "M": first("mamba_expand") * width,
        "S": first("mamba_d_state"),
        "R": first("mamba_dt_rank"),
        "C": first("mamba_d_conv"),
        "Y": first("mamba_dt_rank") + 2 * first("mamba_d_state"),
    }


def _embeddings(order: str, width: str = "H") -> str:
    rows = {"word": "V", "position": "P", "token_type": "T", "task_type": "U"}
    return " ".join(
        f"embeddings.LayerNorm:{width}" if part == "norm" else f"embeddings.{part}_embeddings/{rows[part]},{width}"
        for part in order.split()
    )


def _encoder(attention: str, norm: str = "attention.output.LayerNorm") -> str:
    names = (*(f"{name}:H,H" for name in attention.split()), f"{norm}:H")
    feed = ("intermediate.dense:I,H", "output.dense:H,I", "output.LayerNorm:H")
    return " ".join(f"encoder.layer.#.{entry}" for entry in (*names, *feed))


def _pre_norm(first: str, second: str) -> str:
    names = (f"{first}:H", *(f"{name}:H,H" for name in _ATTENTION.split()), f"{second}:H")
    return " ".join(f"encoder.layer.#.{entry}" for entry in (*names, "intermediate.dense:I,H", "output.dense:H,I"))


def _mobilebert() -> str:
    """Norms have their bias first."""

    def norm(name: str, width: str) -> str:
        return f"{name}.bias={width} {name}.weight={width}"

    def feed(name: str) -> str:
        return f"{name}intermediate.dense:I,G {name}output.dense:G,I {norm(f'{name}output.LayerNorm', 'G')}"

    layer = (
        *("attention.self.query:G,G", "attention.self.key:G,G", "attention.self.value:G,H"),
        *("attention.output.dense:G,G", norm("attention.output.LayerNorm", "G"), feed("")),
        *("output.bottleneck.dense:H,G", norm("output.bottleneck.LayerNorm", "H")),
        *(
            f"bottleneck.{name}.dense:G,H {norm(f'bottleneck.{name}.LayerNorm', 'G')}"
            for name in ("input", "attention")
        ),
        *(feed(f"ffn.{i}.") for i in range(2)),
    )
    tables = "word_embeddings/V,E position_embeddings/P,H token_type_embeddings/T,H embedding_transformation:H,3*E"
    first = [f"embeddings.{entry}" for entry in f"{tables} {norm('LayerNorm', 'H')}".split()]
    return " ".join((*first, *(f"encoder.layer.#.{entry}" for entry in " ".join(layer).split())))


def _blocks(entries: str) -> str:
    return " ".join(f"layers.#.{entry}" for entry in entries.split())


_ATTENTION = " ".join(f"attention.self.{name}" for name in ("query", "key", "value")) + " attention.output.dense"
_DEBERTA = " ".join(f"attention.self.{name}_proj" for name in ("query", "key", "value")) + " attention.output.dense"
_GATED = "mlp.gate_proj/I,H mlp.up_proj/I,H mlp.down_proj/H,I"
_NORMED = "post_attention_layernorm:H {} post_mlp_layernorm:H"
_BIASED = " ".join(f"self_attn.{letter}_proj:H,H" for letter in "qkvo")
_QUERIES = "self_attn.q_proj{0}Q,H{1} self_attn.k_proj{0}K,H{1} self_attn.v_proj{0}K,H{1} self_attn.o_proj/H,Q{1}"
_OPTIONAL = _QUERIES.format("/", "?attention_bias")
_HEAD_NORMS = " self_attn.q_norm/D self_attn.k_norm/D"
_FEED = " mlp.gate_proj/I,H?mlp_bias mlp.up_proj/I,H?mlp_bias mlp.down_proj/H,I?mlp_bias"
_NORMS = " input_layernorm/H post_attention_layernorm/H"
_FEED_NORMS = " pre_feedforward_layernorm/H post_feedforward_layernorm/H"


def _decoder(entries: str) -> str:
    return f"embed_tokens/V,H {_blocks(entries)} norm/H"


_XL = " ".join(
    f"encoder.layer.#.{entry}"
    for entry in (
        *(f"{name}:H,H" for name in _ATTENTION.split()),
        *("attention.self_attn_layer_norm:H", "intermediate.dense:I,H", "output.dense:H,I", "LayerNorm:H"),
    )
)
_JINA_BERT = f"{_embeddings('word token_type norm')} " + " ".join(
    f"encoder.layer.#.{name}"
    for name in (*(f"{part}:H,H" for part in _ATTENTION.split()), "attention.output.LayerNorm:H")
)
_ROBERTA = f"{_embeddings('word token_type norm position')} {_encoder(_ATTENTION)}"
_LLAMA = _decoder(_OPTIONAL + _FEED + _NORMS)
_BACKBONES = {
    "Bert": f"{_embeddings('word position token_type norm')} {_encoder(_ATTENTION)}",
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
    "Camembert": _ROBERTA,
    "Ernie": f"{_embeddings('word position token_type norm task_type')} {_encoder(_ATTENTION)}",
    "Data2VecText": f"{_embeddings('word token_type norm position')} {_encoder(_ATTENTION)}",
    "MegatronBert": f"{_embeddings('word position token_type')} {_pre_norm('attention.ln', 'ln')} encoder.ln:H",
    "XLMRobertaXL": f"{_embeddings('word token_type position')} {_XL} encoder.LayerNorm:H",
    "RoFormer": f"{_embeddings('word token_type norm', 'E')} embeddings_project:H,E encoder.embed_positions/P,D "
    + _encoder(_ATTENTION),
    "RemBert": f"{_embeddings('word position token_type norm', 'E')} encoder.embedding_hidden_mapping_in:H,E "
    + _encoder(_ATTENTION),
    "JinaBert": f"{_JINA_BERT} encoder.layer.#.mlp.gated_layers/2*I,H encoder.layer.#.mlp.wo:H,I "
    "encoder.layer.#.mlp.layernorm:H",
    "JinaBertCode": f"{_JINA_BERT} encoder.layer.#.attention.self.layer_norm_q:H "
    "encoder.layer.#.attention.self.layer_norm_k:H encoder.layer.#.layer_norm_1:H encoder.layer.#.layer_norm_2:H "
    "encoder.layer.#.mlp.up_gated_layer/2*I,H encoder.layer.#.mlp.down_layer:H,I",
    "Longformer": f"{_embeddings('word token_type norm position')} "
    + _encoder(
        " ".join(f"attention.self.{part}{kind}" for kind in ("", "_global") for part in ("query", "key", "value"))
    ).replace("attention.output.LayerNorm", "attention.output.dense:H,H encoder.layer.#.attention.output.LayerNorm"),
    "MobileBert": _mobilebert(),
    "BigBird": f"{_embeddings('word position token_type norm')} {_encoder(_ATTENTION)}",
    "DistilBert": f"{_embeddings('word position norm')} "
    + " ".join(f"transformer.layer.#.attention.{letter}_lin:H,H" for letter in ("q", "k", "v", "out"))
    + " transformer.layer.#.sa_layer_norm:H transformer.layer.#.ffn.lin1:I,H transformer.layer.#.ffn.lin2:H,I"
    + " transformer.layer.#.output_layer_norm:H",
    "MPNet": f"{_embeddings('word position norm')} "
    + _encoder(" ".join(f"attention.attn.{letter}" for letter in "qkvo"), "attention.LayerNorm")
    + " encoder.relative_attention_bias/B,A",
    "ModernBert": "embeddings.tok_embeddings/V,H embeddings.norm/H?norm_bias layers.+.attn_norm/H?norm_bias "
    + _blocks("attn.Wqkv/3*H,H?attention_bias attn.Wo/H,H?attention_bias mlp_norm/H?norm_bias")
    + " layers.#.mlp.Wi/2*I,H?mlp_bias layers.#.mlp.Wo/H,I?mlp_bias final_norm/H?norm_bias",
    "Electra": f"{_embeddings('word position token_type norm', 'E')} embeddings_project:H,E {_encoder(_ATTENTION)}",
    "Albert": f"{_embeddings('word position token_type norm', 'E')} encoder.embedding_hidden_mapping_in:H,E "
    + " ".join(
        f"encoder.albert_layer_groups.0.albert_layers.0.{entry}"
        for entry in (
            "full_layer_layer_norm:H",
            *(f"attention.{name}:H,H" for name in ("query", "key", "value", "dense")),
            *("attention.LayerNorm:H", "ffn:I,H", "ffn_output:H,I"),
        )
    ),
    "DebertaV2": f"{_embeddings('word token_type norm')} {_encoder(_DEBERTA)}"
    " encoder.rel_embeddings/2*B,H encoder.LayerNorm:H",
    "Deberta": f"{_embeddings('word norm')} "
    + " ".join(
        f"encoder.layer.#.attention.self.{entry}"
        for entry in ("q_bias=H", "v_bias=H", "in_proj/3*H,H", "pos_proj/H,H", "pos_q_proj:H,H")
    )
    + f" {_encoder('attention.output.dense')} encoder.rel_embeddings/2*P,H",
    **dict.fromkeys(("EuroBert", "Ultrabert"), _LLAMA),
    "NeoMME": "embed_tokens.word_embeddings/V,J embed_tokens.embedding_projection/H,J patch_embeddings.norm:48 "
    "patch_embeddings.up_proj/2*H,48 patch_embeddings.down_proj:H,2*H "
    + _blocks(
        "lambdas=2 self_attn.q_proj/Q,H self_attn.k_proj/K,H self_attn.v_proj/K,H "
        "self_attn.exclusive_self_attention.alpha=A self_attn.output_projection.gate_proj/Q,H "
        "self_attn.output_projection.o_proj/H,Q mlp.up_proj/I,H mlp.down_proj/H,I"
    )
    + " value_embeddings/V,K",
    "NomicBert": f"{_embeddings('word token_type norm')} "
    + _blocks(_NORMED.format(_GATED + " " + _BIASED.replace(":", "/"))),
    "Gte": f"{_embeddings('word token_type norm')} "
    + _blocks(_NORMED.format(_GATED.replace("down_proj/", "down_proj:") + " " + _BIASED)),
    "JinaEmbeddingsV3": f"{_embeddings('word token_type norm')} "
    + _blocks(_NORMED.format("mlp.fc1:I,H mlp.fc2:H,I " + _BIASED)),
    "Llama": _LLAMA,
    **dict.fromkeys(("Mistral", "NVEmbed"), _LLAMA),
    "Qwen2": _decoder(_QUERIES.format(":", "") + _FEED + _NORMS),
    "Qwen3": _decoder(_OPTIONAL + _HEAD_NORMS + _FEED + _NORMS),
    "Phi3": _decoder("self_attn.o_proj/H,Q self_attn.qkv_proj/W,H mlp.gate_up_proj/2*I,H mlp.down_proj/H,I" + _NORMS),
    "Olmo2": _decoder(
        _OPTIONAL
        + " self_attn.q_norm/Q self_attn.k_norm/K"
        + _FEED
        + " post_attention_layernorm/H post_feedforward_layernorm/H"
    ),
    "Granite": _LLAMA,
    "SmolLM3": _LLAMA,
    "Ministral3": _LLAMA,
    "Qwen3Moe": _decoder(
        _OPTIONAL + _HEAD_NORMS + " mlp.experts.gate_up_proj=X,2*F,H mlp.experts.down_proj=X,H,F mlp.gate/X,H" + _NORMS
    ),
    "GPTNeoX": "embed_in/V,H "
    + _blocks("input_layernorm:H post_attention_layernorm:H attention.query_key_value:3*H,H attention.dense:H,H")
    + " layers.#.mlp.dense_h_to_4h:I,H layers.#.mlp.dense_4h_to_h:H,I final_layer_norm:H",
    "Gemma": _LLAMA,
    "Gemma2": _decoder(_OPTIONAL + _FEED + _NORMS + _FEED_NORMS),
    "Gemma3Text": _decoder(_OPTIONAL + _HEAD_NORMS + _FEED + _NORMS + _FEED_NORMS),
    "GPT2": "wte/V,H wpe/P,H h.#.ln_1:H h.#.attn.c_attn.weight=H,3*H h.#.attn.c_attn.bias=3*H h.#.attn.c_proj:H,H "
    "h.#.ln_2:H h.#.mlp.c_fc.weight=H,I h.#.mlp.c_fc.bias=I h.#.mlp.c_proj.weight=I,H h.#.mlp.c_proj.bias=H ln_f:H",
}


def _jamba(config: Config) -> list[str]:
    """Jamba's layers are of four kinds."""
    mamba = "A_log=M,S D=M conv1d:M,1,C in_proj/2*M,H x_proj/Y,M dt_proj:M,R out_proj/H,M"
    norms = "dt_layernorm/R b_layernorm/S c_layernorm/S"
    entries = ["embed_tokens/V,H"]
    for layer in range(int(config["num_hidden_layers"])):
        attends = layer % config["attn_layer_period"] == config["attn_layer_offset"]
        chooses = layer % config["expert_layer_period"] == config["expert_layer_offset"]
        mixer = [f"mamba.{entry}" for entry in f"{mamba} {norms}".split()]
        experts = ("router/X,H", "experts.gate_up_proj=X,2*I,H", "experts.down_proj=X,H,I")
        plain = ("gate_proj/I,H", "up_proj/I,H", "down_proj/H,I")
        block = [*(_OPTIONAL.split() if attends else mixer)]
        block += [f"feed_forward.{entry}" for entry in (experts if chooses else plain)]
        entries += [f"layers.{layer}.{entry}" for entry in (*block, "input_layernorm/H", "pre_ff_layernorm/H")]
    return [*entries, "final_layernorm/H"]


def _qwen3_5(config: Config) -> list[str]:
    """Qwen3.5's layers have a gated delta rule, or attention with a gate."""
    keys, values = (
        int(config[f"linear_num_{part}_heads"]) * int(config[f"linear_{part}_head_dim"]) for part in ("key", "value")
    )
    count, inner = int(config["linear_num_value_heads"]), 2 * keys + values
    delta = (
        f"dt_bias={count} A_log={count} conv1d/{inner},1,{config['linear_conv_kernel_dim']} "
        f"norm/{config['linear_value_head_dim']} out_proj/H,{values} in_proj_qkv/{inner},H in_proj_z/{values},H "
        f"in_proj_b/{count},H in_proj_a/{count},H"
    )
    mixers = {
        "linear_attention": " ".join(f"linear_attn.{entry}" for entry in delta.split()),
        "full_attention": (_OPTIONAL + _HEAD_NORMS).replace("q_proj/Q,H", "q_proj/2*Q,H"),  # and as many gates
    }
    feed = "mlp.gate_proj/I,H mlp.up_proj/I,H mlp.down_proj/H,I input_layernorm/H post_attention_layernorm/H"
    layers = (f"{mixers[kind]} {feed}" for kind in config["layer_types"])
    entries = (f"layers.{i}.{entry}" for i, layer in enumerate(layers) for entry in layer.split())
    return ["embed_tokens/V,H", *entries, "norm/H"]


def _lfm2(config: Config) -> list[str]:
    """LFM2's layers convolve or attend."""
    width = 2 * int(config["block_ff_dim"]) // 3
    inner = -(-width // config["block_multiple_of"]) * config["block_multiple_of"]
    feed = f"feed_forward.w1/{inner},H feed_forward.w3/{inner},H feed_forward.w2/H,{inner}"
    queries = _QUERIES.format("/", "").replace("o_proj", "out_proj")
    mixers = {
        "conv": f"conv.conv/H,1,{config['conv_L_cache']} conv.in_proj/3*H,H conv.out_proj/H,H",
        "full_attention": f"{queries} self_attn.q_layernorm/D self_attn.k_layernorm/D",
    }
    layers = (f"{mixers[kind]} {feed} operator_norm/H ffn_norm/H" for kind in config["layer_types"])
    entries = (f"layers.{i}.{entry}" for i, layer in enumerate(layers) for entry in layer.split())
    return ["embed_tokens/V,H", *entries, "embedding_norm/H"]


def _nomic_moe(config: Config) -> list[str]:
    """NomicBert's layers with a plain feed forward, and with experts, under the names of the hub."""
    entries = ["embeddings.word_embeddings/V,H", "embeddings.token_type_embeddings/T,H", "emb_ln:H"]
    for layer in range(int(config["n_layer"])):
        mixed = layer % config["moe_every_n_layers"] == 1
        experts = ("router.layer/X,H", "experts.mlp.w1=X*I,H", "experts.mlp.w2=X*I,H", "experts.bias=H")
        feed = experts if mixed else ("fc1:I,H", "fc2:H,I")
        block = ("attn.Wqkv:3*H,H", "attn.out_proj:H,H", "norm1:H", *(f"mlp.{entry}" for entry in feed), "norm2:H")
        entries += [f"encoder.layers.{layer}.{entry}" for entry in block]
    return entries


def _embedding_gemma2(config: Config) -> list[str]:
    """The text's layers, whose heads differ, under its name in the whole model."""
    text = config["text_config"]
    width, heads, gates, layers = (
        int(text[name])
        for name in ("hidden_size", "num_attention_heads", "hidden_size_per_layer_input", "num_hidden_layers")
    )
    entries = [f"embed_tokens/{text.get('vocab_size', 0)},{width}"]
    for layer in range(layers):
        own = {**text, **text["per_layer_config"].get(str(layer), {})}
        queries, keys = (count * int(own["head_dim"]) for count in (heads, int(own["num_key_value_heads"])))
        rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        block = [f"self_attn.{name}/{count},{width}" for name, count in rows.items()]
        block += [f"self_attn.o_proj/{width},{queries}"]
        block += [f"self_attn.{letter}_norm/{own['head_dim']}" for letter in "qk"]
        inner = int(text["intermediate_size"])
        block += [f"mlp.{name}_proj/{inner},{width}" for name in ("gate", "up")] + [f"mlp.down_proj/{width},{inner}"]
        block += [entry.replace("H", str(width)) for entry in (_NORMS + _FEED_NORMS).split()]
        block += [
            f"ple_block.per_layer_input_gate/{gates},{width}",
            f"ple_block.per_layer_projection/{width},{gates}",
            f"ple_block.post_per_layer_input_norm/{width}",
        ]
        entries += [f"layers.{layer}.{entry}" for entry in block]
    entries += [f"norm/{width}", f"ple.per_layer_model_projection/{layers * gates},{width}"]
    entries += [f"ple.per_layer_projection_norm/{gates}", f"embedding_projection/{text['embedding_dim']},{width}"]
    return [f"language_model.{entry}" for entry in entries]


_MIXED = {
    "EmbeddingGemma2": _embedding_gemma2,
    "Jamba": _jamba,
    "Lfm2": _lfm2,
    "NomicBertMoe": _nomic_moe,
    "Qwen3_5Text": _qwen3_5,
}


def _t5(family: str, head: str, config: Config) -> dict[str, Shape]:
    """The encoder; with a language model's head or that of a classifier of texts, the decoder too."""
    sizes = _sizes(config)
    lead = "transformer." if head.endswith("Classification") else ""

    def half(name: str, layers: int) -> Iterator[str]:
        yield f"{name}.embed_tokens/V,H"
        for layer in range(layers):
            block, feed = (
                f"{name}.block.{layer}.layer.",
                "wi_0 wi_1" if "gated" in config["feed_forward_proj"] else "wi",
            )
            kinds = ("SelfAttention", "EncDecAttention") if name == "decoder" else ("SelfAttention",)
            for i, kind in enumerate(kinds):
                yield from (f"{block}{i}.{kind}.{letter}/K,H" for letter in "qkv")
                yield f"{block}{i}.{kind}.o/H,K"
                if not i and (not layer or family.startswith("U")):
                    yield f"{block}{i}.{kind}.relative_attention_bias/B,A"
                yield f"{block}{i}.layer_norm/H"
            yield from (f"{block}{len(kinds)}.DenseReluDense.{part}/I,H" for part in feed.split())
            yield f"{block}{len(kinds)}.DenseReluDense.wo/H,I"
            yield f"{block}{len(kinds)}.layer_norm/H"
        yield f"{name}.final_layer_norm/H"

    entries = ["shared/V,H", *half("encoder", sizes["N"])]
    if head in ("ConditionalGeneration", "SequenceClassification"):
        entries += half("decoder", int(config["num_decoder_layers"]))
    heads = {
        "ConditionalGeneration": "lm_head/V,H",
        "SequenceClassification": "classification_head.dense:H,H classification_head.out_proj:L,H",
        "TokenClassification": "classifier:L,H",
    }
    return dict(_expand([*(lead + entry for entry in entries), *heads.get(head, "").split()], config))


def _bart(head: str, config: Config) -> dict[str, Shape]:
    """The encoder and the decoder, whose sizes may differ."""
    lead, attention = "model." if head else "", "{0}.k_proj:H,H {0}.v_proj:H,H {0}.q_proj:H,H {0}.out_proj:H,H"
    entries = ["shared/V,H"]
    for part, kinds in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"])):
        inner = config[f"{part}_ffn_dim"]
        entries += [f"{part}.embed_tokens/V,H", f"{part}.embed_positions/{config['max_position_embeddings'] + 2},H"]
        for layer in range(int(config[f"{part}_layers"])):
            block = [f"{attention.format(kind)} {kind}_layer_norm:H" for kind in kinds]
            feed = f"fc1:{inner},H fc2:H,{inner} final_layer_norm:H"
            entries += [f"{part}.layers.{layer}.{entry}" for entry in " ".join((*block, feed)).split()]
        entries.append(f"{part}.layernorm_embedding:H")
    heads = {
        "ConditionalGeneration": "lm_head/V,H",
        "SequenceClassification": "classification_head.dense:H,H classification_head.out_proj:L,H",
    }
    if head and head not in heads:
        raise AttributeError(f"transformers has no BartFor{head}")
    return dict(_expand([*(lead + entry for entry in entries), *heads.get(head, "").split()], config))


_PREFIXES = {
    "NomicBertMoe": "bert",
    **dict.fromkeys(("Bert", "JinaBert", "JinaBertCode"), "bert"),
    "DistilBert": "distilbert",
    "MPNet": "mpnet",
    "Electra": "electra",
    "Ernie": "ernie",
    "Data2VecText": "data2vec_text",
    "MegatronBert": "bert",
    "RoFormer": "roformer",
    "RemBert": "rembert",
    "Longformer": "longformer",
    "BigBird": "bert",
    "MobileBert": "mobilebert",
    "Albert": "albert",
    **dict.fromkeys(("Deberta", "DebertaV2"), "deberta"),
    "NomicBert": "nomic_bert",
    "Gte": "gte",
    "GPT2": "transformer",
    "GPTNeoX": "gpt_neox",
    **dict.fromkeys(("EmbeddingGemma2", "Lfm2"), "model"),
    **dict.fromkeys(("Roberta", "XLMRoberta", "XLMRobertaXL", "Camembert", "JinaEmbeddingsV3"), "roberta"),
    **dict.fromkeys(
        ("ModernBert", "EuroBert", "Ultrabert", "NeoMME", "Llama", "Mistral", "NVEmbed", "Qwen2", "Qwen3", "Jamba"),
        "model",
    ),
    "Qwen3_5Text": "model",
    **dict.fromkeys(("Phi3", "Olmo2", "Granite", "SmolLM3", "Ministral3", "Qwen3Moe"), "model"),
    **dict.fromkeys(("Gemma", "Gemma2", "Gemma3Text"), "model"),
}
_POOLERS = {
    **dict.fromkeys(("Bert", "Roberta", "XLMRoberta", "Camembert", "MPNet", "JinaEmbeddingsV3"), "pooler.dense:H,H"),
    **dict.fromkeys(
        ("Ernie", "Data2VecText", "MegatronBert", "XLMRobertaXL", "RemBert", "Longformer"), "pooler.dense:H,H"
    ),
    **dict.fromkeys(("JinaBert", "JinaBertCode"), "pooler.dense:H,H"),
    **dict.fromkeys(("Albert", "BigBird"), "pooler:H,H"),
}
# Families whose heads are those of another one.
_HEAD_FIRST = ("XLMRoberta", "Camembert")  # their masked language models have the head before the backbone
_LIKE = {
    **dict.fromkeys(
        ("XLMRoberta", "XLMRobertaXL", "Camembert", "Data2VecText", "Longformer", "MPNet", "JinaEmbeddingsV3"),
        "Roberta",
    ),
    **dict.fromkeys(("Ernie", "MegatronBert"), "Bert"),
    "Deberta": "DebertaV2",
    **dict.fromkeys(("JinaBert", "JinaBertCode", "NomicBertMoe"), "Bert"),
    **dict.fromkeys(("Mistral", "NVEmbed", "Qwen2", "Qwen3", "Gemma", "Gemma2"), "Llama"),
    **dict.fromkeys(("Phi3", "SmolLM3", "Ministral3", "Qwen3Moe"), "Llama"),
    "GPTNeoX": "GPT2",
}
_CLASSIFIER = "classifier:L,H"
_MODERN = "head.dense/H,H?classifier_bias head.norm/H?norm_bias"
_BERT_VOCABULARY = "cls.predictions.bias=V cls.predictions.transform.dense:H,H cls.predictions.transform.LayerNorm:H"
_PAIRS = "classifier.dense:H,H classifier.out_proj:L,H"
_SEQUENCE, _TOKEN = "SequenceClassification", "TokenClassification"
_HEADS = {
    ("Bert", "MaskedLM"): _BERT_VOCABULARY,
    ("Bert", _SEQUENCE): f"+pooler {_CLASSIFIER}",
    ("Bert", _TOKEN): _CLASSIFIER,
    ("Roberta", "MaskedLM"): "lm_head.bias=V lm_head.dense:H,H lm_head.layer_norm:H",
    ("Roberta", _SEQUENCE): _PAIRS,
    ("Roberta", _TOKEN): _CLASSIFIER,
    ("RoFormer", "MaskedLM"): _BERT_VOCABULARY.replace("H,H", "E,H").replace("LayerNorm:H", "LayerNorm:E"),
    ("RoFormer", _SEQUENCE): _PAIRS,
    ("RoFormer", _TOKEN): _CLASSIFIER,
    ("MobileBert", "MaskedLM"): f"{_BERT_VOCABULARY} cls.predictions.dense/Z,V",
    ("MobileBert", _SEQUENCE): _CLASSIFIER,
    ("MobileBert", _TOKEN): _CLASSIFIER,
    ("BigBird", "MaskedLM"): f"+pooler {_BERT_VOCABULARY}",
    ("BigBird", _SEQUENCE): f"+pooler {_PAIRS}",
    ("BigBird", _TOKEN): f"+pooler {_CLASSIFIER}",
    ("RemBert", "MaskedLM"): "cls.predictions.dense:O,H cls.predictions.decoder:V,O cls.predictions.LayerNorm:O",
    ("RemBert", _SEQUENCE): f"+pooler {_CLASSIFIER}",
    ("RemBert", _TOKEN): _CLASSIFIER,
    ("DistilBert", "MaskedLM"): "vocab_transform:H,H vocab_layer_norm:H vocab_projector.bias=V",
    ("DistilBert", _SEQUENCE): f"pre_classifier:H,H {_CLASSIFIER}",
    ("DistilBert", _TOKEN): _CLASSIFIER,
    ("ModernBert", "MaskedLM"): f"{_MODERN} decoder.bias=V",
    ("ModernBert", _SEQUENCE): f"{_MODERN} {_CLASSIFIER}",
    ("ModernBert", _TOKEN): f"{_MODERN} {_CLASSIFIER}",
    (
        "Electra",
        "MaskedLM",
    ): "generator_predictions.LayerNorm:E generator_predictions.dense:E,H generator_lm_head.bias=V",
    ("Electra", _SEQUENCE): _PAIRS,
    ("Electra", _TOKEN): _CLASSIFIER,
    ("Albert", "MaskedLM"): "predictions.bias=V predictions.LayerNorm:E predictions.dense:E,H",
    ("Albert", _SEQUENCE): f"+pooler {_CLASSIFIER}",
    ("Albert", _TOKEN): _CLASSIFIER,
    ("DebertaV2", "MaskedLM"): _BERT_VOCABULARY,
    ("DebertaV2", _SEQUENCE): f"pooler.dense:H,H {_CLASSIFIER}",
    ("DebertaV2", _TOKEN): _CLASSIFIER,
    ("EuroBert", "MaskedLM"): "lm_head/V,H",
    ("EuroBert", _SEQUENCE): f"dense:H,H {_CLASSIFIER}",
    ("EuroBert", _TOKEN): _CLASSIFIER,
    ("NeoMME", "MaskedLM"): "+pooler",  # its head is tied
    ("Ultrabert", "MaskedLM"): "head.linear1/H,H head.linear2/H,H head.decoder/V,H",
    ("Ultrabert", _SEQUENCE): _CLASSIFIER,
    ("Ultrabert", _TOKEN): _CLASSIFIER,
    ("NomicBert", "MaskedLM"): _BERT_VOCABULARY.replace("LayerNorm", "layer_norm"),
    ("NomicBert", _SEQUENCE): f"nomic_bert.pooler.dense:H,H {_CLASSIFIER}",
    ("NomicBert", _TOKEN): _CLASSIFIER,
    ("Gte", "MaskedLM"): "lm_head.dense:H,H lm_head.layer_norm:H lm_head.decoder.bias=V",
    ("Gte", _SEQUENCE): f"gte.pooler.dense:H,H {_CLASSIFIER}",
    ("Gte", _TOKEN): _CLASSIFIER,
    ("Llama", "CausalLM"): "lm_head/V,H",
    ("Llama", _SEQUENCE): "score/L,H",
    ("Llama", _TOKEN): "score:L,H",
    ("Gemma3Text", "CausalLM"): "lm_head/V,H",
    ("Gemma3Text", _SEQUENCE): "score/L,H",
    ("GPT2", "CausalLM"): "lm_head/V,H",
    ("GPT2", _SEQUENCE): "score/L,H",
    ("GPT2", _TOKEN): _CLASSIFIER,
    **dict.fromkeys((("Olmo2", "CausalLM"), ("Granite", "CausalLM")), "lm_head/V,H"),
    ("Olmo2", _SEQUENCE): "score/L,H",
    ("Lfm2", "CausalLM"): "lm_head/V,H",
    ("Qwen3_5Text", "CausalLM"): "lm_head/V,H",
    ("Qwen3_5Text", _SEQUENCE): "score/L,H",
    ("Jamba", "CausalLM"): "lm_head/V,H",
    ("Jamba", _SEQUENCE): "score/L,H",
}
