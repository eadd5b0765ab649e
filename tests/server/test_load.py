"""A thousand requests at concurrency 200, some of them rude: every healthy answer is right, and nothing is left behind."""

import asyncio
import contextlib
import dataclasses
import gc
import json
import random
import resource

import httpx
import pytest

from tests.server.running import CONFIG, running

NUM_REQUESTS, CONCURRENCY = 1000, 200
MALFORMED = (b"{", b'{"prompt": "a", "max_tokens": "many"}', b'{"prompt": "a", "nonsense": 1}', b"\xff\xfe", b"[1, 2]")


def plan(seed):
    """What each client does: 20 % leave, 5 % send nonsense, 5 % ask for too much, the rest are healthy; (kind, body) each."""
    kinds = ["leaves"] * 200 + ["malformed"] * 50 + ["too long"] * 50 + ["healthy"] * 700
    random.Random(seed).shuffle(kinds)
    for index, kind in enumerate(kinds):
        draw = random.Random(seed * NUM_REQUESTS + index)
        words = [draw.choice(("alpha", "beta", "gamma", "delta")) for _ in range(draw.randint(1, 12))]
        body = {"prompt": " ".join(words), "max_tokens": draw.randint(1, 40), "temperature": 0, "stream": draw.random() < 0.5}
        if draw.random() < 0.5:
            body |= {"temperature": 1.0, "seed": draw.randrange(2**31)}
        if kind == "leaves":
            body |= {"max_tokens": 180, "ignore_eos": True}
        if kind == "too long":
            body["prompt"] = "x" * 300
        yield kind, body


async def ask(client, kind, body, draw):
    """``(status, text, finish reason)`` of an answer, or ``None`` of a client that left."""
    if kind == "malformed":
        answer = await client.post("/v1/completions", content=draw.choice(MALFORMED), headers={"Content-Type": "application/json"})
        return answer.status_code, None, None
    if kind == "leaves":
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(draw.uniform(0.001, 0.3)):
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_lines():
                        if draw.random() < 0.2:
                            break
        return None
    if not body["stream"]:
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            return answer.status_code, answer.text, None
        choice = answer.json()["choices"][0]
        return 200, choice["text"], choice["finish_reason"]
    text, reason = "", None
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return answer.status_code, (await answer.aread()).decode(), None
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        choice = json.loads(line.removeprefix("data: "))["choices"][0]
        assert reason is None, "text after the end"
        text, reason = text + choice["text"], choice["finish_reason"]
    return 200, text, reason


async def storm(url, seed):
    """The plan with each client's outcome."""
    limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        free = asyncio.Semaphore(CONCURRENCY)

        async def one(index, kind, body):
            async with free:
                return kind, body, await ask(client, kind, body, random.Random(index))

        return await asyncio.gather(*(one(index, kind, body) for index, (kind, body) in enumerate(plan(seed))))


@pytest.mark.slow
def test_a_thousand_requests_some_of_them_rude(folder, offline, record_property):
    config = dataclasses.replace(CONFIG, max_queue=CONCURRENCY)
    with running(folder, config) as server:
        memory = []
        for seed in (0, 1, 2):
            outcomes = asyncio.run(storm(server.url, seed))
            figures = server.wait_idle(60)
            gc.collect()
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
            statuses: dict = {}
            for kind, _, outcome in outcomes:
                statuses.setdefault(kind, set()).add(outcome and outcome[0])
            assert statuses.pop("leaves")
            assert statuses == {"malformed": {400}, "too long": {400}, "healthy": {200}}, statuses
            for kind, body, outcome in outcomes:
                if kind == "healthy":
                    want = offline(body["prompt"], **{name: body[name] for name in ("max_tokens", "temperature", "seed") if name in body})
                    assert outcome[1:] == (want.outputs[0].text, want.outputs[0].finish_reason), body
            ended = server.get("/metrics")[1]
            print(f"event loop's lag, p99: {figures['event_loop_lag_p99_s'] * 1e3:.1f} ms; memory at most {memory[-1] / 2**20:.0f} MiB")
        record_property("event_loop_lag_p99_s", figures["event_loop_lag_p99_s"])
        assert 'pagedjax_answers_total{finish_reason="abort"}' in ended  # some did leave in the middle
        assert figures["event_loop_lag_p99_s"] < 0.05, figures
        # The first storm brings threads, compiled steps and the caches of this process; after it nothing may grow.
        assert memory[2] - memory[1] < 32 << 20, memory
