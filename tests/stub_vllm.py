"""A vLLM server that computes nothing: it takes the offered state from the worker and replies with fixed token ids."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import grpc
from hypic.v1 import worker_pb2, worker_pb2_grpc

__all__ = ["StubVllm"]

Json = dict[str, Any]


@dataclass
class StubVllm:
    """Knobs first, records after them. reply: token ids, the last of which ends it; takes_states: as its connector does."""

    reply: tuple[int, ...]
    status: int = 200
    takes_states: bool = True
    dies_after: int = -1
    finish_reason: str = "stop"
    waits: bool = False
    requests: list[Json] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    taken: list[bytes] = field(default_factory=list)
    was_left: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # the name is the library's
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                stub.headers.append({name.lower(): value for name, value in self.headers.items()})
                stub.requests.append({"path": self.path, **body})
                self._answer(stub.answer(body))

            def _answer(self, lines: Iterator[Json]) -> None:
                if stub.status != 200:
                    content = json.dumps({"error": {"message": "the stub refuses", "code": stub.status}}).encode()
                    self.send_response(stub.status)
                    self.send_header("content-length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                    return
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                try:
                    for line in lines:
                        self.wfile.write(f"data: {json.dumps(line)}\n\n".encode())
                        self.wfile.flush()
                    self.wfile.write(b"data: [DONE]\n\n")
                except OSError:
                    stub.was_left.set()
                self.close_connection = True

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.waits = False
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, body: Json) -> Iterator[Json]:
        """The chunks of a reply, as vLLM's completions endpoint sends them with `return_token_ids`."""
        offer = (body.get("kv_transfer_params") or {}).get("hypic")
        if offer and self.takes_states:
            self._take(offer)
        for index, token_id in enumerate(self.reply):
            if index == self.dies_after:
                return
            is_last = index == len(self.reply) - 1
            choice: Json = {
                "index": 0,
                "text": "",
                "token_ids": [token_id],
                "finish_reason": self.finish_reason if is_last else None,
                "logprobs": self._logprobs(token_id) if "logprobs" in body else None,
            }
            if index == 0:
                choice["prompt_token_ids"] = body["prompt"]
            yield {"choices": [choice]}
            while self.waits:
                # Whoever listens no more is found out by writing.
                yield {"choices": []}
        yield {"choices": [], "usage": {}}

    def _take(self, offer: Json) -> None:
        handle = bytes.fromhex(offer["handle"])
        with grpc.insecure_channel(offer["address"]) as channel:
            list(worker_pb2_grpc.WorkerServiceStub(channel).Take(worker_pb2.TakeRequest(handle=handle), timeout=10))
        self.taken.append(handle)

    def _logprobs(self, token_id: int) -> Json:
        return {
            "tokens": [f"token_id:{token_id}"],
            "token_logprobs": [-0.25],
            "top_logprobs": [{f"token_id:{token_id}": -0.25, "token_id:7": -3.0}],
        }
