"""A W&B server on this machine that keeps sweeps, for the real client: a grid, one run after another."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response


class Sweeps:
    """What the server holds; each method below answers the query of its name as W&B does.

    Attributes:
        configurations: of the sweeps, by id.
    """

    def __init__(self) -> None:
        self.configurations: dict[str, dict[str, Any]] = {}
        self._left: dict[str, Iterator[dict[str, Any]]] = {}

    def answer(self, request: Request) -> Response:
        operation = request.json.get("operationName") or request.json["query"].split("(")[0].split("{")[0].split()[-1]
        data = getattr(self, f"_{operation}")(**(request.json.get("variables") or {}))
        return Response(json.dumps({"data": data}), content_type="application/json")

    def _Viewer(self):
        return {"viewer": {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}

    def _UpsertSweep(self, config, **variables):
        sweep = f"sweep{len(self.configurations)}"
        self.configurations[sweep] = configuration = yaml.safe_load(config)
        names, values = zip(
            *((name, each["values"]) for name, each in configuration["parameters"].items()), strict=True
        )
        runs = (zip(names, chosen, strict=True) for chosen in itertools.product(*values))
        commands = (
            {"type": "run", "run_id": f"{sweep}-{number}", "args": {name: {"value": value} for name, value in run}}
            for number, run in enumerate(runs)
        )
        self._left[sweep] = itertools.chain(commands, itertools.repeat({"type": "exit"}))
        project = {"id": "1", "name": "tests", "entity": {"id": "1", "name": "me"}}
        return {"upsertSweep": {"sweep": {"name": sweep, "project": project}, "configValidationWarnings": []}}

    def _CreateAgent(self, sweep, **variables):
        return {"createAgent": {"agent": {"id": f"agent of {sweep}"}}}

    def _Heartbeat(self, id, runState, **variables):
        commands = [] if "true" in runState else [next(self._left[id.removeprefix("agent of ")])]
        return {"agentHeartbeat": {"agent": {"id": id}, "commands": json.dumps(commands)}}


@contextmanager
def serving() -> Iterator[tuple[str, Sweeps]]:
    """A server with no sweep; yields its address and what it holds."""
    sweeps = Sweeps()
    with HTTPServer() as server:
        server.expect_request("/graphql", method="POST").respond_with_handler(sweeps.answer)
        yield server.url_for("").rstrip("/"), sweeps
        server.check()  # an answer that failed fails the test
