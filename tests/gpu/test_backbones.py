"""Backbones on the GPU in half precision against the same weights in float32 on the CPU."""

import copy

import pytest
import torch
import transformers

from millpond.attention import interface
from millpond.attention.segments import Segments
from millpond.models.encoder import FAMILIES, PackedEncoder

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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
}


def build(config, dtype, device):
    interface.register()
    torch.manual_seed(0)
    backbone = transformers.AutoModel.from_config(copy.deepcopy(config), attn_implementation=interface.NAME)
    for parameter in backbone.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    backbone = backbone.to(device=device, dtype=dtype).eval()
    return PackedEncoder(backbone, config.model_type).eval() if config.model_type in FAMILIES else backbone


@torch.inference_mode()
def run(config, dtype, device):
    model = build(config, dtype, device)
    offset = 2 if config.model_type == "xlm-roberta" else 0
    ids = torch.randint(5, 200, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1)).to(device)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].to(device) + offset
    options = {} if config.model_type in (*FAMILIES, "modernbert") else {"use_cache": False}
    out = model(input_ids=ids, position_ids=positions, segments=Segments.of(LENGTHS, device), **options)
    return out.last_hidden_state[0].float().cpu()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_half_precision_stays_near_float32(name, dtype):
    if name == "gemma2" and dtype is torch.float16:
        pytest.skip("Gemma 2 overflows in float16; millpond gives it bfloat16")
    reference = run(CONFIGS[name], torch.float32, "cpu")
    out = run(CONFIGS[name], dtype, DEVICE)
    assert torch.nn.functional.cosine_similarity(out, reference, dim=-1).min() > 0.999


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_equals_the_cpu(name):
    torch.testing.assert_close(
        run(CONFIGS[name], torch.float32, DEVICE), run(CONFIGS[name], torch.float32, "cpu"), atol=2e-4, rtol=1e-3
    )
