"""A server of W&B on this machine, which keeps the lines of runs and rewinds them."""

import contextlib
import gzip
import json
import re
from collections.abc import Iterator
from typing import Any

from pytest_httpserver import HTTPServer
from werkzeug import Request, Response


class WandbServer:
    """What the server holds. Each method answers the query of its name as W&B does.

    Attributes:
        lines: of the runs, by id.
        configurations: of the runs, as they were sent last.
        names: of the runs, as their settings give them.
        rewinds: whether it can rewind a run; servers that a company runs itself may not.
    """

    def __init__(self) -> None:
        self.lines: dict[str, list[dict[str, Any]]] = {}
        self.configurations: dict[str, dict[str, Any]] = {}
        self.names: dict[str, list[str | None]] = {}
        self.rewinds = True

    def steps(self, name: str) -> list[int]:
        """The steps of a curve of the one run."""
        (lines,) = self.lines.values()
        return [line["train/global_step"] for line in lines if name in line]

    def answer(self, request: Request) -> Response:
        """The answer to a query, to lines, or to a file."""
        if request.path != "/graphql":
            if request.path.endswith("/file_stream"):
                self._receive(request)
            return Response("{}", content_type="application/json")
        operation = request.json["operationName"]
        answer = getattr(self, f"_{operation}", lambda **variables: {})
        data = answer(**(request.json.get("variables") or {}))
        errors = [] if data is not None else [{"message": f"{operation}: no"}]
        return Response(json.dumps({"data": data, "errors": errors}), content_type="application/json")

    def _receive(self, request: Request) -> None:
        body = request.get_data()
        body = gzip.decompress(body) if request.headers.get("Content-Encoding") == "gzip" else body
        history = json.loads(body).get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
        lines = self.lines[request.path.split("/")[-2]]
        end = history["offset"] + len(history["content"])
        lines[history["offset"] : end] = map(json.loads, history["content"])

    def _bucket(self, name: str) -> dict[str, Any]:
        project = {"id": "1", "name": "tests", "entity": {"id": "1", "name": "me"}}
        texts = dict.fromkeys(("description", "sweepName", "notes", "tags"))
        count = {"historyLineCount": len(self.lines[name]), "logLineCount": 0, "eventsLineCount": 0}
        tails = {"historyTail": json.dumps([json.dumps(line) for line in self.lines[name][-1:]]), "eventsTail": "[]"}
        named = {"id": name, "name": name, "displayName": name, "config": "{}", "summaryMetrics": "{}"}
        # By this the client knows that it has set up the run.
        named["wandbConfig"] = '{"t": {}}'
        return {**texts, **count, **tails, **named, "project": project}

    def _UpsertBucket(self, name: str, config: str | None, id: str | None = None, **variables: Any) -> dict[str, Any]:
        self.lines.setdefault(name, [])
        self.names.setdefault(name, []).append(variables.get("displayName"))
        self.configurations[name] = {key: value["value"] for key, value in json.loads(config or "{}").items()}
        return {"upsertBucket": {"bucket": self._bucket(name), "inserted": not self.lines[name]}}

    def _RewindRun(self, runName: str, metricValue: float, **variables: Any) -> dict[str, Any] | None:
        if not self.rewinds or metricValue >= len(self.lines.get(runName, [])):
            return None
        del self.lines[runName][int(metricValue) + 1 :]
        return {"rewindRun": {"rewoundRun": self._bucket(runName)}}

    def _RunResumeStatus(self, name: str, **variables: Any) -> dict[str, Any]:
        bucket = self._bucket(name) if name in self.lines else None
        return {"model": {"id": "1", "name": "tests", "entity": {"id": "1", "name": "me"}, "bucket": bucket}}

    def _CreateRunFiles(self, run: str, files: list[str], **variables: Any) -> dict[str, Any]:
        places = [{"name": name, "uploadUrl": f"{self.address}/{name}"} for name in files]
        return {"createRunFiles": {"runID": run, "uploadHeaders": [], "files": places}}

    @contextlib.contextmanager
    def serving(self) -> Iterator[dict[str, str]]:
        """Serve in the block; yields the variables that a client needs."""
        with HTTPServer() as server:
            server.expect_request(re.compile(".*")).respond_with_handler(self.answer)
            self.address = server.url_for("").rstrip("/")
            values = {
                "BASE_URL": self.address,
                "API_KEY": "0" * 40,
                "ENTITY": "me",
                "PROJECT": "tests",
                "SILENT": "true",
            }
            yield {f"WANDB_{name}": value for name, value in values.items()}
            server.check()  # an answer that failed fails the test
