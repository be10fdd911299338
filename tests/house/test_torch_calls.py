"""The installed torch has what millpond calls; a call that does not fit is seen, by both ways of reading a torch."""

from pathlib import Path

import pytest
import torch

from release import torch_calls
from release.torch_calls import Objects, Stubs, problem, report


@pytest.fixture(scope="module", params=["objects", "stubs"])
def installed(request):
    return Objects() if request.param == "objects" else Stubs(Path(torch.__file__).parent)


def test_the_installed_torch_has_what_millpond_calls(installed):
    problems, _ = report(installed)
    assert problems == []
    assert len({call.name for call in torch_calls.calls() if not call.mention}) > 80


@pytest.mark.parametrize(
    "written",
    [
        "torch.cuda.nowhere()",
        "torch.cuda.Stream(device, 0, 1)",
        "torch.cuda.Event(blocks=True)",
        "torch.Tensor.index_select(0)",
        "torch.nn.functional.pad(x, p, values=0)",
        "torch.nn.attention.varlen.varlen_attn(q, k, v, c, c, m, m, softcap=1.0)",
    ],
)
def test_a_call_that_does_not_fit_is_seen(written, installed, monkeypatch):
    monkeypatch.setattr(torch_calls, "METHODS", written)
    [(node, name)] = torch_calls._table()
    wrong = problem(torch_calls._call(node, name, "here"), installed.signatures(name))
    assert wrong is not None and (wrong == "is missing") == ("nowhere" in written)
