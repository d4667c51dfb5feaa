"""A stand-in for the Hugging Face hub: the answers that streaming a data set, and a model's way down or up, need.

python tests/hub_server.py FOLDER      prints its port; serves FOLDER as each of the data sets and models `NAMES`
python tests/hub_server.py FOLDER LOG  also writes the paths that it is asked for into the file LOG
"""

import hashlib
import json
import re
import sys
from base64 import b64decode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0" * 40
NAMES = (
    "owner/name", "openai-community/gpt2", "roneneldan/TinyStories", "Skylion007/openwebtext",
    "HuggingFaceFW/fineweb-edu",
)  # fmt: skip
API = re.compile(rf"/api/(?:datasets|models)/({'|'.join(NAMES)})(/tree/)?")
FILES = re.compile(rf"/(?:datasets/)?(?:{'|'.join(NAMES)})/resolve/[^/]+/(.+)")


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root = Path(sys.argv[1])

    def log_message(self, *_: object) -> None:
        for log in sys.argv[2:]:
            with Path(log).open("a") as file:
                print(self.path, file=file)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        asked, wanted = API.match(path), FILES.fullmatch(path)
        if asked and asked[2]:
            folder = self.root / path.partition(COMMIT)[2].strip("/")
            self.answer(json.dumps([self.entry(file) for file in sorted(folder.iterdir())]).encode())
        elif asked:
            names = [str(file.relative_to(self.root)) for file in sorted(self.root.rglob("*")) if file.is_file()]
            about = {"id": asked[1], "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            self.answer(json.dumps(about).encode())
        elif wanted and (file := self.root / wanted[1]).is_file():
            self.file(file)
        else:
            self.answer(b"", 404, {"X-Error-Code": "EntryNotFound"})

    def do_POST(self) -> None:
        """Make a model, and write the files of a commit to it. A token is asked for."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        if self.headers.get("Authorization") is None:
            self.answer(b"", 401)
        elif self.path.endswith("/preupload/main"):
            files = [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            self.answer(json.dumps({"files": files}).encode())
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    (self.root / line["value"]["path"]).write_bytes(b64decode(line["value"]["content"]))
            about = {"commitUrl": f"{self.path}/{COMMIT}", "commitOid": COMMIT, "success": True}
            self.answer(json.dumps(about).encode())
        else:  # a new model, or the check of its card
            self.answer(json.dumps({"url": "https://huggingface.co/owner/name", "errors": [], "warnings": []}).encode())

    def file(self, path: Path) -> None:
        content = path.read_bytes()
        headers = {"ETag": f'"{digest(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range")
        if asked is None:
            self.answer(content, 200, headers)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1 if last else None]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        self.answer(part, 206, headers)

    def entry(self, file: Path) -> dict[str, Any]:
        path = str(file.relative_to(self.root))
        if file.is_dir():
            return {"type": "directory", "path": path, "oid": COMMIT, "size": 0}
        return {"type": "file", "path": path, "oid": digest(file), "size": file.stat().st_size}

    def answer(self, body: bytes, code: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    print(server.server_port, flush=True)
    server.serve_forever()
