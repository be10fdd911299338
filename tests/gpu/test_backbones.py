"""Backbones on the GPU in half precision, against the same weights in float32 on the CPU."""

import copy

import pytest
import torch
import transformers

from millpond.attention import interface
from millpond.attention.segments import Segments
from millpond.checkpoints.architectures import row_of
from millpond.models import deberta, gpt2, jamba
from millpond.models.load import packed_forward

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FINISHED = {"deberta-v2": deberta, "gpt2": gpt2, "jamba": jamba}
LENGTHS = [7, 1, 13, 30, 4, 30]
SIZE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 200,
}
DECODER = {**SIZE, "num_key_value_heads": 2, "max_position_embeddings": 64}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DISTANCES = {
    "relative_attention": True,
    "pos_att_type": "p2c|c2p",
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
WINDOW = {
    "head_dim": 32,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
}
# These run in bfloat16 only, because of the range of their states or their grouped matrix products.
BFLOAT16 = ("gemma2", "gemma3", "gemma3-bidirectional", "jamba")

CONFIGS = {
    "bert": transformers.BertConfig(**SIZE, max_position_embeddings=40),
    "xlm-roberta": transformers.XLMRobertaConfig(**SIZE, max_position_embeddings=42, pad_token_id=1),
    "modernbert": transformers.ModernBertConfig(
        **{**SIZE, "num_hidden_layers": 4}, **SPECIAL, local_attention=8, cls_token_id=1, sep_token_id=2
    ),
    "llama": transformers.LlamaConfig(**DECODER),
    "mistral": transformers.MistralConfig(**DECODER, sliding_window=5),
    "qwen3": transformers.Qwen3Config(**DECODER, head_dim=32),
    "gemma2": transformers.Gemma2Config(
        **DECODER, head_dim=32, sliding_window=5, query_pre_attn_scalar=24, attn_logit_softcapping=5.0
    ),
    "electra": transformers.ElectraConfig(**SIZE, max_position_embeddings=40, embedding_size=32),
    "albert": transformers.AlbertConfig(**SIZE, max_position_embeddings=40, embedding_size=32),
    "deberta-v2": transformers.DebertaV2Config(**SIZE, **DISTANCES, max_position_embeddings=64, position_buckets=16),
    "deberta-v2-convolution": transformers.DebertaV2Config(
        **SIZE, **DISTANCES, max_position_embeddings=64, conv_kernel_size=3, conv_act="gelu"
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **{**DECODER, "num_hidden_layers": 3}, **WINDOW, use_bidirectional_attention=False
    ),
    "gemma3-bidirectional": transformers.Gemma3TextConfig(
        **{**DECODER, "num_hidden_layers": 3}, **WINDOW, use_bidirectional_attention=True
    ),
    "gpt2": transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=40, vocab_size=200, pad_token_id=0),
    "llama-bidirectional": transformers.LlamaConfig(**DECODER, is_causal=False),
    "jamba": transformers.JambaConfig(  # every expert for every token, since rounding may change a router's choice
        **{**DECODER, "num_hidden_layers": 3},
        **SPECIAL,
        attn_layer_period=3,
        attn_layer_offset=2,
        num_experts=4,
        num_experts_per_tok=4,
    ),
}
if hasattr(transformers, "EuroBertConfig"):
    CONFIGS["eurobert"] = transformers.EuroBertConfig(**DECODER, **SPECIAL)
if hasattr(transformers, "NomicBertConfig"):
    CONFIGS["nomic"] = transformers.NomicBertConfig(**SIZE, max_position_embeddings=40)
if hasattr(transformers, "GteConfig"):
    CONFIGS["gte"] = transformers.GteConfig(**SIZE, max_position_embeddings=40)


def build(config, dtype, device):
    interface.register()
    torch.manual_seed(0)
    backbone = transformers.AutoModel.from_config(copy.deepcopy(config), attn_implementation=interface.NAME)
    for parameter in backbone.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    backbone = backbone.to(device=device, dtype=dtype).eval()
    if config.model_type in FINISHED:
        return FINISHED[config.model_type].finish(backbone, None).eval()
    return packed_forward(backbone, row_of(config.model_type))


@torch.inference_mode()
def run(config, dtype, device):
    model = build(config, dtype, device)
    offset = 2 if config.model_type == "xlm-roberta" else 0
    ids = torch.randint(5, 200, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1)).to(device)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].to(device) + offset
    decoders = ("llama", "mistral", "qwen3", "gemma2", "gemma3_text", "gpt2", "jamba")
    options = {"use_cache": False} if config.model_type in decoders else {}
    out = model(input_ids=ids, position_ids=positions, segments=Segments.of(LENGTHS, device), **options)
    return out.last_hidden_state[0].float().cpu()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_half_precision_stays_near_float32(name, dtype):
    if name in BFLOAT16 and dtype is torch.float16:
        pytest.skip("float16 is too narrow for it; millpond gives it bfloat16")
    reference = run(CONFIGS[name], torch.float32, "cpu")
    out = run(CONFIGS[name], dtype, DEVICE)
    least = 0.99 if name == "jamba" else 0.999  # its scan accumulates in the precision of the states
    assert torch.nn.functional.cosine_similarity(out, reference, dim=-1).min() > least


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_equals_the_cpu(name):
    torch.testing.assert_close(
        run(CONFIGS[name], torch.float32, DEVICE), run(CONFIGS[name], torch.float32, "cpu"), atol=2e-4, rtol=1e-3
    )
