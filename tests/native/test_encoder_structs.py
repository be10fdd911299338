"""The structs that Python and the native encoder share: same fields, in the same order, of the same size."""

import ctypes
import re

import pytest

from millpond.models.native import structs
from millpond.native import library

HEADER = (library.LIBRARY.parent / "encoder/plan.h").read_text()
STRUCTS = (structs.Weight, structs.NormWeights, structs.Step, structs.Model, structs.EncodeCall, structs.PackCall)
TYPES = {ctypes.c_int64: "std::int64_t", ctypes.c_double: "double"}


def declared(name):
    """The fields of a struct of plan.h: (name, type)."""
    body = re.search(rf"^struct {name} {{\n(.*?)^}};", HEADER, re.DOTALL | re.MULTILINE)[1]
    for statement in re.sub(r"//.*", "", body).split(";"):
        if statement.strip():
            kind, names = re.fullmatch(r"\s*(.*?[\s*])((?:\w+,\s*)*\w+)\s*", statement, re.DOTALL).groups()
            yield from ((field.strip(), kind.strip()) for field in names.split(","))


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_python_has_the_fields_of_the_header(struct):
    expected = list(declared(struct.__name__))
    assert [name.rstrip("_") for name, *_ in struct._fields_] == [name for name, _ in expected]
    for (name, kind, *_), (_, written) in zip(struct._fields_, expected, strict=True):
        pointer = kind is ctypes.c_void_p or issubclass(kind, ctypes._Pointer)
        assert ("*" in written) == pointer, name
        if kind in TYPES:
            assert written == TYPES[kind], name
        elif not pointer:
            assert written == kind.__name__, name


@pytest.mark.skipif(library.portable() is None, reason="no compiled kernels")
def test_both_sides_agree_on_the_sizes():
    sizes = (ctypes.c_int64 * len(STRUCTS))()
    library.portable().millpond_plan_bytes(sizes)
    assert list(sizes) == [ctypes.sizeof(struct) for struct in STRUCTS]


def test_every_struct_of_the_header_is_compared():
    assert set(re.findall(r"^struct (\w+) {", HEADER, re.MULTILINE)) == {struct.__name__ for struct in STRUCTS}


def test_the_numbers_of_kinds_are_those_of_the_header():
    names = {
        "StepKind": {key: value for key, value in vars(structs).items() if key in STEPS},
        "NormKind": {"COPY": structs.COPY, "LAYER_NORM": structs.LAYER_NORM, "RMS_NORM": structs.RMS_NORM},
        "Reading": {key: value for key, value in vars(structs).items() if re.fullmatch(r"\w+_ROWS?", key)},
    }
    for enum, values in names.items():
        listed = [name.strip() for name in re.search(rf"enum {enum} : std::int64_t {{([^}}]*)}}", HEADER)[1].split(",")]
        constants = [re.sub(r"(?<!^)(?=[A-Z])", "_", name.removeprefix("k")).upper() for name in listed]
        assert constants == sorted(values, key=values.get), enum
        assert sorted(values.values()) == list(range(len(listed))), enum
    activations = re.search(r"enum Activation : std::int64_t {([^}]*)}", HEADER)[1].split(",")
    assert set(structs.ACTIVATIONS.values()) == set(range(len(activations)))


STEPS = ("EMBED", "NORM", "PRODUCT", "HEADS", "ATTENTION", "FEED", "ADAPT")
