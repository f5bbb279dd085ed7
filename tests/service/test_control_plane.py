"""The control plane against its own OpenAPI description, by schemathesis: what it says is what it does."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings


def test_every_route_does_as_it_says(serve):
    service = serve()
    description = service.client.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(description)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {
        "/v1/status",
        "/v1/limits",
        "/v1/policy",
    }
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(
            max_examples=15, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        def call(case):
            if case.query and "wait" in case.query:
                case.query["wait"] = 0
            if case.method == "POST" and "content-type" not in {k.lower() for k in case.headers}:
                case.headers["Content-Type"] = "application/json"  # asked for against web pages
            response = case.call(base_url=service.url)
            case.validate_response(response)

        call()
    assert "Traceback" not in service.stderr.read_text()
