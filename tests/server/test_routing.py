"""The routes that are called without FastAPI's router are those that it would find."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.routing import APIRoute
from starlette.routing import Match

from millpond.server.api import ROUTERS_OF
from millpond.server.routing import DirectRoutes


@pytest.mark.parametrize("protocol", ["default", "weaviate"])
def test_the_router_finds_the_same(protocol: Any) -> None:
    routes = [route for router in ROUTERS_OF[protocol] for route in router.routes if isinstance(route, APIRoute)]
    direct = DirectRoutes(lambda *_: None, routes=routes)._routes  # type: ignore[arg-type,return-value]
    assert {("POST", "/v1/embeddings" if protocol == "default" else "/vectors"), ("GET", "/health")} <= direct.keys()
    for (method, path), route in direct.items():
        scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
        assert next(each for each in routes if each.matches(dict(scope))[0] is Match.FULL) is route
