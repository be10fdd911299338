"""MUVERA encodings against their definition, token by token, and against MaxSim."""

import hashlib
import json

import numpy as np
import pytest

from millpond import Ragged
from millpond.errors import InvalidRequestError
from millpond.late_interaction import maxsim
from millpond.late_interaction.encoding import muvera
from millpond.late_interaction.encoding.muvera import Muvera

WIDTH = 16


def ragged(lengths: list[int], seed: int = 0, *, width: int = WIDTH) -> Ragged:
    rows = np.random.default_rng(seed).standard_normal((sum(lengths), width))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return Ragged(flat=rows.astype(np.float32), offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64))


def by_definition(encoding: Muvera, matrix: np.ndarray, *, document: bool) -> np.ndarray:
    """The paper's construction; an empty cell has the tokens of the nearest filled one."""
    cells, cell_width = 1 << encoding.bits, encoding.projected or encoding.width
    planes = encoding._planes.reshape(encoding.width, encoding.repetitions, encoding.bits)
    signs = encoding._signs.reshape(encoding.width, encoding.repetitions, cell_width)
    blocks = np.zeros((encoding.repetitions, cells, cell_width))
    for repetition in range(encoding.repetitions):
        tokens: dict[int, list[np.ndarray]] = {}
        for row in matrix.astype(np.float64):
            code = sum(1 << bit for bit in range(encoding.bits) if row @ planes[:, repetition, bit] > 0)
            tokens.setdefault(code, []).append(row @ signs[:, repetition])
        for cell in range(cells):
            if not document:
                blocks[repetition, cell] = np.sum(tokens.get(cell, [np.zeros(cell_width)]), axis=0)
            elif tokens:
                distance = min((cell ^ code).bit_count() for code in tokens)
                nearest = [code for code in tokens if (cell ^ code).bit_count() == distance]
                means = [np.mean(tokens[code], axis=0) for code in nearest]
                # Of several nearest cells any will do; the one that was chosen must be among them.
                blocks[repetition, cell] = means[0] if len(means) == 1 else np.nan
    return blocks.ravel() / encoding.repetitions**0.5


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"repetitions": 3, "bits": 4, "projected": 8},
        {"repetitions": 2, "bits": 5, "projected": None},
        {"repetitions": 1, "bits": 0, "projected": 5},
        {"repetitions": 2, "bits": 1, "projected": 1},
    ],
    ids=["default", "projected", "unprojected", "one cell", "one column"],
)
def test_encodings_are_those_of_the_definition(parameters):
    encoding = Muvera(width=WIDTH, seed=7, **parameters)
    matrices = ragged([5, 0, 1, 40, 3, 0, 200])
    queries, documents = encoding.encode_queries(matrices), encoding.encode_documents(matrices)
    assert queries.shape == documents.shape == (7, encoding.output_dimensions) and documents.dtype == np.float32
    for i, matrix in enumerate(matrices):
        assert np.allclose(queries[i], by_definition(encoding, matrix, document=False), atol=1e-5)
        expected = by_definition(encoding, matrix, document=True)
        known = ~np.isnan(expected)
        assert np.allclose(documents[i][known], expected[known], atol=1e-5)


def test_an_empty_cell_has_a_nearest_one():
    encoding = Muvera(width=WIDTH, repetitions=6, bits=5, projected=None)
    documents = ragged([9] * 8)
    planes = encoding._planes.reshape(WIDTH, 6, 5)
    blocks = encoding.encode_documents(documents).reshape(8, 6, 32, WIDTH) * 6**0.5
    for matrix, document in zip(documents, blocks, strict=True):
        codes = (np.einsum("td,drb->rtb", matrix, planes) > 0) @ (1 << np.arange(5))  # [repetitions, tokens]
        for own, cells in zip(codes, document, strict=True):
            means = {int(code): matrix[own == code].mean(axis=0) for code in own}
            for cell, block in enumerate(cells):
                matching = [code for code, mean in means.items() if np.allclose(mean, block, atol=1e-5)]
                assert [(code ^ cell).bit_count() for code in matching] == [
                    min((code ^ cell).bit_count() for code in means)
                ]


@pytest.mark.slow
def test_the_dot_product_of_two_encodings_estimates_maxsim():
    random = np.random.default_rng(3)
    centers = random.standard_normal((12, 64))
    tokens = centers[random.integers(12, size=6000)] + 0.5 * random.standard_normal((6000, 64))
    tokens = (tokens / np.linalg.norm(tokens, axis=1, keepdims=True)).astype(np.float32)
    documents = Ragged(flat=tokens[:5000], offsets=np.arange(0, 5001, 25))
    queries = Ragged(flat=tokens[5000:], offsets=np.arange(0, 1001, 10))
    exact = maxsim(queries, documents)
    errors = []
    for bits in (2, 8):
        encoding = Muvera(width=64, repetitions=20, bits=bits, projected=None)
        estimate = encoding.encode_queries(queries) @ encoding.encode_documents(documents).T
        errors.append(np.abs(estimate - exact).mean() / np.abs(exact).mean())
    assert np.corrcoef(estimate.ravel(), exact.ravel())[0, 1] > 0.75
    assert errors[1] < 0.5 < errors[0]


def test_a_count_sketch_keeps_dot_products_on_average():
    full, sketched = Muvera(width=WIDTH), Muvera(width=WIDTH, dimensions=600)
    matrices = ragged([30] * 200)
    matrices.flat[:] += 0.3  # off the origin, as token states are: groups without signs would add up the same way
    assert sketched.encode_queries(matrices).shape == (200, 600)
    exact = full.encode_queries(matrices) @ full.encode_documents(matrices).T
    estimate = sketched.encode_queries(matrices) @ sketched.encode_documents(matrices).T
    assert np.corrcoef(exact.ravel(), estimate.ravel())[0, 1] > 0.6
    assert abs((estimate - exact).mean()) < 0.1 * np.abs(exact).mean()


