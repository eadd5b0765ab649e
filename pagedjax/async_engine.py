"""`AsyncEngine`: the engine behind asyncio. One thread of its own runs the steps; coroutines add requests and read tokens."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import functools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import TypeVar

from pagedjax.engine import Engine, Text, TokenDelta
from pagedjax.errors import EngineError
from pagedjax.params import Params
from pagedjax.request import SamplingParams
from pagedjax.stats import EngineStats

logger = logging.getLogger("pagedjax.engine")
T = TypeVar("T")


class AsyncEngine:
    """Many coroutines, one engine.

    ::

        async with AsyncEngine(engine) as front:
            async for delta in front.generate(prompt_token_ids, SamplingParams(max_tokens=100)):
                ...

    Args:
      engine: belongs to this object from now on: nobody else may call it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls: collections.deque[tuple[Callable[[], object], concurrent.futures.Future[object]]] = collections.deque()
        self._readers: dict[str, _Reader] = {}
        self._wake = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._serve, name="pagedjax-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams = SamplingParams(),
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        sample_index: int = 0,
        text: Text | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """Continue a prompt. Leaving the loop early (`break` with `aclose`, cancellation, an exception) aborts the request.

        Args:
          prompt_token_ids, sampling_params, request_id, priority, cache_salt, sample_index: see `Engine.add_request`.
          text: likewise; it is used on the engine's thread.

        Yields:
          what each step gave; the last one has a finish reason.

        Raises:
          RequestError: an unusable argument.
          EngineError: a step of this request failed, or the engine is closed.
        """
        reader = _Reader(asyncio.get_running_loop())

        def add() -> str:
            name = self._engine.add_request(
                prompt_token_ids,
                sampling_params,
                request_id=request_id,
                priority=priority,
                cache_salt=cache_salt,
                sample_index=sample_index,
                text=text,
            )
            self._readers[name] = reader
            return name

        # Whoever is cancelled while waiting must still learn the id, or nobody could abort the request.
        adding = asyncio.ensure_future(self._call(add))
        try:
            await asyncio.shield(adding)
            while True:
                delta = await reader.queue.get()
                if delta is None:
                    raise self._gone()
                if delta.finish_reason is not None:
                    reader.ended = True
                if delta.error is not None:
                    raise EngineError(delta.error)
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            if not reader.ended:
                adding.add_done_callback(functools.partial(self._abort_added, reader))

    async def abort(self, request_id: str) -> None:
        """End a request, wherever it is; its reader gets a last delta with the reason ``"abort"``. An unknown one is no error."""
        await self._call(lambda: self._engine.abort(request_id))

    async def update_params(self, params: Params) -> None:
        """See `Engine.update_params`."""
        await self._call(lambda: self._engine.update_params(params))

    async def warmup(self) -> None:
        """See `Engine.warmup`; no request runs meanwhile."""
        await self._call(lambda: self._engine.warmup(use_tqdm=False))

    async def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return await self._call(self._engine.stats)

    @property
    def is_alive(self) -> bool:
        """Whether it still takes requests: it was not closed, and no bug has ended its thread."""
        return not self._closing

    @property
    def busy_s(self) -> float:
        """Seconds since the engine began what it is doing now: one step, a compilation included, or one call; 0 while it waits."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    async def close(self) -> None:
        """Stop. Readers that are still waiting get an `EngineError`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def _abort_added(self, reader: _Reader, adding: asyncio.Future[str]) -> None:
        if not adding.cancelled() and adding.exception() is None:
            name = adding.result()

            def abort() -> None:
                if self._readers.get(name) is reader:  # else it has ended, and another may have its name
                    del self._readers[name]
                    self._engine.abort(name)

            self._submit(abort)

    async def _call(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine's thread, between two steps."""
        return await asyncio.wrap_future(self._submit(function))

    def _submit(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._wake:
            if self._closing:
                future.set_exception(self._gone())
            else:
                self._calls.append((function, future))  # type: ignore[arg-type]
                self._wake.notify()
        return future

    def _gone(self) -> EngineError:
        return EngineError("the engine was closed" if self._failure is None else f"the engine has stopped: {self._failure!r}")

    # The engine's thread.

    def _serve(self) -> None:
        try:
            while self._run_calls():
                self._busy_since = time.monotonic()
                deltas = self._engine.step()
                self._busy_since = None
                self._deliver(deltas)
        except BaseException as error:
            logger.exception("the engine has stopped")
            self._failure = error
        with self._wake:
            self._closing = True
            left, self._calls = self._calls, collections.deque()
        readers, self._readers = self._readers, {}
        for reader in readers.values():
            reader.put([None])
        for _, future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._gone())
        if self._failure is None:
            self._engine.abort(list(readers))

    def _run_calls(self) -> bool:
        """Wait for something to do, and do what was asked; false when it is time to stop."""
        while True:
            with self._wake:
                while not self._calls and not self._closing and not self._engine.has_unfinished_requests:
                    self._wake.wait()
                if self._closing:
                    return False
                if not self._calls:
                    return True
                function, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                self._busy_since = time.monotonic()
                try:
                    result = function()
                except BaseException as error:
                    future.set_exception(error)
                    if not isinstance(error, Exception):
                        raise
                else:
                    future.set_result(result)
                self._busy_since = None

    def _deliver(self, deltas: Sequence[TokenDelta]) -> None:
        """Wake each event loop once, not once a token."""
        by_reader: dict[_Reader, list[TokenDelta | None]] = {}
        for delta in deltas:
            reader = self._readers.get(delta.request_id) if delta.finish_reason is None else self._readers.pop(delta.request_id, None)
            if reader is not None:
                by_reader.setdefault(reader, []).append(delta)
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Reader, list[TokenDelta | None]]]] = {}
        for reader, some in by_reader.items():
            by_loop.setdefault(reader.loop, []).append((reader, some))
        for loop, parts in by_loop.items():
            _call_soon(loop, _put_all, parts)


class _Reader:
    """Where one coroutine waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.queue: asyncio.Queue[TokenDelta | None] = asyncio.Queue()
        self.ended = False

    def put(self, deltas: list[TokenDelta | None]) -> None:
        """From any thread."""
        _call_soon(self.loop, _put_all, [(self, deltas)])


def _put_all(parts: list[tuple[_Reader, list[TokenDelta | None]]]) -> None:
    for reader, deltas in parts:
        for delta in deltas:
            reader.queue.put_nowait(delta)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:  # the loop is closed: nobody waits there any more
        logger.debug("a reader's event loop is closed")
