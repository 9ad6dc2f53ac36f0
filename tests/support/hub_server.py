"""A Hub on 127.0.0.1, in memory, for the real `huggingface_hub` client without Xet."""

import base64
import functools
import hashlib
import itertools
import json
import logging
import os
import re
import socket
import threading
from dataclasses import dataclass, field

import yaml
from pytest_httpserver import METHOD_ALL, HTTPServer
from werkzeug import Response
from werkzeug.exceptions import HTTPException, abort

#: Files that the Hub keeps as LFS objects, as the `.gitattributes` of a new repository says.
LFS = re.compile(r".*(\.(safetensors|bin|pt|pth|ckpt|msgpack)|tfevents[^/]*)")


@dataclass(frozen=True)
class Commit:
    """One commit: the files of the repository after it, and those that it changed."""

    message: str
    files: dict[str, bytes]
    changed: tuple[str, ...] = ()
    oid: str = field(default_factory=lambda: os.urandom(20).hex())


@dataclass
class Repo:
    """A repository: its branches, each with its commits, oldest first."""

    private: bool = False
    branches: dict[str, list[Commit]] = field(default_factory=lambda: {"main": [Commit("initial commit", {})]})

    def at(self, revision):
        """The last commit of a branch, or the commit with that id; None if there is none."""
        by_id = {commit.oid: commit for commits in self.branches.values() for commit in commits}
        return self.branches[revision][-1] if revision in self.branches else by_id.get(revision)

    def messages(self, branch="main"):
        """The messages of the commits that were pushed."""
        return [commit.message for commit in self.branches[branch][1:]]


def fail(_):
    return Response('{"error": "Internal Error"}', 500)


def cut(request):
    """Close the connection without a response."""
    request.environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError


