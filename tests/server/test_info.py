"""Models, health, figures and the tokenizer."""

import re

import openai
import pytest


def test_models(client, server):
    listed = client.models.list().data
    assert [one.id for one in listed] == ["tiny", "org/tiny"] and listed[0].max_model_len == 256 and listed[0].owned_by == "pagedjax"
    assert client.models.retrieve("org/tiny").root == "tiny"  # the client escapes the slash
    assert server.get("/v1/models/org/tiny")[1]["id"] == "org/tiny"
    with pytest.raises(openai.NotFoundError, match="model is 'x'; this server has tiny, org/tiny"):
        client.models.retrieve("x")


def test_health(server):
    assert server.get("/health") == (200, {"healthy": True, "reason": None})


def samples(server):
    status, text = server.get("/metrics")
    assert status == 200
    return {name: float(value) for name, value in re.findall(r"^(pagedjax\S+) (\S+)$", text, re.MULTILINE)}


def test_metrics_count(client, server):
    before = samples(server)
    client.completions.create(model="tiny", prompt="x" * 40, max_tokens=10, temperature=0, extra_body={"ignore_eos": True})
    server.wait_idle()
    after = samples(server)

    def grown(name):
        return after[name] - before.get(name, 0)

    assert grown("pagedjax_prompt_tokens_total") == 40 and grown("pagedjax_generated_tokens_total") == 10
    assert grown('pagedjax_answers_total{finish_reason="length"}') == 1
    for name in ("time_to_first_token", "time_per_output_token", "answer"):
        assert grown(f"pagedjax_{name}_seconds_count") == 1 and grown(f"pagedjax_{name}_seconds_sum") > 0
    assert after["pagedjax_requests_running"] == after["pagedjax_requests_waiting"] == after["pagedjax_requests_preempted"] == 0
    assert after["pagedjax_kv_blocks_used"] == after["pagedjax_kv_cache_usage_ratio"] == 0
    assert after["pagedjax_kv_blocks_free"] + after["pagedjax_kv_blocks_cached"] == 160
    assert after["pagedjax_healthy"] == 1 and after["pagedjax_event_loop_lag_seconds_count"] > 0
    assert 0 <= after["pagedjax_prefix_cache_hit_ratio"] < 1 and after["pagedjax_preemptions_total"] == 0


def test_figures_for_the_page(server):
    status, figures = server.get("/stats")
    assert status == 200 and figures["engine"]["num_running"] == 0 and figures["num_kv_blocks"] == 160 and figures["max_num_seqs"] == 8
    assert figures["max_answers"] == 32 and figures["event_loop_lag_p99_s"] >= 0


def test_tokenize_and_back(server):
    status, got = server.post("/tokenize", {"prompt": "héllo", "return_token_strs": True})
    assert status == 200 and got["count"] == len(got["tokens"]) == 6 and got["max_model_len"] == 256
    assert got["token_strs"] == ["h", "\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}", "l", "l", "o"]
    assert server.post("/detokenize", {"tokens": got["tokens"]}) == (200, {"prompt": "héllo"})
    messages = [{"role": "user", "content": "hi"}]
    chat = server.post("/tokenize", {"messages": messages})[1]["tokens"]
    shown = server.post("/detokenize", {"tokens": chat})[1]["prompt"]
    assert shown == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    short = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False})[1]["count"]
    assert short < len(chat)
    assert server.post("/tokenize", {"prompt": ""})[1]["tokens"] == []


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "it must have either prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user"}]}, "it must have either prompt or messages"),
        ("/tokenize", {"prompt": 5}, "prompt is 5; input should be a valid string"),
        ("/tokenize", [], r"the body is \[\]; input should be a valid dictionary"),
        ("/detokenize", {"tokens": [258]}, "tokens has the id 258; ids are 0 to 257"),
        ("/detokenize", {"tokens": [-1]}, r"tokens\[0\] is -1; input should be greater than or equal to 0"),
        ("/detokenize", {"tokens": [2**64]}, r"tokens\[0\] is 18446744073709551616; input should be less than"),
        ("/detokenize", {}, "tokens is missing"),
    ],
)
def test_bad_bodies(server, path, body, message):
    status, got = server.post(path, body)
    assert status == 400 and re.search(message, got["error"]["message"]), got


def test_the_page_and_nothing_else(server):
    for path, kind in (("/", "text/html"), ("/page/chat.js", "text/javascript"), ("/page/chat.css", "text/css")):
        status, headers, body = server.exchange(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert status == 200 and headers["content-type"].startswith(kind) and "default-src 'none'" in headers["content-security-policy"]
        assert body
    for path in ("/page/", "/page/__init__.py", "/page/../app.py", "/page/%2e%2e/app.py", "//etc/passwd", "/docs", "/nothing"):
        status, error = server.get(path)
        assert status == 404 and error["error"]["type"] == "not_found_error", (path, error)
    assert server.get("/v1/completions")[0] == 405
    status, document = server.get("/openapi.json")
    assert status == 200 and "/v1/chat/completions" in document["paths"]
