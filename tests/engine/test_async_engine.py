"""`AsyncEngine`: many coroutines on one engine, with real asyncio and a tiny real model."""

import asyncio
import dataclasses
import threading
import time

import pytest

from pagedjax import AsyncEngine, Engine, EngineConfig, EngineError, RequestError, SamplingParams, generate
from tests.helpers import TINY, prompt, tiny_params

GREEDY = SamplingParams(temperature=0, max_tokens=20)
SMALL = EngineConfig(
    max_num_seqs=4, num_kv_blocks=60, row_buckets=(4,), mixed_row_buckets=(4,), token_buckets=(64,), width_buckets=(16,), token_budget=64
)
PROMPTS = [prompt(n, seed=n) for n in (5, 17, 33)]


@pytest.fixture(scope="module")
def params():
    return tiny_params()


@pytest.fixture(scope="module")
def want(params):
    return generate(params, TINY, PROMPTS, 20).token_ids


async def collect(front, ids, sampling=GREEDY, **options):
    deltas = [delta async for delta in front.generate(ids, sampling, **options)]
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    return [token for delta in deltas for token in delta.token_ids], deltas[-1].finish_reason


def in_front(params, work, config=SMALL):
    """Run the coroutine function `work` on an `AsyncEngine`; afterwards all its blocks are free and its thread is gone."""
    engine = Engine(params, TINY, config)
    before = set(threading.enumerate())  # other tests of this process may have a server that runs

    async def run():
        async with AsyncEngine(engine) as front:
            assert [t.name for t in set(threading.enumerate()) - before if t.name == "pagedjax-engine"]
            result = await work(front)
            while (stats := await front.stats()).num_running or stats.num_waiting:
                await asyncio.sleep(0.01)
            assert stats.num_used_blocks == 0
            return result

    result = asyncio.run(asyncio.wait_for(run(), 120))
    assert not [t for t in set(threading.enumerate()) - before if t.name == "pagedjax-engine"]
    return result


def test_many_readers_get_what_generate_gives(params, want):
    async def work(front):
        got = await asyncio.gather(*(collect(front, ids) for ids in PROMPTS * 3))
        return got, await front.stats()

    got, stats = in_front(params, work)
    assert got == [(ids, "length") for ids in want * 3]
    assert stats.num_finished == 9 and stats.num_dispatches < 9 * 4  # they ran side by side


def test_tokens_come_while_the_request_runs(params, want):
    async def work(front):
        seen = []
        async for delta in front.generate(PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=60)):
            seen.append(len(delta.token_ids))
            if len(seen) == 1:
                assert (await front.stats()).num_running == 1
        return seen

    assert in_front(params, work) == [1, *[8] * 7, 3]


def test_leaving_the_loop_aborts(params, want):
    long = dataclasses.replace(GREEDY, max_tokens=200)

    async def work(front):
        stream = front.generate(PROMPTS[0], long)
        async for _ in stream:
            break
        await stream.aclose()

        began, step = asyncio.Event(), front._engine.step

        async def read():
            async for _ in front.generate(PROMPTS[1], long):
                began.set()

        def slow_step():  # or the answer may be there, whole, before it is cancelled
            time.sleep(0.02)
            return step()

        front._engine.step = slow_step
        for wait in (asyncio.sleep(0), began.wait()):
            task = asyncio.create_task(read())
            await wait
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return await collect(front, PROMPTS[2])

    assert in_front(params, work) == (want[2], "length")


def test_abort_by_name_ends_the_reader(params):
    async def work(front):
        async def stop():
            await asyncio.sleep(0.05)
            await front.abort("x")
            await front.abort("nobody")

        (tokens, reason), _ = await asyncio.gather(
            collect(front, PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=220), request_id="x"), stop()
        )
        return len(tokens), reason

    count, reason = in_front(params, work, dataclasses.replace(SMALL, window=1))
    assert reason == "abort" and count < 220


def test_a_bad_request_fails_alone(params, want):
    async def work(front):
        good = asyncio.create_task(collect(front, PROMPTS[0], request_id="a"))
        with pytest.raises(RequestError, match="token id 97 at position 0"):
            await collect(front, [97])
        with pytest.raises(RequestError, match="priority is 'x'; it must be an integer"):
            await collect(front, [1], priority="x")
        return await good

    assert in_front(params, work) == (want[0], "length")


def test_a_failed_step_reaches_its_readers_and_the_next_request_works(params, want):
    async def work(front):
        runner = front._engine._runner
        dispatch = runner.dispatch

        def fail(inputs, *, report):
            runner.dispatch = dispatch
            raise RuntimeError("the device is on fire")

        runner.dispatch = fail
        with pytest.raises(EngineError, match="a step failed: RuntimeError: the device is on fire"):
            await collect(front, PROMPTS[0])
        return await collect(front, PROMPTS[1])

    assert in_front(params, work) == (want[1], "length")


def test_a_dead_engine_says_so_to_everybody(params):
    engine = Engine(params, TINY, SMALL)

    async def run():
        front = AsyncEngine(engine)

        def die(**_):
            raise ZeroDivisionError("a bug")

        engine._scheduler.schedule = die
        with pytest.raises(EngineError, match="a bug"):
            await collect(front, PROMPTS[0])
        with pytest.raises(EngineError, match="a bug"):
            await collect(front, PROMPTS[1])
        await front.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_closing_ends_readers_and_refuses_new_ones(params):
    async def run():
        front = AsyncEngine(Engine(params, TINY, dataclasses.replace(SMALL, window=1)))
        stream = front.generate(PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=220))
        await anext(stream)
        await front.close()
        with pytest.raises(EngineError, match="the engine was closed"):
            async for _ in stream:
                pass
        with pytest.raises(EngineError, match="the engine was closed"):
            await collect(front, PROMPTS[0])

    asyncio.run(asyncio.wait_for(run(), 60))


def test_weights_change_under_running_requests(params):
    other = tiny_params(seed=1)
    fresh = generate(other, TINY, PROMPTS[:1], 20).token_ids[0]

    async def work(front):
        running = asyncio.create_task(collect(front, PROMPTS[1], dataclasses.replace(GREEDY, max_tokens=100)))
        await asyncio.sleep(0.05)
        await front.update_params(other)
        return (await running)[1], await collect(front, PROMPTS[0])

    assert in_front(params, work) == ("length", (fresh, "length"))


def test_closing_reaches_readers_though_a_caller_has_given_up(params):
    async def run():
        engine = Engine(params, TINY, dataclasses.replace(SMALL, window=1))
        front = AsyncEngine(engine)
        stream = front.generate(PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=220))
        await anext(stream)
        step, entered = engine.step, threading.Event()

        def slow():
            entered.set()
            time.sleep(0.3)
            return step()

        engine.step = slow
        await asyncio.to_thread(entered.wait)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(front.stats(), 0.01)
        await front.close()
        with pytest.raises(EngineError, match="the engine was closed"):
            async for _ in stream:
                pass

    asyncio.run(asyncio.wait_for(run(), 60))


def test_leaving_late_does_not_abort_another_request_of_that_name(params, want):
    async def work(front):
        first = front.generate(PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=2), request_id="x")
        await anext(first)
        while (await front.stats()).num_running:  # it has ended, and its last delta is unread
            await asyncio.sleep(0.01)
        second = front.generate(PROMPTS[1], GREEDY, request_id="x")
        tokens = list((await anext(second)).token_ids)
        await first.aclose()
        async for delta in second:
            tokens += delta.token_ids
        return tokens

    assert in_front(params, work, dataclasses.replace(SMALL, window=1)) == want[1]
