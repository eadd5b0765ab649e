"""A server in this process, on a thread of its own, and raw HTTP to it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time

from pagedjax import LLM, EngineConfig
from pagedjax.server.run import listen, server
from pagedjax.server.settings import ServerConfig

# Few sizes of steps, so that little is compiled; window 8 as by default.
SMALL = EngineConfig(
    max_num_seqs=8,
    num_kv_blocks=160,
    row_buckets=(8,),
    mixed_row_buckets=(8,),
    token_buckets=(64,),
    width_buckets=(16,),
    token_budget=64,
)
CONFIG = ServerConfig(model_names=("tiny", "org/tiny"), max_queue=24, drain_s=20.0)


@dataclasses.dataclass
class Running:
    """A server that answers at `url`; `llm` may be called when it has stopped, and its tokenizer always."""

    llm: LLM
    port: int
    one: object
    headers: dict = dataclasses.field(default_factory=dict)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def service(self):
        return self.one.config.app.state.service

    @property
    def runner(self):
        """What runs the engine's steps, for drills that break it."""
        return self.llm.engine._runner

    def post(self, path, body, **headers):
        """Status and parsed JSON of a POST; `body` may be bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.raw("POST", path, data, {"Content-Type": "application/json", **headers})

    def get(self, path, **headers):
        return self.raw("GET", path, b"", headers)

    def raw(self, method, path, data, headers):
        lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(data)}"]
        lines += [f"{name}: {value}" for name, value in {**self.headers, **headers}.items() if value is not None]
        status, _, body = self.exchange("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        return status, json.loads(body, parse_constant=_refuse) if body[:1] in (b"{", b"[") else body.decode()

    def exchange(self, request):
        """Status, headers and body of the answer to these bytes, sent while the answer is read."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:

            def send():
                with contextlib.suppress(OSError):  # it may close before all was sent
                    connection.sendall(request)

            sending = threading.Thread(target=send, daemon=True)
            sending.start()
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while data := connection.recv(1 << 16):
                    answer += data
        return split(answer)

    def wait_idle(self, seconds=20):
        """Until no request is in the server; then every block is free or cached."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            _status, figures = self.get("/stats")
            engine = figures["engine"]
            if engine and not engine["num_running"] and not engine["num_waiting"] and not figures["num_answers"]:
                assert engine["num_used_blocks"] == 0, engine
                assert engine["num_free_blocks"] + engine["num_cached_blocks"] == figures["num_kv_blocks"], engine
                return figures
            time.sleep(0.02)
        raise AssertionError(f"still busy after {seconds} s: {figures}")


def _refuse(name):
    raise ValueError(f"{name} is not JSON")


def split(answer):
    """Status, headers and whole body of an HTTP answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = dechunk(body)
    return int(status.split(" ")[1]), headers, body


def dechunk(data):
    whole = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        whole += data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]
    return whole


@contextlib.contextmanager
def running(folder, config=CONFIG, engine_config=SMALL, **options):
    """A server of the model in `folder` until the block is left."""
    llm = LLM(folder, engine_config=engine_config, **options)
    one = server(llm, config)
    bound = listen("127.0.0.1", 0)
    thread = threading.Thread(target=one.run, kwargs={"sockets": [bound]}, name="server", daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not one.started:
        assert thread.is_alive() and time.monotonic() < end, "the server did not start"
        time.sleep(0.01)
    try:
        yield Running(llm, bound.getsockname()[1], one)
    finally:
        one.should_exit = True
        thread.join(60)
        bound.close()
        assert not thread.is_alive(), "the server did not stop"
    assert not one.config.app.state.service.front._thread.is_alive(), "the engine did not stop"
