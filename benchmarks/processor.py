"""The processor that a benchmark ran on: its name, microarchitecture and instruction sets, and a folder's name for it.

The model name is not enough: a virtual machine says "AMD EPYC" for Zen 4 and for Zen 5, which differ twofold.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CPUINFO = Path("/proc/cpuinfo")
# Flags of /proc/cpuinfo that decide which kernels an engine can run.
INSTRUCTION_SETS = (
    *("avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme"),
)
# The flag that each instruction set of millpond's kernels needs, in ascending order.
ISAS = {"avx2": "avx2", "avx512": "avx512f", "avx512bf16": "avx512_bf16", "amx": "amx_bf16"}
# Models by vendor and family, as (lowest, highest, name); the first that fits. Sources: the kernel's intel-family.h and
# arch/x86/kernel/cpu/amd.c.
_AMD = {
    23: ((0x00, 0x2F, "Zen"), (0x30, 0xFF, "Zen 2")),
    25: ((0x10, 0x1F, "Zen 4"), (0x60, 0x7F, "Zen 4"), (0xA0, 0xAF, "Zen 4"), (0x00, 0x5F, "Zen 3")),
    26: ((0x00, 0x4F, "Zen 5"), (0x60, 0x7F, "Zen 5")),
}
_INTEL = {
    6: (
        *((model, model, "Haswell") for model in (60, 63, 69, 70)),
        *((model, model, "Broadwell") for model in (61, 71, 79, 86)),
        *((model, model, "Skylake") for model in (78, 94, 142, 158, 165, 166)),
        (85, 85, "Skylake-SP"),
        *((model, model, "Ice Lake") for model in (106, 108, 125, 126)),
        *((model, model, "Tiger Lake") for model in (140, 141)),
        (143, 143, "Sapphire Rapids"),
        *((model, model, "Alder Lake") for model in (151, 154)),
        (170, 170, "Meteor Lake"),
        *((model, model, "Granite Rapids") for model in (173, 174)),
        *((model, model, "Raptor Lake") for model in (183, 186, 191)),
        (189, 189, "Lunar Lake"),
        *((model, model, "Arrow Lake") for model in (197, 198)),
        (207, 207, "Emerald Rapids"),
    ),
}
_X86 = {"AuthenticAMD": ("AMD", _AMD), "GenuineIntel": ("Intel", _INTEL)}
# Steppings of model 85, which differ in VNNI and bfloat16.
_SKYLAKE_SP = ((0, 4, "Skylake-SP"), (5, 9, "Cascade Lake"), (10, 11, "Cooper Lake"))
_ARM = {
    0xD0C: "Neoverse N1",
    0xD40: "Neoverse V1",
    0xD49: "Neoverse N2",
    0xD4F: "Neoverse V2",
    0xD84: "Neoverse V3",
    0xD8E: "Neoverse N3",
}


def processor(cpuinfo: str | None = None) -> dict[str, Any]:
    """Name, vendor, microarchitecture, family, model, stepping and instruction sets; what is unknown is left out.

    Args:
        cpuinfo: Text in the format of /proc/cpuinfo; by default this machine's, if it has that file.
    """
    if cpuinfo is None:
        cpuinfo = CPUINFO.read_text(encoding="utf-8") if CPUINFO.is_file() else ""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():  # the first core comes first
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    vendor, models = _X86.get(fields.get("vendor_id", ""), (fields.get("vendor_id", ""), {}))
    family, model, stepping = (_number(fields.get(key)) for key in ("cpu family", "model", "stepping"))
    found: dict[str, Any] = {
        "processor": fields.get("model name") or platform.processor() or platform.machine(),
        "vendor": vendor,
        "microarchitecture": None,
        "family": family,
        "model": model,
        "stepping": stepping,
    }
    if family is not None and model is not None:
        found["microarchitecture"] = _named(models.get(family, ()), model)
        if (vendor, family, model) == ("Intel", 6, 85) and stepping is not None:
            found["microarchitecture"] = _named(_SKYLAKE_SP, stepping) or "Skylake-SP"
    elif (part := _number(fields.get("CPU part"))) is not None:
        found |= {"vendor": "ARM", "model": part, "microarchitecture": _ARM.get(part)}
        found["processor"] = fields.get("model name") or _ARM.get(part) or f"ARM part {part:#x}"
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    found["instruction_sets"] = [name for name in INSTRUCTION_SETS if name in flags]
    return {key: value for key, value in found.items() if value not in (None, "")}


def cores() -> int | None:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def effective_cap(name: str, instruction_sets: Sequence[str]) -> str | None:
    """``name`` if it is an instruction set of millpond's kernels, and this processor has a higher one; else None."""
    cap = name.strip().lower()
    order = list(ISAS)
    higher = order[order.index(cap) + 1 :] if cap in ISAS else []
    return cap if any(ISAS[isa] in instruction_sets for isa in higher) else None


def kind(hardware: Mapping[str, Any]) -> str:
    """The folder of results of this kind of machine: accelerator or microarchitecture, cores, and a cap.

    Two machines of one kind replace each other's results; those of different kinds stay side by side.
    """
    if "accelerator" in hardware:
        return _slug([hardware["accelerator"]])
    words = [hardware.get("vendor", ""), hardware.get("microarchitecture", "")]
    if not words[1]:
        numbers = [hardware[key] for key in ("family", "model") if key in hardware]
        words = [words[0], "-".join(map(str, numbers))] if numbers else [hardware.get("processor", "unknown")]
    count = hardware.get("cores")
    return _slug([*words, f"{count} cores" if count else "", hardware.get("cap") or ""])


def model_name(hardware: Mapping[str, Any]) -> str:
    """The processor's name, with its microarchitecture if that is known and not part of the name."""
    name, micro = str(hardware["processor"]), hardware.get("microarchitecture")
    return f"{name} ({micro})" if micro and micro.lower() not in name.lower() else name


def title(hardware: Mapping[str, Any]) -> str:
    """One line for headings: accelerator, name, microarchitecture, millpond's instruction set or a cap, and cores."""
    isa, cap = hardware.get("isa"), hardware.get("cap")
    parts = [hardware.get("accelerator", ""), model_name(hardware)]
    parts.append(f"capped to {cap}" if cap else isa or "")
    count = hardware.get("cores")
    parts.append(f"{count} core{'s' if count > 1 else ''}" if count else "")
    return ", ".join(part for part in parts if part)


def _named(models: Sequence[tuple[int, int, str]], number: int) -> str | None:
    return next((name for low, high, name in models if low <= number <= high), None)


def _number(text: str | None) -> int | None:
    try:
        return int(text or "", 0)
    except ValueError:
        return None


def _slug(words: Sequence[str]) -> str:
    return re.sub(r"[^a-z0-9]+", "-", " ".join(word for word in words if word).lower()).strip("-")
