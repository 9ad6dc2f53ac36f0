"""A W&B server on this machine that keeps sweeps, for the real client: a grid, one run after another."""

import itertools
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml


class Sweeps:
    """What the server holds.

    Attributes:
        configurations: of the sweeps, by id.
    """

    def __init__(self) -> None:
        self.configurations: dict[str, dict[str, Any]] = {}
        self._left: dict[str, Any] = {}
        self._agents: dict[str, str] = {}

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """What the real server answers."""
        return getattr(self, f"_{operation}")(variables)

    def _Viewer(self, variables):
        return {"viewer": {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}

    def _UpsertSweep(self, variables):
        configuration = yaml.safe_load(variables["config"])
        sweep = f"sweep{len(self.configurations)}"
        self.configurations[sweep] = configuration
        values = [parameter["values"] for parameter in configuration["parameters"].values()]
        self._left[sweep] = enumerate(itertools.product(*values))
        project = {"id": "1", "name": "tests", "entity": {"id": "1", "name": "me"}}
        return {"upsertSweep": {"sweep": {"name": sweep, "project": project}, "configValidationWarnings": []}}

    def _CreateAgent(self, variables):
        agent = f"agent{len(self._agents)}"
        self._agents[agent] = variables["sweep"]
        return {"createAgent": {"agent": {"id": agent}}}

    def _Heartbeat(self, variables):
        sweep = self._agents[variables["id"]]
        commands: list[dict[str, Any]] = []
        if "true" not in variables["runState"]:
            number, values = next(self._left[sweep], (None, ()))
            if number is None:
                commands = [{"type": "exit"}]
            else:
                names = self.configurations[sweep]["parameters"]
                chosen = {name: {"value": value} for name, value in zip(names, values, strict=True)}
                commands = [{"type": "run", "run_id": f"{sweep}-{number}", "args": chosen}]
        return {"agentHeartbeat": {"agent": {"id": variables["id"]}, "commands": json.dumps(commands)}}


@contextmanager
def serving():
    """A server with no sweep; yields its address and what it holds."""
    sweeps = Sweeps()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            operation = asked.get("operationName") or asked["query"].split("(")[0].split("{")[0].split()[-1]
            try:
                body = json.dumps({"data": sweeps.answer(operation, asked.get("variables") or {})}).encode()
                self.send_response(200)
            except Exception as error:
                body = json.dumps({"errors": [{"message": repr(error)}]}).encode()
                self.send_response(400)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words):
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", sweeps
        finally:
            server.shutdown()
            thread.join()
