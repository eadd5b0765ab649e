"""Fault drills: what breaks, what the client of that request sees, and that the next request is answered."""

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
import time

import jaxlib
import openai
import pytest

from tests.server.running import CONFIG, dechunk, running

LONG = {"prompt": "hello", "temperature": 0, "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(autouse=True)
def _the_next_request_is_answered(server, offline):
    yield
    status, body = server.post("/v1/completions", {"prompt": "next", "max_tokens": 9, "temperature": 0})
    assert status == 200 and body["choices"][0]["text"] == offline("next", max_tokens=9).outputs[0].text
    server.wait_idle()


@contextlib.contextmanager
def failing(server, error, after=0):
    """The `after`-th step from now on raises `error`, once."""
    runner, dispatch, left = server.runner, server.runner.dispatch, after

    def fail(*arguments, **options):
        nonlocal left
        left -= 1
        if left < 0:
            runner.dispatch = dispatch
            raise error
        return dispatch(*arguments, **options)

    runner.dispatch = fail
    try:
        yield
    finally:
        runner.dispatch = dispatch


FAULTS = [
    (RuntimeError("a step went wrong"), "RuntimeError: a step went wrong"),
    (jaxlib._jax.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9999 bytes."), "RESOURCE_EXHAUSTED: Out of memory"),
]


@pytest.mark.parametrize(("error", "message"), FAULTS, ids=["exception", "out of memory"])
def test_a_failed_step_is_a_500_for_its_requests(server, client, error, message):
    with failing(server, error), pytest.raises(openai.InternalServerError, match=message) as caught:
        client.completions.create(model="tiny", prompt="x", max_tokens=5)
    assert caught.value.code == "engine_error" and caught.value.type == "server_error"


@pytest.mark.parametrize(("error", "message"), FAULTS, ids=["exception", "out of memory"])
def test_a_stream_that_fails_in_the_middle_says_so(server, client, error, message):
    asked = dict(prompt="hello", temperature=0, max_tokens=200, stream=True, extra_body={"ignore_eos": True})
    pieces = []
    with failing(server, error, after=4), pytest.raises(openai.APIError, match=message):
        pieces.extend(chunk.choices[0].text for chunk in client.completions.create(model="tiny", **asked))
    assert pieces
    with failing(server, error, after=4):
        status, text = server.post("/v1/completions", {**LONG, "stream": True})
    events = text.removesuffix("\n\n").split("\n\n")
    assert (
        status == 200 and events[-1] == "data: [DONE]" and json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "engine_error"
    )
    assert "finish_reason" in events[0]


def test_one_failed_answer_of_several_fails_the_request(server):
    with failing(server, RuntimeError("boom"), after=2):
        status, body = server.post("/v1/completions", {**LONG, "prompt": ["a", "b", "c"]})
    assert status == 500 and "boom" in body["error"]["message"]


def started_stream(server, body=LONG, path="/v1/completions", receive_buffer=None):
    """A connection whose stream has begun."""
    data = json.dumps({**body, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(head.encode() + data)
    return connection


def slowly(server, seconds):
    """Each step takes that much longer."""
    runner, dispatch = server.runner, server.runner.dispatch

    def slow(*arguments, **options):
        time.sleep(seconds)
        return dispatch(*arguments, **options)

    @contextlib.contextmanager
    def patched():
        runner.dispatch = slow
        try:
            yield
        finally:
            runner.dispatch = dispatch

    return patched()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("several", [1, 3])
def test_a_closed_connection_aborts_at_once(server, stream, several):
    aborted = 'pagedjax_answers_total{finish_reason="abort"}'

    def count():
        line = next((one for one in server.get("/metrics")[1].splitlines() if one.startswith(aborted)), "x 0")
        return float(line.split(" ")[-1])

    before = count()
    with slowly(server, 0.2):  # 25 steps of eight tokens: five seconds
        body = {**LONG, "temperature": 1.0, "n": several, "stream": stream}
        data = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", server.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        while server.get("/stats")[1]["engine"]["num_running"] != several:
            time.sleep(0.01)
        left = time.monotonic()
        connection.close()
        server.wait_idle()
        assert time.monotonic() - left < 2.0  # a step or two, not all of them
    assert count() - before == several


def test_a_client_that_reads_one_byte_a_second(server, offline):
    """The engine goes on at its own pace, others are served, and the slow one gets what is its own."""
    connection = started_stream(server, receive_buffer=2048)
    got = connection.recv(1)
    started = time.monotonic()
    for _ in range(3):
        status, _body = server.post("/v1/completions", {"prompt": "fast", "max_tokens": 20, "temperature": 0})
        assert status == 200
        time.sleep(0.3)
        got += connection.recv(1)
    end = time.monotonic() + 30
    while server.get("/stats")[1]["engine"]["num_running"]:  # it has long been computed
        assert time.monotonic() < end
        time.sleep(0.02)
    assert time.monotonic() - started < 30
    while b"[DONE]" not in got:
        got += connection.recv(100)
    connection.close()
    events = dechunk(got.partition(b"\r\n\r\n")[2]).decode().split("\n\n")
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events if "choices" in event]
    assert "".join(texts) == offline("hello", max_tokens=200, ignore_eos=True).outputs[0].text


def test_a_client_that_reads_nothing_is_given_up():
    """Without a server: a `send` that never returns, as uvicorn's does when the buffers are full."""
    from pagedjax.server.streaming import EventStream

    closed = []

    async def events():
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            closed.append(True)

    async def run():
        async def send(message):
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        async def receive():
            await asyncio.Event().wait()

        held = contextlib.ExitStack()
        held.callback(closed.append, "held")
        await asyncio.wait_for(EventStream(events(), held, stall_s=0.1)({}, receive, send), 10)

    asyncio.run(run())
    assert closed == [True, "held"]


def test_a_stuck_engine_is_not_healthy(folder):
    config = dataclasses.replace(CONFIG, stuck_s=0.5)
    with running(folder, config) as server:
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
        release, dispatch = threading.Event(), server.runner.dispatch

        def stuck(*arguments, **options):
            server.runner.dispatch = dispatch
            release.wait(60)
            return dispatch(*arguments, **options)

        server.runner.dispatch = stuck
        asking = threading.Thread(target=server.post, args=("/v1/completions", {"prompt": "x", "max_tokens": 2}))
        asking.start()
        end = time.monotonic() + 20
        while (answer := server.get("/health"))[0] == 200:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert answer[0] == 503 and answer[1]["healthy"] is False and "the engine has been at one step for" in answer[1]["reason"]
        status, text = server.get("/metrics")  # figures from before
        assert status == 200 and "pagedjax_healthy 0.0" in text
        assert server.get("/stats")[1]["engine"] is None
        release.set()
        asking.join(60)
        assert server.get("/health")[0] == 200
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
        server.wait_idle()


def test_a_dead_engine_is_a_503_for_everybody(folder):
    with running(folder) as server:

        def die(**_):
            raise ZeroDivisionError("a bug")

        server.llm.engine._scheduler.schedule = die
        for _ in range(2):
            status, body = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
            assert status == 503 and body["error"]["code"] == "engine_stopped" and "a bug" in body["error"]["message"]
        assert server.get("/health") == (503, {"healthy": False, "reason": "the engine has stopped"})
        assert server.get("/metrics")[0] == 200


def test_a_bug_of_ours_is_a_500_in_the_same_form(server, monkeypatch):
    monkeypatch.setattr("pagedjax.server.completions.prepare", lambda *_, **__: 1 / 0)
    status, body = server.post("/v1/completions", {"prompt": "x"})
    assert status == 500 and body["error"] == {
        "message": "the server has a bug: ZeroDivisionError",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }


def test_a_bug_in_mid_stream_ends_the_stream_with_an_error(server, monkeypatch):
    monkeypatch.setattr("pagedjax.server.completions.CompletionAnswer.chunks", lambda *_: 1 / 0)
    status, text = server.post("/v1/completions", {**LONG, "stream": True})
    events = text.removesuffix("\n\n").split("\n\n")
    assert status == 200 and json.loads(events[0].removeprefix("data: "))["error"]["code"] == "internal_error" and len(events) == 2


def test_the_loop_does_not_wait_for_long_texts(server):
    """A text of a megabyte is tokenised while others are answered."""
    release, inside = threading.Event(), threading.Event()
    encode = server.llm.tokenizer.encode

    def slow(text, *arguments, **options):
        if text == "slow":
            inside.set()
            assert release.wait(60)
        return encode(text, *arguments, **options)

    server.llm.tokenizer.encode = slow
    try:
        asking = threading.Thread(target=server.post, args=("/tokenize", {"prompt": "slow"}))
        asking.start()
        assert inside.wait(30)
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
        assert asking.is_alive()
    finally:
        release.set()
        del server.llm.tokenizer.encode
    asking.join(60)
