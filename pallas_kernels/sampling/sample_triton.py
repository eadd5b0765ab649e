"""Sampling in Pallas, Triton lowering: one program a row, no sort.

A *lane* is a residue class of token ids: lane l of a sweep over tiles of ``2 * HALF * halves`` ids sees one pair of ids in every tile,
the pair that shares a run of threefry. A sweep leaves the best of every lane, so that the best of the row is a reduction, and taking
one id out costs no more than looking at its lane again (a tournament). A row takes one of three ways:

- greedy: one sweep, the largest logit of every lane.
- top-k up to ``MAX_PICKS``: the same sweep, then k times the best of the lanes; everything after that is arithmetic on k numbers.
- else: one sweep for the largest logit plus noise of every lane. Its best is the draw of the unfiltered row. The ids that the filters
  keep are the likeliest n for some n, so whether they keep this one follows from the number and the mass of the ids before it: a
  second sweep. If they do not, they keep nothing after it either, and the next best of those before it is tried: rejection without
  a new draw, so that the result is the largest of the kept ids exactly.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._dispatch import Device
from pallas_kernels.sampling import GREEDY_TEMPERATURE, Adjustments, SampleProblem, adjust_triton
from pallas_kernels.sampling.noise import HALF, exponential_of_bits, gumbel_of_bits, threefry2x32

MAX_PICKS = 64  # the largest top-k that is taken id by id
_MAX_LANES_TRIED = 32  # lanes looked at again one by one before all are
_MAX_ROUNDS = 128  # of so many lanes and all of them, where one is nearly always enough: whatever the logits, nothing runs for ever
_BITS = 2  # of the k-th largest logit that one sweep finds
_NO_ID = 2**31 - 1
_LOG2E = math.log2(math.e)
_INF = float("inf")


class Tiles(NamedTuple):
    """Sizes of a program, powers of two; a tile is ``2 * HALF`` times so many ids."""

    read: int = 8  # of a sweep without noise
    noise: int = 2
    num_warps: int = 16


TILES = Tiles()
_State = Any


def why_not(problem: SampleProblem | None, device: Device, *, interpret: bool) -> str | None:
    """Needs a CUDA device of compute capability 8.0 or the interpreter."""
    del problem
    if not interpret:
        if device.platform != "gpu" or device.compute_capability is None:
            return "it needs an NVIDIA GPU; 'pallas_triton_interpret' runs the same kernel slowly in Pallas's interpreter"
        if device.compute_capability < (8, 0):
            return "it needs compute capability 8.0 (Ampere) or newer; 'reference' runs on any device"
    return None


def run(
    problem: SampleProblem,
    logits: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    adjust: Adjustments | None,
    *,
    interpret: bool,
    tiles: Tiles | None = None,
) -> jax.Array:
    """See ``pallas_kernels.sample_tokens``; ``tiles`` overrides `TILES`."""
    tiles = tiles or TILES
    if problem.num_rows == 0:
        return jnp.zeros((0,), jnp.int32)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    arrays: tuple[jax.Array, ...] = (logits, keys.reshape(-1), temperature, top_k, top_p, min_p)
    if adjust is not None:
        arrays += adjust_triton.adjusted(problem, logits, adjust, interpret=interpret), adjust.flags
    token: jax.Array = pl.pallas_call(
        functools.partial(_sample, problem=problem, tiles=tiles),
        name="sample_tokens",
        grid=(problem.num_rows,),
        in_specs=[anywhere] * len(arrays),
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct((problem.num_rows,), jnp.int32),
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
    )(*arrays)
    return token


class Row:
    """The logits of one row; every read of a logit is here.

    Args:
      logits: of all rows, a reference.
      row: which one.
      problem: see `SampleProblem`.
      adjusted: the reference to read instead if `is_adjusted`; ``None`` where no row is.
      is_adjusted: bool[].
    """

    def __init__(
        self, logits: Any, row: jax.Array, problem: SampleProblem, adjusted: Any = None, is_adjusted: jax.Array | bool = False
    ) -> None:
        self.logits, self.row, self.problem, self.adjusted, self.is_adjusted = logits, row, problem, adjusted, is_adjusted

    def load(self, ids: jax.Array) -> jax.Array:
        """Logits as they are; minus infinity past the vocabulary."""
        there = ids < self.problem.vocab_size
        if self.adjusted is None:
            return plt.load(self.logits.at[self.row, ids], mask=there, other=-_INF)
        # A masked load reads nothing, and costs less than a branch at each of them.
        plain = plt.load(self.logits.at[self.row, ids], mask=there & jnp.logical_not(self.is_adjusted), other=-_INF)
        adjusted = plt.load(self.adjusted.at[self.row, ids], mask=there & self.is_adjusted, other=-_INF)
        return jnp.where(self.is_adjusted, adjusted, plain)

    def finish(self, x: jax.Array) -> jax.Array:
        """What `load` gave. A logit that is no number becomes minus infinity: comparisons stay an order."""
        return jnp.where(x == x, x, -_INF)

    def read(self, ids: jax.Array) -> jax.Array:
        """Logits, numbers all."""
        return self.finish(self.load(ids))

    def num_tiles(self, halves: int) -> int:
        """Tiles of a sweep."""
        return -(-self.problem.vocab_size // (2 * HALF * halves))

    def sweep(self, halves: int, body: Callable[..., _State], init: _State) -> _State:
        """``state = body(tile, ids, x0, x1, state)`` over all tiles; x0 is of ``ids``, x1 of the ids that are 512 further."""
        lane = jnp.arange(HALF * halves, dtype=jnp.int32)
        first = ((lane >> 9) << 10) + (lane & (HALF - 1))

        def loads(tile: jax.Array | int) -> tuple[jax.Array, jax.Array]:
            ids = tile * (2 * HALF * halves) + first
            return self.load(ids), self.load(ids + HALF)

        def step(tile: jax.Array, carry: tuple[Any, _State]) -> tuple[Any, _State]:
            (x0, x1), state = carry
            # The next tile is on its way while this one is worked on; past the last, the mask reads nothing.
            following = loads(tile + 1)
            ids = tile * (2 * HALF * halves) + first
            return following, body(tile, ids, self.finish(x0), self.finish(x1), state)

        return lax.fori_loop(0, self.num_tiles(halves), step, (loads(0), init))[1]

    def lane_ids(self, lane: jax.Array, halves: int) -> tuple[jax.Array, jax.Array]:
        """Chunks of 1024 in which a lane has ids, and the first id of each of its pairs; padded past the vocabulary."""
        tile = jnp.arange(pad(self.num_tiles(halves)), dtype=jnp.int32)
        chunk = tile * halves + (lane >> 9)
        return chunk, (chunk << 10) + (lane & (HALF - 1))


def pad(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


def _lane_of(token: jax.Array, halves: int) -> jax.Array:
    return (((token >> 10) & (halves - 1)) << 9) + (token & (HALF - 1))


def _above(x: jax.Array, ids: jax.Array, than: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Whether ids with logits come before an id with its logit: likelier, or as likely and lower."""
    return (x > than[0]) | ((x == than[0]) & (ids < than[1]))


