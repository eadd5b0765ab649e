"""A device without a transformer: NumPy alone, and strict about what it is asked to do.

What a cell of its cache holds depends, as keys and values do, on every token before it and on the weights. The next token is a hash of all
cells of the row, read back through the block table. So a wrong table, a shared block that was overwritten, a stale cell or a prefix taken
from other weights changes the answer, and a cell that nobody wrote raises. `answer` says what is right and knows no blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from pagedjax.engine_config import Buckets, EngineConfig
from pagedjax.inputs import MixedInputs, SamplingInputs, WindowInputs
from pagedjax.request import SamplingParams
from pagedjax.runner import warmup_inputs
from pagedjax.sampling import Sampled

VOCAB = 997
_MASK = (1 << 64) - 1
_NOTHING = -1  # in a cell that was never written


class Violation(BaseException):
    """The engine asked for what no device should be asked for. Not an `Exception`: an engine takes those for a device's failure."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise Violation(what)


def mix(x: int) -> int:
    """splitmix64's finaliser."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def cell_of(before: int, token: int, weights: int) -> int:
    """What the cell of `token` holds after a cell that holds `before`: 62 bits, so that it fits an int64 and is never `_NOTHING`."""
    return mix(before ^ mix(token * 1009 + weights)) >> 2


def next_token(cells: Sequence[int], weights: int, position: int, settings: tuple[float, int, float, int]) -> int:
    """From every cell of the row, and from the settings where they matter."""
    context = sum(mix(cell + i) for i, cell in enumerate(cells)) & _MASK
    temperature, top_k, top_p, seed = settings
    if temperature > 0:
        context ^= mix(hash((round(temperature, 4), top_k, round(top_p, 4), seed, position)) & _MASK)
    return mix(context + weights) % VOCAB


def answer(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    max_model_len: int = 1 << 30,
    eos: Sequence[int] = (),
    weights: int = 0,
    given: Sequence[int] = (),
) -> list[int]:
    """The right new tokens of a prompt; the first of them may be `given` by other weights."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    ids, cells = [*prompt, *given], []
    limit = min(params.max_tokens or max_model_len, max_model_len - len(prompt))
    settings = (params.temperature, max(params.top_k, 0), params.top_p, params.seed or 0)
    while len(ids) - len(prompt) < limit and (len(ids) == len(prompt) or ids[-1] not in ends):
        for token in ids[len(cells) :]:
            cells.append(cell_of(cells[-1] if cells else 0, token, weights))
        ids.append(next_token(cells, weights, len(ids), settings))
    return ids[len(prompt) :]


@dataclasses.dataclass
class _Row:
    """A row of the device's state."""

    last_token: int = 0
    num_computed: int = 0
    num_generated: int = 0
    done: bool = True
    settings: tuple[float, int, float, int] = (0.0, 0, 1.0, 0)
    max_new: int = 0
    stops: tuple[int, ...] = ()


@dataclasses.dataclass(eq=False)
class _Step:
    """A dispatch, run as late as possible: whoever changes its arrays meanwhile is found out."""

    inputs: WindowInputs | MixedInputs
    weights: int
    holders: list[int] | None
    report: bool
    sampled: Sampled | None = None
    error: BaseException | None = None


