"""A Hub on 127.0.0.1 that offers the HTTP API of huggingface.co to the real `huggingface_hub` client, without Xet.

It keeps everything in memory. The client reads `HF_ENDPOINT` when it is imported: `environment()` is for processes that
have yet to begin, `serve()` tells the client of this one.
"""

import base64
import contextlib
import hashlib
import json
import os
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from tests.support import processes

#: Files that the Hub keeps as LFS objects, as the `.gitattributes` of a new repository says.
LFS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack")


def is_lfs(path):
    return path.endswith(LFS) or "tfevents" in path


@dataclass(frozen=True)
class Commit:
    """One commit: the files of the repository after it, and those that it changed."""

    message: str
    files: dict[str, bytes]
    changed: tuple[str, ...]

    @property
    def oid(self):
        return hashlib.sha1(repr((self.message, sorted(self.files.items()))).encode()).hexdigest()


@dataclass
class Repo:
    """A repository: its branches, each with its commits, oldest first."""

    private: bool = False
    branches: dict[str, list[Commit]] = field(default_factory=lambda: {"main": [Commit("initial commit", {}, ())]})

    def at(self, revision):
        """The last commit of a branch, or the commit with that id; None if there is none."""
        if revision in self.branches:
            return self.branches[revision][-1]
        return next((c for commits in self.branches.values() for c in commits if c.oid == revision), None)

    def commits(self, branch="main"):
        """(message, changed files) of each commit that was pushed."""
        return [(commit.message, sorted(commit.changed)) for commit in self.branches[branch][1:]]


