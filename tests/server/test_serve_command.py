"""``pagedjax serve`` as a process: what it prints, and how it ends."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.server.running import Running


@contextlib.contextmanager
def process(folder, *options):
    """The command as a process, with what its tests need: a port that it picked, and its stderr so far."""
    command = [sys.executable, "-m", "pagedjax", "serve", str(folder), "--port", "0", "--max-num-seqs", "4", *options]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    ) as one:
        try:
            lines = []
            while not any("http://" in line for line in lines):
                lines.append(one.stderr.readline())
                assert lines[-1], "".join(lines)
            port = int(re.search(r"http://127\.0\.0\.1:(\d+)/,", lines[-1]).group(1))
            running = Running(None, port, None)
            end = time.monotonic() + 30
            while True:
                with contextlib.suppress(OSError):
                    if running.get("/health")[0] == 200:
                        break
                assert time.monotonic() < end
                time.sleep(0.05)
            yield one, running, lines
        finally:
            one.kill()


def begin_stream(port, key="none", **options):
    body = json.dumps({"prompt": "hello", "stream": True, "ignore_eos": True, **options}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port), timeout=120)
    connection.sendall(head.encode() + body)
    got = b""
    while b"data: " not in got:
        got += connection.recv(1 << 16)
    return connection, got


def read_all(connection, got):
    with connection, contextlib.suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            got += data
    return got


def test_sigterm_in_mid_stream_lets_the_answer_finish(folder):
    with process(folder) as (one, running, lines):
        assert re.fullmatch(r"tiny: chat at (http://127\.0\.0\.1:\d+)/, OpenAI's interface at \1/v1\n", lines[-1])
        assert running.get("/v1/models")[1]["data"][0]["id"] == "tiny"
        connection, got = begin_stream(running.port, max_tokens=200)
        one.send_signal(signal.SIGTERM)
        got = read_all(connection, got)
        assert b"data: [DONE]" in got and b'"finish_reason":"length"' in got and b"error" not in got
        assert one.wait(60) == 0
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", running.port), timeout=5)
        assert "Traceback" not in one.stderr.read()


def test_what_takes_longer_than_the_drain_is_told(folder):
    with process(folder, "--drain-seconds", "0.3", "--served-model-name", "it", "--api-key", "k") as (one, running, lines):
        assert "it: chat at" in lines[-1] and running.get("/v1/models")[0] == 401
        running.headers["Authorization"] = "Bearer k"
        assert running.get("/v1/models")[1]["data"][0]["id"] == "it"
        # Many answers, four at a time: far more than the drain has time for.
        connection, got = begin_stream(running.port, key="k", max_tokens=250, n=400, temperature=1)
        one.send_signal(signal.SIGINT)
        got = read_all(connection, got)
        assert b"the engine was closed" in got and b"engine_stopped" in got and b"data: [DONE]" in got[-40:]
        assert one.wait(60) == 130


def test_wrong_options(folder):
    from click.testing import CliRunner

    from pagedjax.cli.app import app

    def error(*options):
        result = CliRunner().invoke(app, ["serve", str(folder), *options])
        assert result.exit_code != 0
        return f"{result.output}{result.exception}"

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "that address cannot be had" in error("--port", str(taken.getsockname()[1]))
    assert "there is no such address" in error("--host", "no.such.host.invalid")
    assert "max_queue is -1; it must be an integer of at least 0" in error("--max-queue", "-1")
    assert "drain_s is -1.0; it must be a number of seconds above 0" in error("--drain-seconds", "-1")
    assert "api_keys is (' ',); it must be a tuple of texts that are not empty" in error("--api-key", " ")
    assert "max_num_seqs is 0; it must be a positive integer" in error("--max-num-seqs", "0")


def test_without_the_extra(folder, monkeypatch):
    from click.testing import CliRunner

    from pagedjax.cli import serve
    from pagedjax.cli.app import app

    monkeypatch.setattr(sys.modules["pagedjax.cli.serve"], "_NEEDED", ("fastapi", "nothing_of_that_name"))
    assert "serving needs nothing_of_that_name: pip install 'pagedjax[serve]'" in CliRunner().invoke(app, ["serve", str(folder)]).output
    assert serve is not None
