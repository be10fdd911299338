"""ApiKeys: the keys of a server over HTTP, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence


class ApiKeys:
    """The API keys of a server; false without one."""

    def __init__(self, keys: Sequence[str]) -> None:
        # Digests have one length, so that the time of a comparison does not reveal a key's.
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accept(self, authorizations: Sequence[str]) -> bool:
        """Whether there is one Authorization header and it holds a key.

        Every key is compared, so that the time is constant. RFC 9110, section 11.4: the scheme, one or more spaces,
        the key. A tab may only stand around the whole value.
        """
        if len(authorizations) != 1:
            return False
        scheme, _, token = authorizations[0].strip(" \t").partition(" ")
        digest = hashlib.sha256(token.lstrip(" ").encode("latin-1")).digest()
        matched = False
        for known in self._digests:
            matched |= hmac.compare_digest(known, digest)
        return matched and scheme.lower() == "bearer"
