"""The installed torch has what millpond calls; a call that is wrong is seen, by both ways of reading a torch."""

import ast
import inspect
from pathlib import Path

import pytest
import torch
from tests.house import torch_calls
from tests.house.torch_calls import ROADS, Call, Objects, Stubs, calls, main, problem, report

FOLDER = Path(torch.__file__).parents[1]


@pytest.fixture(scope="module", params=["objects", "stubs"])
def installed(request):
    return Objects() if request.param == "objects" else Stubs(FOLDER / "torch")


def test_the_installed_torch_has_what_millpond_calls(installed):
    problems, roads = report(installed)
    assert problems == []
    assert torch.__version__.startswith(installed.version)  # metadata may lack the build
    lacking = [
        f"{name} has no {parameter}: {instead}"
        for (name, parameter), instead in ROADS.items()
        if parameter not in inspect.signature(torch_calls._object(name)[0]).parameters
    ]
    assert roads == lacking


def test_the_calls_of_the_cuda_path_are_among_them():
    called = {call.name for call in calls() if not call.mention}
    assert called >= {
        "torch.compile",
        "torch.cuda.CUDAGraph",
        "torch.cuda.Event",
        "torch.cuda.Event.record",
        "torch.cuda.Stream",
        "torch.cuda.Stream.wait_stream",
        "torch.cuda.default_stream",
        "torch.cuda.empty_cache",
        "torch.cuda.get_device_capability",
        "torch.cuda.graph",
        "torch.cuda.graph_pool_handle",
        "torch.cuda.stream",
        "torch.nn.attention.flex_attention.BlockMask.from_kv_blocks",
        "torch.nn.attention.varlen.varlen_attn",
        "torch.nn.functional.pad",
        "torch.nn.functional.scaled_dot_product_attention",
        "torch.repeat_interleave",
        "torch.segment_reduce",
        "torch.Tensor.pin_memory",
    }
    named = {call.name for call in calls()}
    assert named >= {"torch.OutOfMemoryError", "torch.AcceleratorError", "torch._dynamo.exc.FailOnRecompileLimitHit"}
    assert len(called) > 80


def test_hardly_any_call_fits_for_want_of_a_signature(installed):
    assert len({call.name for call in calls() if not call.mention and not installed.signatures(call.name)}) < 5


@pytest.mark.parametrize(
    "written",
    [
        "torch.nowhere(1)",
        "torch.cuda.nowhere()",
        "torch.cuda.Stream(device, 0, 1)",
        "torch.cuda.Stream.wait_stream()",
        "torch.cuda.Event(blocks=True)",
        "torch.cuda.graph(g, pools=p)",
        "torch.cuda.graph_pool_handle(device)",
        "torch.compile(f, fullgraphs=True)",
        "torch.segment_reduce(rows, how, length=n)",
        "torch.arange(5, step_size=1)",
        "torch.Tensor.index_select(0)",
        "torch.Tensor.nowhere(0)",
        "torch.nn.functional.pad(x, p, values=0)",
        "torch.nn.functional.nowhere(x)",
        "torch.nn.Linear()",
        "torch.nn.attention.varlen.varlen_attn(q, k, v)",
        "torch.nn.attention.varlen.varlen_attn(q, k, v, c, c, m, m, softcap=1.0)",
        "torch.nn.attention.flex_attention.BlockMask.from_kv_blocks(n, i, blocks=b)",
        "torch.nn.attention.flex_attention.flex_attention(q, k, v, mask=m)",
    ],
)
def test_a_call_that_does_not_fit_is_seen(written, installed, monkeypatch):
    monkeypatch.setattr(torch_calls, "METHODS", written)
    [(node, name)] = torch_calls._table()
    call = torch_calls._call(node, name, "here")
    wrong = problem(call, installed.signatures(name))
    assert wrong is not None and (wrong == "is missing") == ("nowhere" in written)


def test_calls_are_read_however_torch_is_imported(tmp_path):
    (tmp_path / "a.py").write_text(
        "import torch\nimport torch.nn.functional as F\nfrom torch import nn as layers\n"
        "def f(x, more):\n    from torch.cuda import Stream as S\n"
        "    S(0)\n    F.pad(x, (0, 1), value=2)\n    layers.Linear(*more)\n    torch.cuda.graph(x, **more)\n"
        "    print(torch.float32, x.torch.sum(1))\n"
    )
    found = {(call.name, call.positional, call.keywords, call.complete, call.mention) for call in calls(tmp_path)}
    assert found >= {
        ("torch.cuda.Stream", 1, (), True, False),
        ("torch.nn.functional.pad", 2, ("value",), True, False),
        ("torch.nn.Linear", 0, (), False, False),
        ("torch.cuda.graph", 1, (), False, False),
        ("torch.float32", 0, (), True, True),
    }
    assert not any("sum" in name for name, *_ in found)


def test_an_older_torch_says_what_is_done_without_a_parameter(monkeypatch, capsys):
    """2.11, which has neither of varlen's newer parameters."""
    right = Objects.signatures

    def older(self, name):
        signatures = right(self, name)
        if name != "torch.nn.attention.varlen.varlen_attn":
            return signatures
        newer = ("enable_gqa", "seqused_k", "block_table", "num_splits")
        return [
            signature.replace(parameters=[p for p in signature.parameters.values() if p.name not in newer])
            for signature in signatures
        ]

    monkeypatch.setattr(Objects, "signatures", older)
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert "no enable_gqa: keys and values are repeated" in printed and "no seqused_k" in printed
    monkeypatch.setattr(Objects, "signatures", lambda self, name: None if name.endswith("Event") else older(self, name))
    assert main([]) == 1
    assert "torch.cuda.Event is missing (engine/execute/cuda/streams.py:" in capsys.readouterr().out


def test_a_stub_is_read_with_every_kind_of_parameter():
    node = ast.parse("def f(self, a, /, b, c=1, *d, e, g=2, **h): ...").body[0]
    assert str(torch_calls._signature(node, bound=True)) == "(a, /, b, c=None, *d, e, g=None, **h)"
    assert problem(Call("f", "here", 2, ("e",)), [torch_calls._signature(node, bound=True)]) is None