class HubServer(HTTPServer):
    """Runs inside `with`. tokens: token → (user, "write" or "read"). requests: "METHOD path" of each so far."""

    def __init__(self, tokens):
        super().__init__("127.0.0.1", threaded=True)
        # No line for each request, and no traceback if a client is killed within one. Other errors fail the test.
        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self.tokens, self.repos, self.objects, self.requests = dict(tokens), {}, {}, []
        self._disturbances, self._repaired = [], threading.Event()
        for method, path, answer in ROUTES:
            pattern = re.compile(path + r"\Z")
            self.expect_request(pattern, method).respond_with_handler(functools.partial(self._answer, answer, pattern))

    def _answer(self, answer, pattern, request):
        found = answer(self, request, **pattern.match(request.path).groupdict())
        return found if isinstance(found, Response) else Response(json.dumps(found))

    def thread_target(self):
        self.server.serve_forever(poll_interval=0.05)

    def __exit__(self, *raised):
        self.repair()
        super().__exit__(*raised)
        self.handler_errors = [error for error in self.handler_errors if not isinstance(error, HTTPException)]
        self.check_handler_errors()

    def disturb(self, act, part="", times=None):
        """Let `act(request)` answer the next `times` requests with `part` in "METHOD path", unless it returns None."""
        self._repaired.clear()
        self._disturbances.append((part, itertools.repeat(act) if times is None else iter([act] * times)))

    def hold(self, _):
        """Keep a request waiting until `repair` is called."""
        self._repaired.wait()

    def repair(self):
        """End all disturbances, and answer what is held."""
        self._disturbances.clear()
        self._repaired.set()

    def dispatch(self, request):
        self.requests.append(called := f"{request.method} {request.path}")
        for acts in [acts for part, acts in self._disturbances if part in called]:
            if (act := next(acts, None)) and (response := act(request)) is not None:
                return response
        return super().dispatch(request)

    def _user(self, request, writes=None):
        """The user, None if unknown; one who may write to the repository `writes` if that is given."""
        user, rights = self.tokens.get(request.headers.get("Authorization", "").removeprefix("Bearer "), (None, None))
        if writes and user is None:
            refuse(401, "", "Invalid credentials in Authorization header")
        if writes and (rights != "write" or writes.split("/")[0] not in (user, "org")):
            refuse(403, "", "Forbidden: you don't have the required permissions")
        return user

    def _find(self, request, name, revision=None, write=False):
        """The repository and a commit, to which the user has access."""
        repo, user = self.repos.get(name), self._user(request, writes=name if write else None)
        if repo is None or (repo.private and user is None):
            refuse(404 if user else 401, "RepoNotFound", "Repository not found")
        if (commit := repo.at(revision or "main")) is None:
            refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, commit

    def create(self, request):
        asked = request.get_json()
        name = f"{asked.get('organization') or self._user(request)}/{asked['name']}"
        self._user(request, writes=name)
        status = 409 if name in self.repos else 200
        self.repos.setdefault(name, Repo(private=asked.get("visibility") == "private" or asked.get("private", False)))
        return Response(json.dumps({"url": self.url_for(name), "name": name}), status)

    def validate_yaml(self, request):
        yaml.safe_load(request.get_json()["content"].split("---")[1])
        return {"errors": [], "warnings": []}

    def preupload(self, request, name, revision):
        paths = [entry["path"] for entry in request.get_json()["files"]]
        files = self._find(request, name, revision, write=True)[1].files
        modes = {path: "lfs" if LFS.fullmatch(path) else "regular" for path in paths}
        oids = {path: oid_of(path, files[path]) if path in files else None for path in paths}
        return {"files": [{"path": p, "uploadMode": modes[p], "oid": oids[p], "shouldIgnore": False} for p in paths]}

    def lfs_batch(self, request):
        objects = request.get_json()["objects"]
        found = [{**entry, "actions": {"upload": {"href": self.url_for(f"lfs/{entry['oid']}")}}} for entry in objects]
        return {"transfer": "basic", "objects": found}

    def lfs_put(self, request, oid):
        assert hashlib.sha256(request.data).hexdigest() == oid
        self.objects[oid] = request.data
        return {}

    def commit(self, request, name, revision):
        repo, before = self._find(request, name, revision, write=True)
        header, *lines = [json.loads(line)["value"] for line in request.data.splitlines()]
        changed = {line["path"]: base64.b64decode(line["content"]) for line in lines if "content" in line}
        changed |= {line["path"]: self.objects[line["oid"]] for line in lines if "oid" in line}
        repo.branches[revision].append(commit := Commit(header["summary"], before.files | changed, tuple(changed)))
        return {"success": True, "commitUrl": self.url_for(f"{name}/commit/x"), "commitOid": commit.oid}

    def tree(self, request, name, revision):
        files = sorted(self._find(request, name, revision)[1].files.items())
        return [{"type": "file", "path": path, "size": len(data), "oid": oid_of(path, data)} for path, data in files]

    def info(self, request, name, revision=None, writes=None):
        repo, commit = self._find(request, name, revision, write=writes is not None)
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        return {"id": name, "private": repo.private, "sha": commit.oid, "siblings": siblings, "tags": []}

    def resolve(self, request, name, revision, path):
        commit = self._find(request, name, revision)[1]
        data = commit.files[path] if path in commit.files else refuse(404, "EntryNotFound", "Entry not found")
        return Response(data, headers={"X-Repo-Commit": commit.oid, "ETag": f'"{oid_of(path, data)}"'})


def refuse(status, code, message):
    abort(Response(json.dumps({"error": message}), status, {"X-Error-Code": code, "X-Error-Message": message}))


def oid_of(path, data):
    """The LFS or git id of the contents of a file."""
    lfs, git = hashlib.sha256(data), hashlib.sha1(b"blob %d\0" % len(data) + data)
    return (lfs if LFS.fullmatch(path) else git).hexdigest()


NAME, REVISION = "(?P<name>[^/]+(/[^/]+)?)", "(?P<revision>[^/]+)"
ROUTES = [
    ("POST", "/api/repos/create", HubServer.create),
    ("POST", "/api/validate-yaml", HubServer.validate_yaml),
    ("POST", f"/api/models/{NAME}/preupload/{REVISION}", HubServer.preupload),
    ("POST", f"/api/models/{NAME}/commit/{REVISION}", HubServer.commit),
    ("GET", f"/api/models/{NAME}/tree/{REVISION}", HubServer.tree),
    ("GET", f"/api/models/{NAME}(?P<writes>/auth-check/write)?(/revision/{REVISION})?", HubServer.info),
    ("POST", r"/.+\.git/info/lfs/objects/batch", HubServer.lfs_batch),
    ("PUT", "/lfs/(?P<oid>.+)", HubServer.lfs_put),
    (METHOD_ALL, f"/{NAME}/resolve/{REVISION}/(?P<path>.+)", HubServer.resolve),
]
