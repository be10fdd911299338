"""Kernels, backbones and eight-bit layers on a GPU, against the same in float32 on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from millpond.backends.torch.attention import interface, sdpa, triton, varlen
from millpond.backends.torch.attention.kernels import attend, select
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import Masking
from millpond.backends.torch.forwards import deberta, gpt2, recurrent
from millpond.backends.torch.forwards.encoder import PackedEncoder
from millpond.backends.torch.loading.load import packed_forward
from millpond.backends.torch.loading.quantize import check_quantization, quantize
from millpond.checkpoints.architectures import row_of
from millpond.errors import ModelLoadError

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="this kernel needs CUDA")


KERNEL_LENGTHS = {
    "mixed": [1, 7, 500, 33, 2, 128, 128, 64],
    "single tokens": [1] * 300,
    "one long": [4096],
    "equal": [50] * 40,
}


HEADS = {"plain": (12, 12, 64), "grouped": (16, 2, 128), "narrow": (12, 12, 32), "wide": (4, 1, 256)}


WINDOWS = {"full": None, "window": 65, "wider than all": 100_000}


def qkv(lengths, heads, dtype, device):
    query_heads, kv_heads, dim = heads
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), count, dim) for count in (query_heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).to(device=device, dtype=dtype) for shape in shapes]


def compare(out, q, k, v, lengths, masking, tolerance, keys=None):
    """Compare ``out`` with the reference kernel over the same rounded inputs, in float32 on the CPU."""
    reference = sdpa.attend(*(x.float().cpu() for x in (q, k, v)), Segments.of(lengths, keys=keys), masking)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.float().cpu(), reference, atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("lengths", KERNEL_LENGTHS.values(), ids=KERNEL_LENGTHS.keys())
def test_packed_kernels_equal_the_reference(lengths, heads, window, causal, dtype):
    q, k, v = qkv(lengths, heads, dtype, "cuda")
    masking = Masking(scale=heads[2] ** -0.5, causal=causal, window=window)
    segments = Segments.of(lengths, "cuda")
    assert select(q, k, v, segments, masking) is triton
    for kernel in (triton, varlen):
        assert kernel.fits(q, k, v, segments, masking)
        out = kernel.attend(q, k, v, segments, masking)
        compare(out, q, k, v, lengths, masking, 4e-3 if dtype is torch.float16 else 3e-2)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("heads", [HEADS["plain"], HEADS["grouped"], HEADS["wide"]])
@pytest.mark.parametrize("lengths", KERNEL_LENGTHS.values(), ids=KERNEL_LENGTHS.keys())
def test_softcaps_equal_the_reference(lengths, heads, window, causal):
    q, k, v = qkv(lengths, heads, torch.bfloat16, "cuda")
    masking = Masking(scale=heads[2] ** -0.5, causal=causal, window=window, softcap=5.0)
    segments = Segments.of(lengths, "cuda")
    assert select(q, k, v, segments, masking) is triton
    compare(triton.attend(q, k, v, segments, masking), q, k, v, lengths, masking, 3e-2)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("lengths", [[32] * 20, [32, 32, 500, 7, 32, 128]], ids=["queries", "mixed"])
def test_fewer_keys_than_queries(lengths, heads, window, softcap):
    """Queries of 32 tokens with expansion tokens that are no keys, batched with documents whose tokens all are keys."""
    keys = [3 + i if length == 32 else length for i, length in enumerate(lengths)]
    q, k, v = qkv(lengths, heads, torch.bfloat16, "cuda")
    masking = Masking(scale=heads[2] ** -0.5, causal=False, window=window, softcap=softcap)
    out = attend(q, k, v, Segments.of(lengths, "cuda", keys=keys), masking)
    compare(out, q, k, v, lengths, masking, 3e-2, keys=keys)
    with pytest.raises(AssertionError):
        compare(out, q, k, v, lengths, masking, 3e-2)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("lengths", KERNEL_LENGTHS.values(), ids=KERNEL_LENGTHS.keys())
def test_float32_on_cuda_takes_the_reference_kernel(lengths):
    q, k, v = qkv(lengths, HEADS["grouped"], torch.float32, "cuda")
    masking = Masking(scale=0.1, causal=True, window=65)
    segments = Segments.of(lengths, "cuda")
    assert select(q, k, v, segments, masking) is sdpa
    compare(sdpa.attend(q, k, v, segments, masking), q, k, v, lengths, masking, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [HEADS["plain"], HEADS["grouped"]])
def test_a_wrong_window_is_seen(heads):
    """Negative control, on any device: a window wider by one token exceeds the tolerances clearly."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = KERNEL_LENGTHS["mixed"]
    q, k, v = qkv(lengths, heads, torch.bfloat16, device)
    masking = Masking(scale=heads[2] ** -0.5, causal=True, window=5)
    wider = Masking(scale=heads[2] ** -0.5, causal=True, window=6)
    out = attend(q, k, v, Segments.of(lengths, device), wider)
    with pytest.raises(AssertionError):
        compare(out, q, k, v, lengths, masking, 3e-2)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