def test_a_matrix_is_encoded_alike_whatever_stands_beside_it(monkeypatch):
    encoding = Muvera(width=WIDTH)
    matrices = ragged([4, 0, 50, 7, 0, 0, 120, 1])
    together = encoding.encode_documents(matrices)
    monkeypatch.setattr(muvera, "_BLOCK", 20 * 19 * 30)  # about thirty tokens at a time
    assert len(list(encoding._blocks(matrices.offsets))) > 3
    assert np.allclose(encoding.encode_documents(matrices), together, atol=1e-6)
    for matrix, row in zip(matrices, together, strict=True):
        alone = encoding.encode_documents(Ragged.from_matrices([matrix], width=WIDTH))
        assert np.allclose(alone[0], row, atol=1e-6)


def test_a_matrix_without_tokens_is_zeros_and_no_matrices_are_no_rows():
    encoding = Muvera(width=WIDTH)
    for encode in (encoding.encode_queries, encoding.encode_documents):
        assert not encode(ragged([0, 0])).any()
        assert encode(ragged([])).shape == (0, 2560)


def test_the_default_has_2560_dimensions():
    assert Muvera(width=128).output_dimensions == 2560
    assert Muvera(width=128, dimensions=100).output_dimensions == 100


def test_random_numbers_are_those_of_splitmix64_on_every_machine():
    # Published outputs of SplitMix64 for the seed 1234567.
    start = np.array([1234567], dtype=np.uint64)
    counter = start + np.arange(1, 4, dtype=np.uint64) * muvera._GOLDEN
    assert muvera._mix(counter).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_the_matrices_of_the_default_encoding_never_change():
    # An index holds encodings of these matrices: other ones would find nothing.
    encoding = Muvera(width=24, repetitions=3, bits=4, projected=8, dimensions=50, seed=2**64 - 1)
    columns, signs = encoding._sketch
    digest = hashlib.sha256()
    for matrix in (encoding._planes, np.sign(encoding._signs), columns, signs):
        digest.update(np.ascontiguousarray(matrix).astype("<i8").tobytes())
    assert digest.hexdigest() == "7055508359141cba29a72d0d27efdd1bd896b2d40b835522e1c82dcc482b9b02"


def test_hyperplanes_are_balanced_and_independent():
    planes = Muvera(width=128, repetitions=100, bits=4)._planes / 209.0  # the standard deviation of eight bytes
    assert abs(planes.mean()) < 0.02 and abs(planes.std() - 1) < 0.02
    correlations = np.corrcoef(planes.T) - np.eye(400)
    assert np.abs(correlations).max() < 0.5
    assert not np.array_equal(Muvera(width=128)._planes, Muvera(width=128, seed=1)._planes)


def test_parameters_survive_json():
    encoding = Muvera(width=WIDTH, repetitions=3, bits=2, projected=None, dimensions=70, seed=5)
    stored = Muvera.from_parameters(json.loads(json.dumps(encoding.parameters())))
    assert stored == encoding
    matrices = ragged([6, 2])
    assert np.array_equal(stored.encode_documents(matrices), encoding.encode_documents(matrices))
    with pytest.raises(InvalidRequestError, match="the parameters of a MUVERA encoding are bits, dimensions"):
        Muvera.from_parameters({"width": 4, "colour": 3})


def test_float16_rows_are_read():
    matrices = ragged([6, 2])
    halves = Ragged(flat=matrices.flat.astype(np.float16), offsets=matrices.offsets)
    encoding = Muvera(width=WIDTH, repetitions=2, bits=0)
    assert np.allclose(encoding.encode_queries(halves), encoding.encode_queries(matrices), atol=1e-2)


@pytest.mark.parametrize(
    "parameters",
    [
        {"width": 0},
        {"width": 16, "repetitions": 0},
        {"width": 16, "bits": 11},
        {"width": 16, "bits": True},
        {"width": 16, "projected": 0},
        {"width": 16, "dimensions": 2561},
        {"width": 16, "seed": -1},
        {"width": 16, "seed": 2**64},
        {"width": 16, "repetitions": 2.0},
    ],
    ids=lambda parameters: "-".join(f"{name}{value}" for name, value in parameters.items()),
)
def test_parameters_out_of_range_are_refused(parameters):
    with pytest.raises(InvalidRequestError, match="must be an int from"):
        Muvera(**parameters)


def test_rows_narrower_than_the_projection_are_not_projected():
    encoding, matrices = Muvera(width=8, repetitions=2), ragged([6, 2], width=8)
    plain = Muvera(width=8, repetitions=2, projected=None)
    assert encoding.output_dimensions == 2 * 8 * 8
    assert np.array_equal(encoding.encode_documents(matrices), plain.encode_documents(matrices))


def test_too_many_dimensions_are_refused():
    with pytest.raises(InvalidRequestError, match=r"are 1310720 dimensions, more than 1048576; lower bits"):
        Muvera(width=128, repetitions=10, bits=10, projected=None)


def test_matrices_of_another_kind_or_width_are_refused():
    with pytest.raises(TypeError, match="queries is of type list; pass a Ragged"):
        Muvera(width=8).encode_queries([np.ones((1, 8))])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="documents have rows of 16 columns, and this encoding is for 8"):
        Muvera(width=8).encode_documents(ragged([2]))