class StubRunner:
    """See `pagedjax.runner.Runner`.

    Attributes:
      allocator: the engine's, where it is known: blocks of a live table are then checked to have holders.
      dispatch_errors, fetch_errors: what the n-th dispatch or fetch (from 0) raises.
      lose_cache: whether an error takes cache and state along.
      num_dispatches, num_fetches, num_checked_blocks, num_recoveries: what has happened.
      live_rows: for each dispatch the number of rows in it.
      tables: what rows were given, and which.
    """

    def __init__(self, config: EngineConfig, buckets: Buckets, num_blocks: int) -> None:
        self.num_compilations = self.num_dispatches = self.num_fetches = self.num_checked_blocks = self.num_recoveries = 0
        self.allocator = None
        self.dispatch_errors: dict[int, BaseException] = {}
        self.fetch_errors: dict[int, BaseException] = {}
        self.lose_cache = False
        self.live_rows: list[int] = []
        self.tables: list[tuple] = []
        self._config, self._buckets, self._num_blocks = config, buckets, num_blocks
        self._size = config.block_size
        self._weights = 0
        self._lost = False
        self._pending: list[_Step] = []
        self._shapes: set[tuple] = set()
        self._forget()

    def dispatch(self, inputs: WindowInputs | MixedInputs, *, report: bool) -> _Step:
        require(not self._lost, "a dispatch after a failure and before recover()")
        number, self.num_dispatches = self.num_dispatches, self.num_dispatches + 1
        if number in self.dispatch_errors:
            self._fail()
            raise self.dispatch_errors[number]
        self._check_shapes(inputs)
        self._check_holders(inputs)
        holders = None if self.allocator is None else list(self.allocator._counts)
        step = _Step(inputs, self._weights, holders, report)
        self._pending.append(step)
        return step

    def set_tables(self, state_id: int, row) -> None:
        require(0 <= state_id <= len(self._rows) and row.bias.shape == row.counts.shape, "tables of no row")
        self.tables.append((state_id, row))
        self._saw("tables")

    def fetch(self, handle: _Step, *, report: bool) -> Sampled:
        assert report == handle.report
        number = self.num_fetches
        if isinstance(self.fetch_errors.get(number), KeyboardInterrupt):
            # Whoever interrupts the wait has not ended the step: it can be fetched again.
            raise self.fetch_errors.pop(number)
        self.num_fetches += 1
        self._run_until(handle)
        if handle.error is not None:
            raise handle.error
        if number in self.fetch_errors:
            self._fail()
            raise self.fetch_errors[number]
        assert handle.sampled is not None
        return handle.sampled

    def recover(self) -> bool:
        self.num_recoveries += 1
        lost, self._lost = self._lost, False
        if lost:
            self._pending.clear()
            self._forget()
        return lost

    def update_params(self, params: int) -> None:
        self._weights = params

    def warmup(self, cache_dir: object) -> Iterator[str]:
        for name, inputs in warmup_inputs(self._buckets, self._config):
            step = self.dispatch(inputs, report=False)
            self._run_until(step)
            yield name
        self._saw("tables")
        yield "tables"

    def _forget(self) -> None:
        self._cells = np.full((self._num_blocks + 1) * self._size, _NOTHING, np.int64)
        self._rows = [_Row() for _ in range(self._config.max_num_seqs)]

    def _fail(self) -> None:
        if self.lose_cache:
            if self._pending:
                self._run_until(self._pending[-1])
            self._lost = True

    def _run_until(self, last: _Step) -> None:
        while last in self._pending:
            step = self._pending.pop(0)
            if self._lost:
                step.error = RuntimeError("a step before this one took the cache along")
            elif isinstance(step.inputs, WindowInputs):
                step.sampled = self._window(step)
            else:
                step.sampled = self._mixed(step)

    # What a step computes.

    def _window(self, step: _Step) -> Sampled:
        inputs = step.inputs
        token = np.full((self._config.window, len(inputs.state_ids)), -1, np.int32)
        for i in range(self._config.window):
            token[i] = self._decode(step, inputs)
        return self._sampled(token, step)

    def _mixed(self, step: _Step) -> Sampled:
        decode = self._decode(step, step.inputs.decode)
        sampled = self._sampled(np.concatenate([decode, self._chunks(step, step.inputs.prefill, step.inputs.sampling)]), step)
        if step.inputs.prompt is None:
            return sampled
        prompt = step.inputs.prompt
        count = int(prompt.count)
        require(len(set(prompt.logit_ids[:count].tolist())) == count, "a prompt token is reported twice")
        start = step.inputs.prefill.prefill_query_start_loc
        for i in range(count):
            at, chunk = int(prompt.logit_ids[i]), int(prompt.chunk_ids[i])
            require(start[chunk] <= at < start[chunk + 1], "a prompt token belongs to another chunk")
            if at + 1 < start[chunk + 1]:
                require(step.inputs.prefill.token_ids[at + 1] == prompt.token_ids[i], "a prompt token is not the next one")
        return sampled._replace(prompt=self._sampled(prompt.token_ids, step))

    def _decode(self, step: _Step, inputs: WindowInputs) -> np.ndarray:
        out = np.full(len(inputs.state_ids), -1, np.int32)
        for i, state_id in enumerate(inputs.state_ids.tolist()):
            if state_id >= len(self._rows) or self._rows[state_id].done:
                continue
            row, table = self._rows[state_id], inputs.block_tables[i]
            self._write(step, table, row.num_computed, [row.last_token])
            row.num_computed += 1
            row.last_token = out[i] = self._next(step, table, row.num_computed, row.settings)
            row.num_generated += 1
            row.done = row.last_token in row.stops or row.num_generated >= row.max_new
        return out

    def _chunks(self, step: _Step, inputs, sampling: SamplingInputs) -> np.ndarray:
        # What a chunk without an end gives looks like a token; nobody may take it for one.
        out = np.full(len(inputs.state_ids), 7, np.int32)
        start = inputs.prefill_query_start_loc.tolist()
        slots = inputs.slot_mapping
        require((slots[start[-1] :] < self._size).all(), "the slot of a pad lies outside of the null block")
        for c, stop in enumerate(inputs.prefill_context_lens.tolist()):
            if start[c] == start[c + 1]:
                require(stop == 0 and inputs.state_ids[c] >= len(self._rows), "an empty chunk must be a pad")
                continue
            tokens, positions, table = (
                inputs.token_ids[start[c] : start[c + 1]].tolist(),
                inputs.positions[start[c] : start[c + 1]],
                inputs.prefill_block_tables[c],
            )
            require(positions.tolist() == list(range(stop - len(tokens), stop)), "positions are not the last ones of the context")
            want = table[positions // self._size] * self._size + positions % self._size
            require((slots[start[c] : start[c + 1]] == want).all(), "slots and block table disagree")
            self._write(step, table, stop - len(tokens), tokens)
            state_id = int(inputs.state_ids[c])
            if state_id >= len(self._rows):
                continue
            require(inputs.logit_ids[c] == start[c + 1] - 1, "the logits of a prompt are not those of its last token")
            settings = (
                float(sampling.temperature[c]),
                int(sampling.top_k[c]),
                float(sampling.top_p[c]),
                int(sampling.seed[c]),
            )
            stops = tuple(i for i in sampling.stop_token_ids[c].tolist() if i >= 0)
            row = _Row(self._next(step, table, stop, settings), stop, 1, False, settings, int(sampling.max_new_tokens[c]), stops)
            row.done = row.last_token in stops or row.num_generated >= row.max_new
            self._rows[state_id], out[c] = row, row.last_token
        return out

    def _write(self, step: _Step, table: np.ndarray, position: int, tokens: Sequence[int]) -> None:
        before = int(self._read(table, position)[-1]) if position else 0
        for i, token in enumerate(tokens, position):
            block = int(table[i // self._size])
            require(block != 0, "a live row writes to the null block")
            require(step.holders is None or step.holders[block] == 1, f"block {block} is written and has several holders, or none")
            before = cell_of(before, token, step.weights)
            self._cells[block * self._size + i % self._size] = before

    def _read(self, table: np.ndarray, num_tokens: int) -> np.ndarray:
        at = np.arange(num_tokens)
        blocks = table[at // self._size]
        require((blocks != 0).all(), "a live row reads the null block")
        cells = self._cells[blocks * self._size + at % self._size]
        require((cells != _NOTHING).all(), "a cell is read that was never written")
        return cells

    def _next(self, step: _Step, table: np.ndarray, num_tokens: int, settings: tuple[float, int, float, int]) -> int:
        return next_token(self._read(table, num_tokens).tolist(), step.weights, num_tokens, settings)

    def _sampled(self, token: np.ndarray, step: _Step) -> Sampled:
        if not step.report:
            return Sampled(token)
        top = (token[..., None] + np.arange(self._config.max_logprobs)).astype(np.int32)
        return Sampled(token, (-token / VOCAB).astype(np.float32), token % 5 + 1, top, (-top / VOCAB).astype(np.float32))

    # What is checked of a dispatch.

    def _check_shapes(self, inputs: WindowInputs | MixedInputs) -> None:
        buckets, window = self._buckets, inputs if isinstance(inputs, WindowInputs) else inputs.decode
        rows, width = window.block_tables.shape
        require(window.state_ids.shape == (rows,), "rows and tables differ")
        require(width in buckets.widths, f"{width} columns are no bucket")
        shape: tuple = (rows, width)
        if window is inputs:
            require(rows in buckets.rows, f"{rows} rows are no bucket of a window")
        else:
            num_tokens, chunks = len(inputs.prefill.token_ids), inputs.prefill.prefill_block_tables.shape
            require(rows in buckets.mixed_rows and num_tokens in buckets.tokens, f"{rows} rows, {num_tokens} tokens are no buckets")
            require(chunks == (buckets.prefill_rows(num_tokens), width), f"tables of chunks are {chunks}")
            require(inputs.sampling.stop_token_ids.shape == (chunks[0], self._config.max_device_stop_ids), "stop ids are of another shape")
            shape = (rows, width, num_tokens, inputs.prompt is None)
        self._saw(shape)

    def _saw(self, shape: object) -> None:
        if shape not in self._shapes:
            self._shapes.add(shape)
            self.num_compilations += 1

    def _check_holders(self, inputs: WindowInputs | MixedInputs) -> None:
        window = inputs if isinstance(inputs, WindowInputs) else inputs.decode
        live = window.state_ids < len(self._rows)
        self.live_rows.append(int(live.sum()))
        tables = [window.block_tables[live]]
        if window is not inputs:
            tables.append(inputs.prefill.prefill_block_tables)
        used = {int(block) for table in tables for block in np.unique(table)} - {0}
        require(len(set(window.state_ids[live].tolist())) == live.sum(), "a row twice in one dispatch")
        if self.allocator is not None:
            for block in used:
                require(self.allocator.reference_count(block) > 0, f"block {block} is in a live table and nobody holds it")
            self.num_checked_blocks += len(used)
