"""A stand-in for the hub: the part of its HTTP interface that huggingface_hub uses for models, with files in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".onnx", ".data", ".bin", ".png")
TOKENS = {
    "writer": {"name": "ada", "orgs": [{"name": "team", "roleInOrg": "write"}], "role": "write"},
    "reader": {"name": "ada", "orgs": [], "role": "read"},
}


@dataclass
class Repository:
    """Files by commit, and commits by branch or tag."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: dict[str, bytes], revision: str = "main") -> str:
        digest = hashlib.sha1(repr([len(self.commits), sorted(files)]).encode()).hexdigest()
        self.commits[digest] = dict(files)
        self.revisions[revision] = digest
        return digest

    @property
    def files(self) -> dict[str, bytes]:
        """Files of the main branch."""
        return self.commits[self.revisions["main"]]


class Refused(Exception):
    """Raised to send a status other than 200."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.headers = status, {"X-Error-Code": code, "X-Error-Message": message}


class Hub:
    """Contents of the hub, a record of the requests, and the failures that it is told to produce."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        """Contents of large files, by SHA-256."""
        self.downloads: list[tuple[str, str | None]] = []
        """Each file that was sent, with the range that was requested."""
        self.sent: Counter[str] = Counter()
        """Number of bytes of each file that were sent."""
        self.uploads: list[str] = []
        """Large files that were received, by SHA-256."""
        self.writes = 0
        """Number of requests that would change something."""
        self.cut: dict[str, int] = {}
        """Files whose connection breaks once after so many bytes."""
        self.broken: set[str] = set()
        """Files and steps of an upload that the server fails at."""
        self.ranges = True
        self.changing = threading.Lock()
        """Lock that lets one request at a time change a repository."""

    def add(self, name: str, files: dict[str, bytes] | Path, revision: str = "main", **kind: bool) -> Repository:
        if isinstance(files, Path):
            files = {path.name: path.read_bytes() for path in files.iterdir()}
        repository = self.repositories.setdefault(name, Repository(**kind))
        repository.commit(files, revision)
        return repository

    def downloaded(self) -> set[str]:
        return {name for name, _ in self.downloads}

    def forget(self) -> None:
        self.downloads.clear()
        self.sent.clear()
        self.uploads.clear()


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    # Methods of HTTP, their paths, and the functions that answer them
    routes = (
        ("GET", r"/api/whoami-v2", "whoami"),
        ("GET", r"/api/models/([^/]+/[^/]+)", "information"),
        ("GET", r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", "information"),
        ("GET", r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", "tree"),
        ("GET", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", "file"),
        ("HEAD", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", "file"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("POST", r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", "preupload"),
        ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        ("PUT", r"/large/([0-9a-f]{64})", "receive"),
        ("POST", r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", "commit"),
    )

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client was killed
            super().handle()

    def handle_any(self) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        if len(self.body) < length:  # the client ended in the middle of its request
            self.close_connection = True
            return
        try:
            for method, pattern, name in self.routes:
                if method == self.command and (found := re.fullmatch(pattern, url.path)):
                    with self.hub.changing if name in ("create", "commit") else nullcontext():
                        answer = getattr(self, name)(*map(unquote, found.groups()))
                    if answer is not None:
                        self.answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})
                    return
            raise Refused(404, message=f"{self.command} {url.path} is not in the stand-in")
        except Refused as refused:
            self.answer(refused.status, b"{}", refused.headers)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    # Credentials and paths of requests

    def account(self) -> dict[str, Any] | None:
        header = self.headers.get("Authorization")
        if header is None:
            return None
        if (token := header.removeprefix("Bearer ")) not in TOKENS:
            raise Refused(401, message="Invalid credentials in Authorization header")
        return TOKENS[token]

    def writer(self) -> dict[str, Any]:
        account = self.account()
        self.hub.writes += 1
        if account is None or account["role"] != "write":
            raise Refused(403, message="you may not write")
        return account

    def repository(self, name: str) -> Repository:
        account, found = self.account(), self.hub.repositories.get(name)
        if found is None or (found.private and account is None):
            raise Refused(404 if account else 401, "RepoNotFound")
        if found.gated:
            raise Refused(403 if account else 401, "GatedRepo")
        return found

    def files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        repository = self.repository(name)
        digest = repository.revisions.get(revision, revision)
        if digest not in repository.commits:
            raise Refused(404, "RevisionNotFound")
        return digest, repository.commits[digest]

    # Reading

    def whoami(self) -> dict[str, Any]:
        account = self.account()
        if account is None:
            raise Refused(401)
        return {"name": account["name"], "orgs": account["orgs"], "auth": {"accessToken": {"role": account["role"]}}}

    def information(self, name: str, revision: str = "main") -> dict[str, Any]:
        digest, files = self.files(name, revision)
        return {"id": name, "modelId": name, "sha": digest, "siblings": [{"rfilename": each} for each in files]}

    def tree(self, name: str, revision: str) -> list[dict[str, Any]]:
        _, files = self.files(name, revision)
        entries: list[dict[str, Any]] = []
        for path, data in files.items():
            entry = {"type": "file", "path": path, "size": len(data), "oid": blob_id(data)}
            if path.endswith(LARGE):
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            entries.append(entry)
        return entries

    def file(self, name: str, revision: str, path: str) -> None:
        digest, files = self.files(name, revision)
        if path not in files:
            raise Refused(404, "EntryNotFound")
        if path in self.hub.broken:
            raise Refused(500)
        data = files[path]
        headers = {"X-Repo-Commit": digest, "ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range") if self.hub.ranges else None
        part = data
        if asked is not None:
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", asked).groups()  # type: ignore[union-attr]
            end = min(int(last) + 1 if last else len(data), len(data))
            part = data[int(first) : end]
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
        if self.command == "GET":
            self.hub.downloads.append((path, self.headers.get("Range")))
            if path in self.hub.cut:
                self.cut_off(part[: self.hub.cut.pop(path)], headers | {"Content-Length": str(len(part))})
                return
            self.hub.sent[path] += len(part)
        self.answer(200 if asked is None else 206, part, headers)

    def cut_off(self, part: bytes, headers: dict[str, str]) -> None:
        self.answer(200, part, headers)
        self.close_connection = True

    # Writing

    def create(self) -> dict[str, Any]:
        account, asked = self.writer(), json.loads(self.body)
        name = f"{asked.get('organization') or account['name']}/{asked['name']}"
        if name in self.hub.repositories:
            raise Refused(409)
        self.hub.add(name, {".gitattributes": b"*.safetensors filter=lfs"}, private=asked.get("visibility") == "private")
        return {"url": f"http://{self.headers['Host']}/{name}", "name": name}

    def validate(self) -> dict[str, Any]:
        assert json.loads(self.body)["content"].startswith("---\n"), "a model card has a block of metadata"
        return {"errors": [], "warnings": []}

    def preupload(self, name: str, revision: str) -> dict[str, Any]:
        self.writer()
        _, held = self.files(name, revision)
        return {
            "files": [
                {
                    "path": path,
                    "uploadMode": "lfs" if path.endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                    "oid": None if path not in held or path.endswith(LARGE) else blob_id(held[path]),
                }
                for path in (asked["path"] for asked in json.loads(self.body)["files"])
            ]
        }

    def batch(self, name: str) -> dict[str, Any]:
        self.writer()
        objects: list[dict[str, Any]] = json.loads(self.body)["objects"]
        for each in objects:
            if each["oid"] not in self.hub.large:
                host = f"http://{self.headers['Host']}"
                each["actions"] = {"upload": {"href": f"{host}/large/{each['oid']}"}}
        return {"transfer": "basic", "objects": objects}

    def receive(self, digest: str) -> dict[str, Any]:
        assert hashlib.sha256(self.body).hexdigest() == digest
        self.hub.writes += 1
        self.hub.uploads.append(digest)
        self.hub.large[digest] = self.body
        return {}

    def commit(self, name: str, revision: str) -> dict[str, Any]:
        self.writer()
        if "commit" in self.hub.broken:
            raise Refused(500)
        repository, operations = self.repository(name), [json.loads(line) for line in self.body.splitlines()]
        files = dict(repository.files)
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "header" and value.get("parentCommit") != repository.revisions["main"]:
                raise Refused(412)
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        digest = repository.commit(files, revision)
        return {"commitUrl": f"http://{self.headers['Host']}/{name}/commit/{digest}", "commitOid": digest}


@contextmanager
def served() -> Iterator[tuple[Hub, str]]:
    """Yield a hub and its URL."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