def _first_best(x: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest of a vector without NaN and the lowest id that has it."""
    best = jnp.max(x)
    return best, jnp.min(jnp.where(x == best, ids, _NO_ID))


def _sample(
    logits_ref: Any,
    keys_ref: Any,
    temperature_ref: Any,
    top_k_ref: Any,
    top_p_ref: Any,
    min_p_ref: Any,
    *refs: Any,
    problem: SampleProblem,
    tiles: Tiles,
) -> None:
    row = pl.program_id(0)
    *adjusted, out_ref = refs
    logits = Row(logits_ref, row, problem, *((adjusted[0], plt.load(adjusted[1].at[row]) > 0) if adjusted else ()))
    temperature, top_k = plt.load(temperature_ref.at[row]), plt.load(top_k_ref.at[row])
    draw = _Draw(
        logits=logits,
        key=(plt.load(keys_ref.at[2 * row]), plt.load(keys_ref.at[2 * row + 1])),
        temperature=temperature,
        top_k=top_k,
        top_p=plt.load(top_p_ref.at[row]),
        min_p=jnp.minimum(plt.load(min_p_ref.at[row]), 1.0),
        tiles=tiles,
    )
    is_greedy = temperature <= GREEDY_TEMPERATURE
    few = jnp.logical_not(is_greedy) & (top_k > 0) & (top_k <= min(MAX_PICKS, problem.vocab_size - 1))

    def ranked() -> jax.Array:
        x, ids = _lane_maxima(logits, tiles.read)
        return lax.cond(few, lambda: draw.of_the_likeliest(x, ids), lambda: _first_best(x, ids)[1])

    token = lax.cond(is_greedy | few, ranked, draw.by_rejection)
    plt.store(out_ref.at[row], jnp.minimum(token, problem.vocab_size - 1))


def _lane_maxima(logits: Row, halves: int) -> tuple[jax.Array, jax.Array]:
    """The largest logit of every lane, and the lowest id that has it."""

    def body(tile: jax.Array, ids: jax.Array, x0: jax.Array, x1: jax.Array, state: _State) -> _State:
        del tile
        return larger(ids, x0, x1, state)

    lanes = HALF * halves
    result: tuple[jax.Array, jax.Array] = logits.sweep(
        halves, body, (jnp.full((lanes,), -_INF, jnp.float32), jnp.arange(lanes, dtype=jnp.int32))
    )
    return result


def larger(ids: jax.Array, x0: jax.Array, x1: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Largest logit and its id of every lane, after one more tile."""
    x, best = state
    for some, other in ((ids, x0), (ids + HALF, x1)):  # in the order of ids: a tie leaves the lower one
        x, best = jnp.where(other > x, other, x), jnp.where(other > x, some, best)
    return x, best


def pick_largest(logits: Row, halves: int, count: jax.Array | int, width: int, x: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The `count` largest logits and their ids in vectors of `width`, from the largest of every lane; lowest ids first among ties."""
    slot = jnp.arange(width, dtype=jnp.int32)
    lane = jnp.arange(HALF * halves, dtype=jnp.int32)

    def pick(i: jax.Array, carry: _State) -> _State:
        picked_x, picked, x, ids = carry
        best = _first_best(x, ids)
        picked_x, picked = jnp.where(slot == i, best[0], picked_x), jnp.where(slot == i, best[1], picked)
        its_lane = _lane_of(best[1], halves)
        _, id0 = logits.lane_ids(its_lane, halves)
        rest = []
        for some in (id0, id0 + HALF):
            their_x = logits.read(some)
            after = (some < logits.problem.vocab_size) & _above(jnp.broadcast_to(best[0], some.shape), best[1], (their_x, some))
            rest.append(_first_best(jnp.where(after, their_x, -_INF), jnp.where(after, some, _NO_ID)))
        new_x, new_id = _better_of(*rest)
        at = lane == its_lane
        return picked_x, picked, jnp.where(at, new_x, x), jnp.where(at, new_id, ids)

    nothing = jnp.full((width,), -_INF, jnp.float32), jnp.zeros((width,), jnp.int32)
    picked: tuple[jax.Array, jax.Array] = lax.fori_loop(0, count, pick, (*nothing, x, ids))[:2]
    return picked


def _better_of(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    use = _above(*other, one)
    return jnp.where(use, other[0], one[0]), jnp.where(use, other[1], one[1])


class _Draw(NamedTuple):
    logits: Row
    key: tuple[jax.Array, jax.Array]
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    tiles: Tiles

    def weight(self, x: jax.Array, most: jax.Array) -> jax.Array:
        """Probability relative to the likeliest."""
        return jnp.exp2((x - most) * (_LOG2E / self.temperature))

    def bits(self, chunk: jax.Array, lane: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Bits of the ids ``1024 * chunk + lane`` and of those 512 further."""
        return threefry2x32(*self.key, chunk.astype(jnp.uint32), lane.astype(jnp.uint32))

    def noise(self, chunk: jax.Array, lane: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Noise of the same ids."""
        first, second = self.bits(chunk, lane)
        return gumbel_of_bits(first), gumbel_of_bits(second)

    def of_the_likeliest(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        """The draw from the `top_k` likeliest, at most ``MAX_PICKS``; from the largest logits of the lanes."""
        slot = jnp.arange(MAX_PICKS, dtype=jnp.int32)
        picked_x, picked = pick_largest(self.logits, self.tiles.read, self.top_k, MAX_PICKS, x, ids)
        most = _finite(jnp.max(picked_x))
        weights = self.weight(picked_x, most)
        before = jnp.cumsum(weights) - weights
        keep = (before < self.top_p * jnp.sum(weights)) | (self.top_p >= 1.0)
        keep = (keep & (weights >= self.min_p)) | (slot == 0)
        first, second = self.noise(picked >> 10, picked & (HALF - 1))
        noise = jnp.where(picked & HALF > 0, second, first)
        value = jnp.where(keep & (slot < self.top_k), (picked_x - most) / self.temperature + noise, -_INF)
        return _first_best(value, picked)[1]

    def by_rejection(self) -> jax.Array:
        """The draw under any filters."""
        tiles, vocab = self.tiles, self.logits.problem.vocab_size
        k_on = (self.top_k > 0) & (self.top_k < vocab)
        p_on = self.top_p < 1.0
        lane = jnp.arange(HALF * tiles.noise, dtype=jnp.int32)
        x, noise, ids, lane_most = self._best_of_lanes()
        most = _finite(jnp.max(lane_most))
        top_k_mass = lax.cond(k_on & p_on, lambda: self._mass_of_the_likeliest(most), lambda: most)  # branches return no constants

        def accepts(candidate: tuple[jax.Array, jax.Array]) -> jax.Array:
            before, mass, whole = self._before(candidate, most)
            whole = jnp.where(k_on, top_k_mass, whole)
            in_k = jnp.logical_not(k_on) | (before < self.top_k)
            in_p = jnp.logical_not(p_on) | (mass < self.top_p * whole)
            return (in_k & in_p) | (before == 0)

        def step(carry: _State) -> _State:
            _, _, tried, bound_x, bound_id, value, ids = carry
            best, token = _first_best(value, ids)
            candidate = self.logits.read(token), token
            allowed = _above(*candidate, (bound_x, bound_id)) & (self.weight(candidate[0], most) >= self.min_p)
            done = lax.cond(allowed & (k_on | p_on), lambda: accepts(candidate), lambda: allowed)
            done |= best == -_INF
            rejected = allowed & jnp.logical_not(done)
            bound = jnp.where(rejected, candidate[0], bound_x), jnp.where(rejected, token, bound_id)

            def again() -> _State:
                return lax.cond(tried < _MAX_LANES_TRIED, one_lane, lambda: self._best_of_lanes_above(bound, most))

            def one_lane() -> _State:
                its_lane = _lane_of(token, tiles.noise)
                new = self._best_of_lane(its_lane, bound, most)
                return tuple(jnp.where(lane == its_lane, new, old) for new, old in zip(new, (value, ids), strict=True))

            value, ids = lax.cond(done, lambda: (value, ids), again)
            tried = jnp.where(tried < _MAX_LANES_TRIED, tried + 1, 0)
            return done, token, tried, *bound, value, ids

        init = (
            jnp.bool_(False),
            jnp.int32(0),
            jnp.int32(0),
            jnp.float32(-_INF),  # nothing is at or below the bound
            jnp.int32(_NO_ID),
            self._value(x, noise, most),
            ids,
        )

        # A while loop makes Triton's layout pass read memory that it has freed (jaxlib 0.11.2): loops that are counted, and of which the
        # inner has no steps once a token is found.
        def steps(_: jax.Array, carry: _State) -> _State:
            return lax.fori_loop(0, jnp.where(carry[0], jnp.int32(0), jnp.int32(_MAX_LANES_TRIED + 1)), lambda _, c: one_step(c), carry)

        def one_step(carry: _State) -> _State:
            return lax.cond(carry[0], lambda: carry, lambda: step(carry))

        token: jax.Array = lax.fori_loop(0, _MAX_ROUNDS, steps, init)[1]
        return token

    def _value(self, x: jax.Array, noise: jax.Array, most: jax.Array) -> jax.Array:
        return (x - most) / self.temperature + noise

    def _best_of_lanes(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Logit, noise and id of every lane's largest sum of the two, and its largest logit."""

        def body(tile: jax.Array, ids: jax.Array, x0: jax.Array, x1: jax.Array, state: _State) -> _State:
            *best, most = state
            return *self._better(tile, ids, x0, x1, tuple(best)), jnp.maximum(most, jnp.maximum(x0, x1))

        lanes = HALF * self.tiles.noise
        x, wait, ids, most = self.logits.sweep(self.tiles.noise, body, (*_no_best(lanes), jnp.full((lanes,), -_INF, jnp.float32)))
        return x, -jnp.log(wait), ids, most

    def _best_of_lanes_above(self, bound: tuple[jax.Array, jax.Array], most: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Largest sum of logit and noise of every lane and its id, of the ids above `bound` that min-p keeps."""

        def body(tile: jax.Array, ids: jax.Array, x0: jax.Array, x1: jax.Array, state: _State) -> _State:
            x0, x1 = (self._allowed(x, i, bound, most) for x, i in ((x0, ids), (x1, ids + HALF)))
            some = jnp.max(jnp.maximum(x0, x1)) > -_INF
            return lax.cond(some, lambda: self._better(tile, ids, x0, x1, state), lambda: state)

        lanes = HALF * self.tiles.noise
        x, wait, ids = self.logits.sweep(self.tiles.noise, body, _no_best(lanes))
        return self._value(x, -jnp.log(wait), most), ids

    def _allowed(self, x: jax.Array, ids: jax.Array, bound: tuple[jax.Array, jax.Array], most: jax.Array) -> jax.Array:
        return jnp.where(_above(x, ids, bound) & (self.weight(x, most) >= self.min_p), x, -_INF)

    def _better(self, tile: jax.Array, ids: jax.Array, x0: jax.Array, x1: jax.Array, state: _State) -> _State:
        """The best of every lane after one more tile: logit, exponential and id.

        Gumbel noise is minus the logarithm of an exponential, and a race of exponentials has the same winner as a sum with it: that takes
        one logarithm an id, where two would be a third of the sweep.
        """
        lane = jnp.arange(HALF * self.tiles.noise, dtype=jnp.int32)
        bits = self.bits(tile * self.tiles.noise + (lane >> 9), lane & (HALF - 1))
        best_x, best_wait, best = state
        for x, wait, some in ((x0, exponential_of_bits(bits[0]), ids), (x1, exponential_of_bits(bits[1]), ids + HALF)):
            # Differences, so that the largest logit need not be known. Minus infinity beside itself is no number, and not better.
            better = wait * jnp.exp2((best_x - x) * (_LOG2E / self.temperature)) < best_wait
            best_x, best_wait, best = jnp.where(better, x, best_x), jnp.where(better, wait, best_wait), jnp.where(better, some, best)
        return best_x, best_wait, best

    def _best_of_lane(self, lane: jax.Array, bound: tuple[jax.Array, jax.Array], most: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As `_best_of_lanes_above`, for one lane."""
        chunk, id0 = self.logits.lane_ids(lane, self.tiles.noise)
        noise = self.noise(chunk, jnp.broadcast_to(lane & (HALF - 1), chunk.shape))
        best = []
        for ids, more in zip((id0, id0 + HALF), noise, strict=True):
            x = self._allowed(self.logits.read(ids), ids, bound, most)
            best.append(_first_best(self._value(x, more, most), ids))
        return _better_of(*best)

    def _before(self, candidate: tuple[jax.Array, jax.Array], most: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Number and mass of the ids before a candidate, and the mass of all."""

        def body(tile: jax.Array, ids: jax.Array, x0: jax.Array, x1: jax.Array, state: _State) -> _State:
            del tile
            count, mass, whole = state
            for x, some in ((x0, ids), (x1, ids + HALF)):
                above, weight = _above(x, some, candidate), self.weight(x, most)
                count, mass, whole = count + above.astype(jnp.int32), mass + jnp.where(above, weight, 0.0), whole + weight
            return count, mass, whole

        zeros = jnp.zeros((HALF * self.tiles.read,), jnp.float32)
        count, mass, whole = self.logits.sweep(self.tiles.read, body, (zeros.astype(jnp.int32), zeros, zeros))
        return jnp.sum(count), jnp.sum(mass), jnp.sum(whole)

    def _mass_of_the_likeliest(self, most: jax.Array) -> jax.Array:
        """Mass of the `top_k` likeliest: the k-th largest logit, bit by bit from the highest, then a sum."""
        halves = self.tiles.read
        zeros = jnp.zeros((HALF * halves,), jnp.int32)

        def some_bits(i: jax.Array, least: jax.Array) -> jax.Array:
            shift = (32 - _BITS - _BITS * i).astype(jnp.uint32)
            tried = [least | (jnp.uint32(n) << shift) for n in range(1, 1 << _BITS)]

            def body(tile: jax.Array, ids: jax.Array, x0: jax.Array, x1: jax.Array, counts: _State) -> _State:
                del tile, ids
                for x in (x0, x1):
                    image = _ordered(x)
                    counts = tuple(count + (image >= bound).astype(jnp.int32) for count, bound in zip(counts, tried, strict=True))
                return counts

            counts = self.logits.sweep(halves, body, (zeros,) * len(tried))
            for bound, count in zip(tried, counts, strict=True):
                least = jnp.where(jnp.sum(count) >= self.top_k, bound, least)
            return least

        least = lax.fori_loop(0, 32 // _BITS, some_bits, jnp.uint32(0))

        def body(tile: jax.Array, ids: jax.Array, x0: jax.Array, x1: jax.Array, state: _State) -> _State:
            del tile, ids
            count, mass, kth = state
            for x in (x0, x1):
                image = _ordered(x)
                more = image > least
                count, mass = count + more.astype(jnp.int32), mass + jnp.where(more, self.weight(x, most), 0.0)
                kth = jnp.maximum(kth, jnp.where(more, -_INF, x))
            return count, mass, kth

        none = zeros.astype(jnp.float32)
        count, mass, kth = self.logits.sweep(halves, body, (zeros, none, none - _INF))
        return jnp.sum(mass) + (self.top_k - jnp.sum(count)).astype(jnp.float32) * self.weight(jnp.max(kth), most)


def _no_best(lanes: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.full((lanes,), -_INF, jnp.float32), jnp.ones((lanes,), jnp.float32), jnp.arange(lanes, dtype=jnp.int32)


def _finite(most: jax.Array) -> jax.Array:
    """The largest logit, or 0 where subtracting it would leave no number."""
    return jnp.where(jnp.abs(most) < _INF, most, 0.0)


def _ordered(x: jax.Array) -> jax.Array:
    """u32 in the order of floats without NaN."""
    bits = lax.bitcast_convert_type(x + 0.0, jnp.uint32)  # -0 becomes 0
    return jnp.where(x < 0, ~bits, bits | jnp.uint32(0x80000000))
