"""A stand-in of the Hugging Face Hub: the requests of create_repo and upload_folder, answered on the loopback."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_" + "a" * 34


@dataclass
class Hub:
    """What the stand-in was sent."""

    url: str = ""
    refuses: bool = False  # commits, as for a user who may not write there
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)  # {repo: {path: content}}
    private: dict[str, bool] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)  # large files by their SHA-256
    cards: list[str] = field(default_factory=list)  # that were sent to be checked

    def commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.repos[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.repos[repo][value["path"]] = self.objects[value["oid"]]


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                return self.answer(401, {"error": "Invalid credentials"})
            found = re.fullmatch(r"/api/models/(.+)/(preupload|commit)/main", self.path.partition("?")[0])
            if self.path == "/api/repos/create":
                return self.create(json.loads(body))
            if self.path == "/api/validate-yaml":
                hub.cards.append(json.loads(body)["content"])
                return self.answer(200, {"errors": [], "warnings": []})
            if self.path.endswith(".git/info/lfs/objects/batch"):
                return self.batch(json.loads(body))
            if found is not None and found[2] == "preupload":
                return self.preupload(json.loads(body))
            if found is not None and hub.refuses:
                return self.answer(403, {"error": "you may not write to this repository"})
            if found is not None:
                hub.commit(found[1], [json.loads(line) for line in body.splitlines()])
                url = f"{hub.url}/{found[1]}/commit/{'0' * 40}"
                return self.answer(200, {"success": True, "commitOid": "0" * 40, "commitUrl": url})
            return self.answer(404, {"error": f"no such address: {self.path}"})

        def do_PUT(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            oid = self.path.rpartition("/")[2]
            is_whole = hashlib.sha256(content).hexdigest() == oid
            hub.objects[oid] = content
            self.answer(200 if is_whole else 400, {})

        def create(self, asked: dict[str, Any]) -> None:
            repo = f"{asked['organization']}/{asked['name']}"
            is_new = repo not in hub.repos
            hub.repos.setdefault(repo, {})
            hub.private.setdefault(repo, asked.get("private") or asked.get("visibility") == "private")
            self.answer(200 if is_new else 409, {"url": f"{hub.url}/{repo}", "error": "it exists"})

        def preupload(self, asked: dict[str, Any]) -> None:
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in asked["files"]
            ]
            self.answer(200, {"files": modes})

        def batch(self, asked: dict[str, Any]) -> None:
            objects = [
                {**each, "actions": {"upload": {"href": f"{hub.url}/lfs/{each['oid']}"}}}
                for each in asked["objects"]
            ]
            self.answer(200, {"transfer": "basic", "objects": objects})

        def answer(self, status: int, content: dict[str, Any]) -> None:
            raw = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
