"""Every test of this folder that takes ``kernels`` runs with torch, and with each instruction set of this processor."""

import pytest

from millpond.late_interaction.kernels import compiled
from millpond.native.library import ISAS, isa, kernel_table


@pytest.fixture(
    params=[
        name if name in ("torch", isa()) else pytest.param(name, marks=pytest.mark.slow) for name in ("torch", *ISAS)
    ]
)
def kernels(request, monkeypatch):
    """The name of the kernels that the test runs with."""
    name = request.param
    best = isa()
    if name != "torch" and (best is None or ISAS.index(name) > ISAS.index(best)):
        pytest.skip(f"no compiled kernels for {name} here")
    table = None if name == "torch" else kernel_table(name)
    monkeypatch.setattr(compiled, "kernel_table", lambda: table)
    return name
