"""Heads: Host, Transfer-Encoding and versions as RFC 9112 has them."""

from __future__ import annotations

from http import HTTPStatus

import pytest

from millpond.server.launch.heads import refusal

HOST = (b"host", b"pond")


@pytest.mark.parametrize(
    "value",
    [
        b"pond",
        b"pond:8000",
        b"pond:",
        b"",  # RFC 9112, section 3.2: where the target has no authority
        b"127.0.0.1:8000",
        b"[::1]:8000",
        b"[v1.fe80::a]",
        b"[fe80::1%eth0]:8000",  # a link-local address with its zone, as Python's http.client sends it
        b"[fe80::1%25eth0]:8000",
        b"mill_pond.default.svc.cluster.local",
        b"xn--mhle-0ra.example",
        b"m%C3%BChle",
    ],
)
def test_a_host_with_or_without_a_port(value: bytes) -> None:
    assert refusal("1.1", [(b"host", value)]) is None


@pytest.mark.parametrize(
    "value",
    [b"a b", b"pond, pond", b"pond:80:80", b"pond:http", b"a/b", b"me@pond", b"m\xc3\xbchle", b"%zz", b"[::1", b"a\t"],
)
def test_a_host_that_is_none(value: bytes) -> None:
    refused = refusal("1.1", [(b"host", value)])
    assert refused is not None and refused.status is HTTPStatus.BAD_REQUEST
    assert "Host" in refused.message and "localhost:8000" in refused.message


@pytest.mark.parametrize(
    ("version", "hosts", "accepted"),
    [
        ("1.1", 0, False),
        ("1.1", 1, True),
        ("1.1", 2, False),
        ("1.0", 0, True),
        ("1.0", 1, True),
        ("1.0", 2, False),
    ],
)
def test_one_host_and_in_the_older_protocol_at_most_one(version: str, hosts: int, accepted: bool) -> None:
    assert (refusal(version, [HOST] * hosts) is None) is accepted


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ([b"chunked"], True),
        ([b"Chunked"], True),
        ([b"gzip, chunked"], False),
        ([b"gzip", b"chunked"], False),
        ([b"chunked", b"chunked"], False),
        ([b"chunked, chunked"], False),
        ([b"chunked, gzip"], False),
        ([b"identity"], False),
        ([b"chunked;q=1"], False),
        ([b"x-chunked"], False),
        ([b""], False),
    ],
)
def test_chunked_is_the_only_transfer_coding(fields: list[bytes], accepted: bool) -> None:
    headers = [HOST, *((b"transfer-encoding", field) for field in fields)]
    assert (refusal("1.1", headers) is None) is accepted
    assert refusal("1.0", headers) is not None  # which has none


@pytest.mark.parametrize(("version", "status"), [("0.9", 400), ("2.0", 505)])
def test_other_versions(version: str, status: int) -> None:
    refused = refusal(version, [HOST])
    assert refused is not None and refused.status == status
