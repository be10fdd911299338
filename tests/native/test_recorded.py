"""Native results equal the references', which were recorded, so that this is known without torch too."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.native.recorded import CELLS, FILE, PIPELINES, kept, pipeline, results
from tests.results import values
from tests.tiny.columns import writer

from millpond import Engine
from millpond.native import library

pytestmark = pytest.mark.skipif(library.kernel_table() is None, reason="no compiled kernels")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def reference():
    return json.loads(FILE.read_text(encoding="utf-8"))


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for task, numbers in expected.items():
        np.testing.assert_allclose(found[task], numbers, rtol=0, atol=TOLERANCE, err_msg=task)


def test_minilm_is_that_of_sentence_transformers(minilm_folder, reference):
    with Engine(minilm_folder, backend="native", dtype="float32", device="cpu") as engine:
        found = values(engine)
    assert_equal(kept({"embed": found["embed"]}), reference["MiniLM"])


@pytest.mark.parametrize("name", PIPELINES)
def test_modules_are_those_of_sentence_transformers(name, reference, tmp_path):
    with Engine(pipeline(name)(tmp_path / "model"), backend="native", dtype="float32", device="cpu") as engine:
        assert_equal(kept({"embed": values(engine)["embed"]}), reference[name])


@pytest.mark.contract
@pytest.mark.parametrize(("family", "column"), CELLS)
def test_a_cell_is_that_of_the_reference(family, column, reference, tmp_path):
    folder = writer(family, column)(tmp_path / "model")
    assert_equal(results(folder, column, "native"), reference[f"{family}, {column}"])
