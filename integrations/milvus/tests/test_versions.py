"""Which features a version of Milvus has, and which answers mean that a server starts."""

from __future__ import annotations

import pytest
from pymilvus import MilvusException

from millpond import InvalidRequestError
from millpond_milvus.faults import is_starting, is_unloaded
from millpond_milvus.versions import INT8_VECTORS, SEVERAL_VECTORS, TOKEN_VECTORS, Feature, Need, check_version


@pytest.mark.parametrize(
    ("version", "feature", "has"),
    [
        ("v2.3.5-lite", SEVERAL_VECTORS, False),
        ("v2.4.0", SEVERAL_VECTORS, True),
        ("2.5.11", INT8_VECTORS, False),
        ("v2.10.1", INT8_VECTORS, True),
        ("v2.6.3", TOKEN_VECTORS, False),
        ("v2.6.4-dev", TOKEN_VECTORS, True),
        ("v3.0-beta", TOKEN_VECTORS, True),
        ("Zilliz Cloud Vector Database(Compatible with Milvus 2.6)", TOKEN_VECTORS, True),
        ("Zilliz Cloud Vector Database(Compatible with Milvus 2.5)", TOKEN_VECTORS, False),
        ("master-20260101-1a2b3c4d", TOKEN_VECTORS, True),
        ("", TOKEN_VECTORS, True),
    ],
)
def test_a_feature_is_there_from_a_version_on(version: str, feature: Feature, has: bool) -> None:
    needs = [Need(feature=feature, option="dimensions=[64, 384]", width=384)]
    if has:
        check_version(version, needs, server="Milvus at x")
    else:
        with pytest.raises(InvalidRequestError, match=r"at x has version .*\[64, 384\] needs .*, or upgrade"):
            check_version(version, needs, server="Milvus at x")


@pytest.mark.parametrize(
    ("code", "message", "starting", "unloaded"),
    [
        (101, "failed to query: collection not loaded[collection=470]", True, True),
        (65535, "collection not loaded", True, True),
        (103, "collection not fully loaded", True, False),
        (1, "service not ready[standalone=3]", True, False),
        (2, "service unavailable", True, False),
        (503, "channel not available", True, False),
        (901, "node not found", True, False),
        (8, "rate limit exceeded", False, False),
        (100, "can't find collection", False, False),
        (1100, 'cannot parse expression: state == "not ready"', False, False),
        (65535, 'cannot parse expression: state == "not ready"', False, False),
        (1, "Unexpected error, message=<boom>", False, False),
        (2, "Fail connecting to server on 127.0.0.1:19530", False, False),
    ],
)
def test_what_a_server_says_while_it_starts(code: int, message: str, starting: bool, unloaded: bool) -> None:
    error = MilvusException(code=code, message=message)
    assert (is_starting(error), is_unloaded(error)) == (starting, unloaded)
