"""benchmarks/processor.py: what a processor is called, and which folder its results go to."""

from __future__ import annotations

import pytest
from processor import effective_cap, kind, model_name, processor, title

ZEN4 = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
stepping\t: 1
flags\t\t: fpu avx avx2 fma f16c avx512f avx512_bf16 avx512_vnni sha_ni

processor\t: 1
vendor_id\t: AuthenticAMD
cpu family\t: 26
"""
GRAVITON = """processor\t: 0
Features\t: fp asimd asimddp i8mm bf16 sve
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


def x86(vendor: str, family: int, model: int, stepping: int = 0, name: str = "") -> str:
    lines = [f"vendor_id : {vendor}", f"cpu family : {family}", f"model : {model}", f"stepping : {stepping}"]
    return "\n".join([*lines, f"model name : {name}", "flags : avx2"])


def test_a_processor_is_described_by_its_first_core():
    assert processor(ZEN4) == {
        "processor": "AMD EPYC",
        "vendor": "AMD",
        "microarchitecture": "Zen 4",
        "family": 25,
        "model": 17,
        "stepping": 1,
        "instruction_sets": ["avx", "f16c", "fma", "avx2", "avx512f", "avx512_vnni", "avx512_bf16"],
    }


@pytest.mark.parametrize(
    ("vendor", "family", "model", "stepping", "expected"),
    [
        ("AuthenticAMD", 23, 1, 0, "Zen"),
        ("AuthenticAMD", 23, 49, 0, "Zen 2"),
        ("AuthenticAMD", 25, 1, 0, "Zen 3"),
        ("AuthenticAMD", 25, 160, 0, "Zen 4"),
        ("AuthenticAMD", 26, 2, 0, "Zen 5"),
        ("GenuineIntel", 6, 85, 4, "Skylake-SP"),
        ("GenuineIntel", 6, 85, 7, "Cascade Lake"),
        ("GenuineIntel", 6, 85, 11, "Cooper Lake"),
        ("GenuineIntel", 6, 106, 6, "Ice Lake"),
        ("GenuineIntel", 6, 143, 8, "Sapphire Rapids"),
        ("GenuineIntel", 6, 207, 2, "Emerald Rapids"),
    ],
)
def test_microarchitectures_are_told_apart(vendor: str, family: int, model: int, stepping: int, expected: str):
    assert processor(x86(vendor, family, model, stepping))["microarchitecture"] == expected


@pytest.mark.parametrize(
    ("cpuinfo", "folder"),
    [
        (ZEN4, "amd-zen-4-2-cores"),
        (ZEN4.replace("25", "26", 1), "amd-zen-5-2-cores"),
        (x86("GenuineIntel", 6, 143), "intel-sapphire-rapids-2-cores"),
        (x86("GenuineIntel", 6, 999), "intel-6-999-2-cores"),
        (x86("HygonGenuine", 24, 2), "hygongenuine-24-2-2-cores"),
        (GRAVITON, "arm-neoverse-v1-2-cores"),
        (GRAVITON.replace("0xd40", "0xfff"), "arm-4095-2-cores"),
    ],
)
def test_each_kind_of_processor_has_its_own_folder(cpuinfo: str, folder: str):
    assert kind({**processor(cpuinfo), "cores": 2}) == folder


def test_cores_a_cap_and_an_accelerator_are_other_kinds():
    machine = {**processor(ZEN4), "cores": 2}
    kinds = [kind(machine), kind({**machine, "cores": 64}), kind({**machine, "cap": "avx2"})]
    assert kinds == ["amd-zen-4-2-cores", "amd-zen-4-64-cores", "amd-zen-4-2-cores-avx2"]
    assert kind({**machine, "accelerator": "NVIDIA H200"}) == "nvidia-h200"


@pytest.mark.parametrize("cpuinfo", ["", "garbage\n: :\n\n", "cpu family : many\nmodel : x\n"])
def test_an_unknown_processor_still_has_a_name_and_a_folder(cpuinfo: str):
    machine = processor(cpuinfo)
    assert machine["processor"] and machine["instruction_sets"] == []
    assert kind({**machine, "cores": 1}).endswith("-1-cores")
    assert "/" not in kind(machine) and kind(machine)
    assert kind({}) == "unknown"


def test_the_title_names_microarchitecture_instruction_set_and_cores():
    machine = {**processor(ZEN4), "isa": "avx512bf16", "cores": 2}
    assert title(machine) == "AMD EPYC (Zen 4), avx512bf16, 2 cores"
    assert title({**machine, "isa": "avx2", "cap": "avx2", "cores": 1}) == "AMD EPYC (Zen 4), capped to avx2, 1 core"
    assert title({"processor": "a processor", "cores": 2}) == "a processor, 2 cores"
    assert model_name({"processor": "AMD Zen 4 thing", "microarchitecture": "Zen 4"}) == "AMD Zen 4 thing"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("avx2", "avx2"),
        (" AVX2 ", "avx2"),
        ("avx512", "avx512"),
        ("avx512bf16", None),
        ("amx", None),
        ("", None),
        ("sse", None),
    ],
)
def test_only_a_cap_below_the_processor_counts(name: str, expected: str | None):
    assert effective_cap(name, processor(ZEN4)["instruction_sets"]) == expected
