"""A model hub on loopback that speaks as much of the hub's protocol as a download needs."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

__all__ = ["COMMIT", "hub_with"]

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_with(repo_id: str, folder: Path) -> Iterator[str]:
    """Serves the files of `folder` as `repo_id`; gives the hub's address."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    class Handler(BaseHTTPRequestHandler):
        """One request of the hub's client."""

        def do_GET(self) -> None:
            """Facts, or a file."""
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            """What a file would be."""
            self._answer(with_body=False)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Tests are quiet."""

        def _answer(self, *, with_body: bool) -> None:
            path = urlsplit(self.path).path
            if path.startswith(f"/api/models/{repo_id}/tree/"):
                self._send(json.dumps([_entry(n, c) for n, c in files.items()]).encode(), with_body)
            elif path.startswith(f"/api/models/{repo_id}"):
                siblings = [{"rfilename": name} for name in files]
                facts = {"id": repo_id, "modelId": repo_id, "sha": COMMIT, "siblings": siblings}
                self._send(json.dumps(facts).encode(), with_body)
            elif path.startswith(f"/{repo_id}/resolve/{COMMIT}/"):
                self._send(files[path.rpartition("/")[2]], with_body)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def _send(self, content: bytes, with_body: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if with_body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _entry(name: str, content: bytes) -> dict[str, object]:
    blob = hashlib.sha1(content, usedforsecurity=False).hexdigest()
    return {"type": "file", "path": name, "size": len(content), "oid": blob}