class HubServer:
    """The server, its contents, and how it fails.

    Attributes:
        repos: name → repository.
        tokens: token → (user, rights), where rights are "write" or "read".
        requests: (method, path) of each request so far.
        failures: how many of the next requests fail with status 500.
        fails_once: fail the next request whose path has this in it, with status 500; None for none.
        failing: fail every request whose path has this in it, with status 500; None for none.
        refusing: cut every connection at once.
        cuts: how many of the next LFS uploads are cut in their middle.
        delay: seconds that each LFS upload takes.
    """

    def __init__(self, tokens):
        self.repos, self.objects, self.tokens = {}, {}, dict(tokens)
        self.requests = []
        self.failures, self.failing, self.refusing, self.cuts, self.delay = 0, None, False, 0, 0.0
        self.fails_once = None
        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    @contextlib.contextmanager
    def running(self):
        thread = threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.http.shutdown()
            self.http.server_close()
            thread.join()

    def environment(self, home, token=None):
        """The environment of a process that uses this server as the Hub, with its cache below `home`."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        return {
            **processes.environment(inherited),
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "no_proxy": "127.0.0.1",
            **({"HF_TOKEN": token} if token else {}),
        }

    def serve(self, monkeypatch, home):
        """Make this process use it as the Hub, with its cache below `home`, nobody logged in, and short waits."""
        from huggingface_hub import constants, hf_api
        from huggingface_hub.utils import _http
        from transformers.utils import hub

        template = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": self.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        # The first is what transformers keeps, the second what 4.48 uses, which keeps none.
        monkeypatch.setattr(hub, "_hf_api", None, raising=False)
        monkeypatch.setattr(hf_api.api, "endpoint", self.url)
        monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 1000)))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("no_proxy", "127.0.0.1")

    def take(self, name):
        """Count down the failures that are left; return whether there was one."""
        with self.lock:
            left = getattr(self, name)
            setattr(self, name, max(0, left - 1))
            return left > 0


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one piece: two would wait for each other (Nagle)
    disable_nagle_algorithm = True
    hub: HubServer

    def log_message(self, *_):
        pass

    def _answer(self):
        split = urlsplit(self.path)
        self.route, self.query = unquote(split.path), parse_qs(split.query)
        self.hub.requests.append((self.command, self.route))
        if self.hub.refusing:
            self.close_connection = True
            return
        once = self.hub.fails_once
        if once is not None and once in self.route:
            self.hub.fails_once = None
            self._read()
            self._send(500, {"error": "Internal Error"})
            return
        if (self.hub.failing is not None and self.hub.failing in self.route) or self.hub.take("failures"):
            self._read()
            self._send(500, {"error": "Internal Error"})
            return
        for method, begin, end, answer in ROUTES:
            if self.command in method and self.route.startswith(begin) and end in self.route:
                answer(self)
                return
        self._read()
        self._refuse(404, "EntryNotFound", "no such route")

    do_GET = do_HEAD = do_POST = do_PUT = _answer

    # ---- Reading and answering

    def _read(self):
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _send(self, status, value=None, *, body=None, headers=()):
        body = json.dumps(value).encode() if body is None else body
        self.send_response(status)
        for name, text in dict(headers).items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status, code, message):
        self._send(status, {"error": message}, headers={"X-Error-Code": code, "X-Error-Message": message})

    # ---- Rights

    def _user(self):
        """(user, rights) for the token of the request; None without a valid token."""
        return self.hub.tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def _may_write(self, name):
        user = self._user()
        if user is None:
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif user[1] != "write" or name.split("/")[0] not in (user[0], "org"):
            self._refuse(403, "", "Forbidden: you don't have the required permissions")
        else:
            return True
        return False

    def _repo(self, name, revision=None):
        """The repository and a commit; if it does not exist or is private, sends an error and returns None."""
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and self._user() is None):
            self._refuse(404 if repo is None and self._user() else 401, "RepoNotFound", "Repository not found")
            return None
        commit = repo.at(revision or "main")
        if commit is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repo, commit

    # ---- Answers

    def _whoami(self):
        user = self._user()
        if user is None:
            self._refuse(401, "", "Invalid credentials in Authorization header")
            return
        rights = {"type": "access_token", "accessToken": {"displayName": "t", "role": user[1]}}
        self._send(200, {"type": "user", "name": user[0], "orgs": [{"name": "org"}], "auth": rights})

    def _create(self):
        asked, user = json.loads(self._read()), self._user()
        name = f"{asked.get('organization') or (user or ('?',))[0]}/{asked['name']}"
        if not self._may_write(name):
            return
        answer = {"url": f"{self.hub.url}/{name}", "name": name}
        if name in self.hub.repos:
            self._send(409, {**answer, "error": "You already created this model repo"})
            return
        self.hub.repos[name] = Repo(private=asked.get("visibility") == "private" or asked.get("private", False))
        self._send(200, answer)

    def _branch(self):
        name, branch = self.route.removeprefix("/api/models/").split("/branch/")
        self._read()
        if self._may_write(name) and (found := self._repo(name)):
            found[0].branches[branch] = list(found[0].branches["main"])
            self._send(200, {})

    def _validate_yaml(self):
        content = json.loads(self._read())["content"]
        parts = content.split("---")
        try:
            data = yaml.safe_load(parts[1]) if content.startswith("---") and len(parts) > 2 else None
        except yaml.YAMLError as error:
            self._send(400, {"errors": [{"message": str(error)}], "warnings": []})
            return
        warnings = [] if data else [{"message": "empty or missing yaml metadata in repo card"}]
        self._send(200, {"errors": [], "warnings": warnings})

    def _preupload(self):
        name, revision = self.route.removeprefix("/api/models/").split("/preupload/")
        asked = json.loads(self._read())["files"]
        if not self._may_write(name) or not (found := self._repo(name, revision)):
            return
        files = [
            {
                "path": entry["path"],
                "uploadMode": "lfs" if is_lfs(entry["path"]) else "regular",
                "shouldIgnore": False,
                "oid": oid_of(entry["path"], found[1].files.get(entry["path"])),
            }
            for entry in asked
        ]
        self._send(200, {"files": files})

    def _lfs_batch(self):
        name = self.route.split(".git/")[0].strip("/")
        asked = json.loads(self._read())
        if not self._may_write(name):
            return
        objects = []
        for entry in asked["objects"]:
            upload = {"href": f"{self.hub.url}/lfs/{name}/{entry['oid']}"}
            verify = {"href": f"{self.hub.url}/lfs-verify/{name}"}
            there = entry["oid"] in self.hub.objects
            objects.append({**entry, **({} if there else {"actions": {"upload": upload, "verify": verify}})})
        self._send(200, {"transfer": "basic", "objects": objects})

    def _lfs_put(self):
        if self.hub.take("cuts"):
            self.rfile.read(16)
            self.close_connection = True
            return
        body = self._read()
        began = time.monotonic()
        while time.monotonic() - began < self.hub.delay:  # which may become less meanwhile
            time.sleep(0.01)
        oid = self.route.rsplit("/", 1)[1]
        if hashlib.sha256(body).hexdigest() != oid:
            self._send(400, {"error": "the object is not what its id says"})
            return
        self.hub.objects[oid] = body
        self._send(200, {})

    def _lfs_verify(self):
        asked = json.loads(self._read())
        there = len(self.hub.objects.get(asked["oid"], b"")) == asked["size"]
        self._send(200 if there else 404, {})

    def _commit(self):
        name, revision = self.route.removeprefix("/api/models/").split("/commit/")
        lines = [json.loads(line) for line in self._read().splitlines()]
        if not self._may_write(name) or not (found := self._repo(name, revision)):
            return
        repo, before = found
        files, changed = dict(before.files), []
        for line in lines[1:]:
            value = line["value"]
            changed.append(value["path"])
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            else:
                files = {path: data for path, data in files.items() if not path.startswith(value["path"])}
        commit = Commit(lines[0]["value"]["summary"], files, tuple(changed))
        repo.branches[revision].append(commit)
        self._send(200, {"success": True, "commitUrl": f"{self.hub.url}/{name}/commit/x", "commitOid": commit.oid})

    def _tree(self):
        name, place = self.route.removeprefix("/api/models/").split("/tree/")
        revision, _, folder = place.partition("/")
        if not (found := self._repo(name, revision)):
            return
        entries = []
        for path, data in sorted(found[1].files.items()):
            if path.startswith(folder):
                lfs = {"oid": oid_of(path, data), "size": len(data), "pointerSize": 134} if is_lfs(path) else None
                oid = hashlib.sha1(data).hexdigest()
                entries.append({"type": "file", "path": path, "size": len(data), "oid": oid, "lfs": lfs})
        self._send(200, [{key: value for key, value in entry.items() if value is not None} for entry in entries])

    def _info(self):
        name, _, revision = self.route.removeprefix("/api/models/").partition("/revision/")
        if name.endswith("/auth-check/write"):
            name = name.removesuffix("/auth-check/write")
            if self._repo(name) and self._may_write(name):
                self._send(200, {})
            return
        if not (found := self._repo(name, revision)):
            return
        repo, commit = found
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        self._send(200, {"id": name, "private": repo.private, "sha": commit.oid, "siblings": siblings, "tags": []})

    def _resolve(self):
        name, place = self.route.strip("/").split("/resolve/")
        revision, _, path = place.partition("/")
        if not (found := self._repo(name, revision)):
            return
        data = found[1].files.get(path)
        if data is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        headers = {"X-Repo-Commit": found[1].oid, "ETag": f'"{oid_of(path, data)}"', "Accept-Ranges": "bytes"}
        self._send(200, body=data, headers=headers)


def oid_of(path, data):
    """The git or LFS id of the contents of a file; None without a file."""
    if data is None:
        return None
    return (
        hashlib.sha256(data).hexdigest() if is_lfs(path) else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    )


#: Methods, beginning of the path, and what else is in it → answer.
ROUTES = (
    ("GET", "/api/whoami-v2", "", Handler._whoami),
    ("POST", "/api/repos/create", "", Handler._create),
    ("POST", "/api/validate-yaml", "", Handler._validate_yaml),
    ("POST", "/api/models/", "/preupload/", Handler._preupload),
    ("POST", "/api/models/", "/commit/", Handler._commit),
    ("POST", "/api/models/", "/branch/", Handler._branch),
    ("GET", "/api/models/", "/tree/", Handler._tree),
    ("GET", "/api/models/", "", Handler._info),
    ("POST", "/", ".git/info/lfs/objects/batch", Handler._lfs_batch),
    ("PUT", "/lfs/", "", Handler._lfs_put),
    ("POST", "/lfs-verify/", "", Handler._lfs_verify),
    ("GET HEAD", "/", "/resolve/", Handler._resolve),
)
