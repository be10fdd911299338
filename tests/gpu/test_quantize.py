"""Eight-bit linear layers on the GPU, through torchao, against the same backbone without them."""

import copy

import pytest
import torch
import transformers

from millpond.attention import interface
from millpond.attention.segments import Segments
from millpond.checkpoints.architectures import row_of
from millpond.errors import ModelLoadError
from millpond.models.encoder import PackedEncoder
from millpond.models.quantize import check_quantization, quantize

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# A batch of few rows, for which cuBLAS has no integer matrix product, and one of many.
LENGTHS = [[3, 1], [7, 1, 13, 30, 4, 30]]


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


def run(backbone, lengths):
    total = sum(lengths)
    ids = (torch.arange(total, device=DEVICE) * 7 % 200)[None]
    places = torch.cat([torch.arange(length) for length in lengths]).to(DEVICE)[None]
    with torch.inference_mode():
        out = backbone(
            input_ids=ids,
            position_ids=places,
            segments=Segments.of(lengths, DEVICE),
            token_type_ids=torch.zeros_like(ids),
        )
    return out.last_hidden_state[0].float().cpu()


@pytest.mark.parametrize("lengths", LENGTHS, ids=["few rows", "many rows"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_eight_bits_are_close(kind, lengths, backbone):
    if DEVICE.type == "cuda":
        pytest.importorskip("torchao")
    try:
        check_quantization(kind, DEVICE, torch.bfloat16)
    except ModelLoadError as error:
        pytest.skip(str(error))
    plain = PackedEncoder(copy.deepcopy(backbone).to(DEVICE, torch.bfloat16), row_of("bert")).eval()
    small = quantize(
        PackedEncoder(copy.deepcopy(backbone).to(DEVICE, torch.bfloat16), row_of("bert")).eval(), kind, DEVICE
    )
    found, expected = run(small, lengths), run(plain, lengths)
    assert torch.nn.functional.cosine_similarity(found, expected).min() >= 0.98
    assert (found - expected).abs().max() > 1e-3  # control: the quantized layers ran
    assert torch.allclose(run(small, lengths[:1]), found[: lengths[0]], atol=0.05)  # in any batch
