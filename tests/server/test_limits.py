"""What a server refuses, with which status; and that it answers the next request each time."""

import dataclasses
import json
import socket
import threading
import time

import openai
import pytest

from tests.server.running import CONFIG, running, split

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(folder):
    config = dataclasses.replace(CONFIG, max_body_bytes=1 << 20, body_s=1.0, api_keys=("key-1", "clé"))
    with running(folder, config) as one:
        one.headers["Authorization"] = "Bearer key-1"  # unless a test says otherwise
        yield one
        one.wait_idle()


@pytest.fixture(autouse=True)
def _the_next_request_is_answered(server):
    yield
    status, body = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert status == 200 and body["usage"]["completion_tokens"] == 1, body


def test_keys(server):
    body = {"prompt": "x", "max_tokens": 1}
    for headers in (
        {"Authorization": None},
        {"Authorization": "Bearer key-2"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic key-1"},
        {"Authorization": "key-1"},
    ):
        status, got = server.post("/v1/completions", body, **headers)
        assert status == 401 and got["error"]["code"] == "invalid_api_key" and got["error"]["type"] == "authentication_error"
    for path in ("/v1/models", "/stats", "/openapi.json", "/nothing"):
        assert server.get(path, Authorization=None)[0] == 401
    for path in ("/health", "/metrics", "/", "/page/chat.js"):
        assert server.get(path, Authorization=None)[0] == 200
    assert server.get("/v1/models", Authorization="bearer key-1")[0] == 200
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    request = "GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer clé\r\n\r\n".encode()
    assert server.exchange(request)[0] == 200


def test_a_body_of_100_megabytes(server):
    size = 100 << 20
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer key-1\r\nContent-Type: application/json\r\n"
    stated = f"{head}Content-Length: {size}\r\n\r\n".encode()
    status, _, body = server.exchange(stated + bytes(size))
    assert status == 413 and json.loads(body)["error"]["code"] == "request_too_large"
    assert "the body has 104857600 bytes; at most 1048576 are read" in json.loads(body)["error"]["message"]
    # The same without saying so: chunks.
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    status, _, body = server.exchange(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * 100 + b"0\r\n\r\n")
    assert status == 413 and "more than 1048576 bytes" in json.loads(body)["error"]["message"]


def test_10000_headers(server):
    many = "".join(f"x-{i}: {i}\r\n" for i in range(10_000))
    status, _, body = server.exchange(f"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{many}\r\n".encode())
    # Either the sum of their bytes or their number is too much, depending on how they arrive.
    assert status in (400, 431) and json.loads(body)["error"]["type"] == "invalid_request_error"
    some = "".join(f"x-{i}: {i}\r\n" for i in range(150))
    status, _, body = server.exchange(f"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{some}\r\n".encode())
    assert status == 431 and "the request has 152 headers; at most 100 are read" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "request_",
    [b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n"],
)
def test_what_is_no_http(server, request_):
    status, _, body = server.exchange(request_)
    assert status == 400 and json.loads(body)["error"]["message"] == "Invalid HTTP request received."


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "\xff\xfe"}', "the body is not UTF-8: byte 12 is 0xff"),
        (b"[" * 500_000, "the body is nested too deeply"),
        (b'{"prompt": ' * 90_000, "the body is nested too deeply"),
        (b'{"prompt": "x", "metadata": ' + b'{"a":' * 900 + b"1" + b"}" * 901, "metadata.a is"),
        (b"", "the body is missing"),
        (b"{", "the body is not JSON: Expecting property name"),
        (b'{"prompt": "x", "temperature": NaN}', "the body is not JSON: NaN is no number there"),
        (b'{"prompt": "x", "temperature": -Infinity}', "-Infinity is no number there"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature is inf; "),
        (b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", "the body is not JSON: Exceeds the limit"),
        (b'{"prompt": "x", "max_tokens": -99999999999999999999}', "max_tokens is -99999999999999999999; it must be at least 1"),
        (b'{"prompt": "\\ud800"}', "half a surrogate pair"),
        (b'"x"', "the body is 'x'; input should be a valid dictionary"),
        (b"null", "the body is None"),
        (b'{"prompt": "x", "\\u0000": 1}', "Unrecognized request argument supplied"),
    ],
)
def test_bodies_that_are_no_request(server, body, message):
    status, got = server.post("/v1/completions", body)
    assert status == 400 and message in got["error"]["message"], got


def test_deep_values_where_anything_goes(server):
    """Tools and template variables are handed on: a template may fail over them, the server may not."""
    deep = b'{"a":' * 900 + b"1" + b"}" * 900
    for field in (b'"tools": [%s]', b'"chat_template_kwargs": %s', b'"response_format": %s', b'"tool_choice": %s'):
        body = b'{"max_tokens": 1, "messages": [{"role": "user", "content": "x", "more": %s}], ' % deep + field % deep + b"}"
        status, got = server.post(CHAT, body)
        assert status in (200, 400), got
    assert server.post(CHAT, {"messages": [{"role": "user", "content": "x", "a\ud800": 1}]})[0] == 400


def test_another_content_type(server):
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer key-1\r\nContent-Length: 2\r\n"
    status, _, body = server.exchange(f"{head}Content-Type: text/plain\r\n\r\n{{}}".encode())
    assert status == 415 and "Content-Type is 'text/plain'; it must be 'application/json'" in json.loads(body)["error"]["message"]


def test_a_body_that_takes_too_long(server):
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer key-1\r\nContent-Length: 20\r\n\r\n{{"
    started = time.monotonic()
    status, _, body = server.exchange(head.encode())
    assert status == 408 and "did not arrive within 1 seconds" in json.loads(body)["error"]["message"]
    assert 0.9 < time.monotonic() - started < 10


def test_a_client_that_leaves_in_the_middle_of_its_body(server):
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-1\r\nContent-Length: 20\r\n\r\n{{"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode())


def test_a_full_server_says_so_and_recovers(server):
    """32 answers at once are taken; with one that is on its way, 32 more are not."""
    release = threading.Event()
    dispatch = server.runner.dispatch

    def waiting(*arguments, **options):
        assert release.wait(60)
        return dispatch(*arguments, **options)

    server.runner.dispatch = waiting
    try:
        got = []
        body = {"prompt": "x", "max_tokens": 2, "n": 32, "temperature": 1.0}
        first = threading.Thread(target=lambda: got.append(server.post("/v1/completions", {**body, "n": 1})))
        first.start()
        while not server.service.admission.num_taken:
            time.sleep(0.01)
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer key-1\r\n"
        head += f"Content-Length: {len(data)}\r\nContent-Type: application/json\r\n\r\n"
        status, headers, answer = server.exchange(head.encode() + data)
        assert status == 429 and headers["retry-after"] == "1", answer
        error = json.loads(answer)["error"]
        assert (
            error["code"] == "queue_full"
            and error["type"] == "rate_limit_error"
            and "1 answers are on their way and it takes 32" in error["message"]
        )
        assert server.get("/health")[0] == 200
    finally:
        server.runner.dispatch = dispatch
        release.set()
    first.join(60)
    assert got[0][0] == 200
    status, body = server.post("/v1/completions", body)
    assert status == 200 and len(body["choices"]) == 32


def test_requests_that_follow_each_other_on_one_connection(server):
    """After a refusal the connection goes on: the rest of the refused body is not taken for a request."""
    refused = b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 7\r\n\r\n{"a":1}'
    good = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(refused + good)
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
    first, second = answer[: answer.rindex(b"HTTP/1.1")], answer[answer.rindex(b"HTTP/1.1") :]
    assert split(first)[0] == 401 and split(second)[0] == 200