FINISHED = {"deberta-v2": deberta, "gpt2": gpt2, "jamba": recurrent}


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_half_precision_stays_near_float32(name, dtype):
    if name in BFLOAT16 and dtype is torch.float16:
        pytest.skip("float16 is too narrow for it; millpond gives it bfloat16")
    reference = run(CONFIGS[name], torch.float32, "cpu")
    out = run(CONFIGS[name], dtype, DEVICE)
    least = 0.99 if name == "jamba" else 0.999  # its scan accumulates in the precision of the states
    assert torch.nn.functional.cosine_similarity(out, reference, dim=-1).min() > least


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_float32_equals_the_cpu(name):
    torch.testing.assert_close(
        run(CONFIGS[name], torch.float32, DEVICE), run(CONFIGS[name], torch.float32, "cpu"), atol=2e-4, rtol=1e-3
    )


GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# A batch of few rows, for which cuBLAS has no integer matrix product, and one of many.
BATCHES = [[3, 1], [7, 1, 13, 30, 4, 30]]


@pytest.fixture(scope="module")
def backbone():
    interface.register()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=200,
        initializer_range=0.2,
        attn_implementation=interface.NAME,
    )
    return transformers.BertModel(config, add_pooling_layer=False).eval().requires_grad_(False)


def rows_of_batch(backbone, lengths):
    total = sum(lengths)
    ids = (torch.arange(total, device=GPU) * 7 % 200)[None]
    places = torch.cat([torch.arange(length) for length in lengths]).to(GPU)[None]
    with torch.inference_mode():
        out = backbone(
            input_ids=ids, position_ids=places, segments=Segments.of(lengths, GPU), token_type_ids=torch.zeros_like(ids)
        )
    return out.last_hidden_state[0].float().cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", BATCHES, ids=["few rows", "many rows"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_eight_bits_are_close(kind, lengths, backbone):
    if GPU.type == "cuda":
        pytest.importorskip("torchao")
    try:
        check_quantization(kind, GPU, torch.bfloat16)
    except ModelLoadError as error:
        pytest.skip(str(error))
    plain = PackedEncoder(copy.deepcopy(backbone).to(GPU, torch.bfloat16), row_of("bert")).eval()
    small = quantize(PackedEncoder(copy.deepcopy(backbone).to(GPU, torch.bfloat16), row_of("bert")).eval(), kind, GPU)
    found, expected = rows_of_batch(small, lengths), rows_of_batch(plain, lengths)
    assert torch.nn.functional.cosine_similarity(found, expected).min() >= 0.98
    assert (found - expected).abs().max() > 1e-3  # control: the quantized layers ran
    assert torch.allclose(rows_of_batch(small, lengths[:1]), found[: lengths[0]], atol=0.05)  # in any batch
