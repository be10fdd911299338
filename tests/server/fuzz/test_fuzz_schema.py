"""schemathesis with /openapi.json: allowed requests are never a 500, and answers match the document."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig
from tests.server.mutations import BODIES, INDEXES, KEY, template_of

from millpond.server import ServedModels
from tests.server.conftest import ROUTERS

PATIENCE = 300.0  # seconds; whatever takes longer hangs
MANY = 300  # examples, where there is time
# Statuses, content types and shapes as the document has them. It cannot say all that makes a request a good one (of
# input and messages one, no text over the limit), so that positive_data_acceptance is not asked. 501 is our word, as
# it is vLLM's, for a model that does not serve the route.
CHECKS = {
    "enabled": False,
    "not_a_server_error": {"enabled": True, "expected-statuses": ["2xx", "4xx", "501"]},
    "status_code_conformance": {"enabled": True},
    "content_type_conformance": {"enabled": True},
    "response_schema_conformance": {"enabled": True},
    "response_headers_conformance": {"enabled": True},
    "unsupported_method": {"enabled": True},
    "negative_data_rejection": {"enabled": True},
}
# By the paths of the document. Of a path with a name, the name of something that there is.
BODIES_OF = {template_of(path): bodies for path, bodies in BODIES.items()}
NAMES_OF = {template_of(path): name for path in BODIES for name in INDEXES if f"/{name}/" in path}
# Of every path that the document has.
OPERATIONS = sorted(
    {
        (route.path.replace(":path", ""), method.lower())
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods
    }
)


@pytest.fixture(scope="module")
def document(every: tuple[ServedModels, str]) -> Any:
    config = SchemathesisConfig.from_dict({"checks": CHECKS, "seed": 5, "headers": {"Authorization": f"Bearer {KEY}"}})
    return schemathesis.openapi.from_url(f"{every[1]}/openapi.json", config=config)


def ask(document: Any, path: str, method: str, mode: GenerationMode, examples: int) -> Counter[int]:
    """Send ``examples`` requests, valid and invalid by the document, and check the answers; returns their statuses."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=document[path][method].as_strategy(generation_mode=mode), data=st.data())
    def check(case: Any, data: st.DataObject) -> None:
        if path in NAMES_OF:
            case.path_parameters = {"name": NAMES_OF[path]}
        if mode is GenerationMode.POSITIVE and method == "post" and data.draw(st.booleans()):
            # What is made up throughout is hardly ever answered: names of models, for one.
            made = sorted(case.body) if isinstance(case.body, dict) else []
            kept = data.draw(st.sets(st.sampled_from(made), max_size=2)) - {"model"} if made else set()
            case.body = {**data.draw(st.sampled_from(BODIES_OF[path])), **{name: case.body[name] for name in kept}}
        statuses[case.call_and_validate(timeout=PATIENCE).status_code] += 1

    check()
    return statuses


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
@pytest.mark.parametrize("examples", [3, pytest.param(MANY, marks=pytest.mark.slow)])
def test_what_the_document_allows(document: Any, path: str, method: str, examples: int) -> None:
    statuses = ask(document, path, method, GenerationMode.POSITIVE, examples)
    if examples == MANY and method == "post":
        assert path == "/ping" or statuses[200] > MANY / 5, statuses


@pytest.mark.parametrize("path", [path for path, method in OPERATIONS if method == "post" and path != "/ping"])
@pytest.mark.parametrize("examples", [3, pytest.param(MANY, marks=pytest.mark.slow)])
def test_what_the_document_does_not_allow(document: Any, path: str, examples: int) -> None:
    assert ask(document, path, "post", GenerationMode.NEGATIVE, examples).keys() == {400}


def test_every_operation_is_asked(document: Any) -> None:
    documented = {(operation.ok().path, operation.ok().method) for operation in document.get_all_operations()}
    assert documented == set(OPERATIONS)
