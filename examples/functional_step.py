"""What happens in one step? The model is a pure function, and you can call it with a block table made by hand.

There is no engine here and no allocator: we decide which physical blocks hold the sequence, write the table, and call
`forward(params, cache, inputs, config)` once for the prompt and once for each new token.

    python examples/functional_step.py
"""

import argparse
from collections.abc import Sequence

import jax
import numpy as np

from pagedjax import StepInputs, forward, make_cache
from pagedjax.checkpoint import open_checkpoint
from pagedjax.cli.loading import resolve_model
from pagedjax.load import load_config, load_params

BLOCK_SIZE = 16  # tokens a block
BLOCKS = [5, 2, 7, 3]  # physical blocks in the order of the sequence: any order, any blocks but 0, the null block


def slots(positions: np.ndarray) -> np.ndarray:
    """The cell of the pool in which each position's key and value live: the block table does the looking up."""
    return np.array(BLOCKS, np.int32)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE


def prompt_inputs(token_ids: Sequence[int]) -> StepInputs:
    """A step of one row that brings the whole prompt: T = len(token_ids), C = 1, and no decode rows (B = 0)."""
    num_tokens = len(token_ids)
    positions = np.arange(num_tokens, dtype=np.int32)
    return StepInputs(
        token_ids=np.array(token_ids, np.int32),
        positions=positions,
        slot_mapping=slots(positions),
        decode_block_tables=np.zeros((0, len(BLOCKS)), np.int32),
        decode_context_lens=np.zeros(0, np.int32),
        prefill_block_tables=np.array([BLOCKS], np.int32),
        prefill_query_start_loc=np.array([0, num_tokens], np.int32),
        prefill_context_lens=np.array([num_tokens], np.int32),
        logit_ids=np.array([num_tokens - 1], np.int32),  # logits only where the next token is wanted
        state_ids=np.zeros(1, np.int32),
    )


def token_inputs(token_id: int, position: int) -> StepInputs:
    """A step of one decode row: B = 1 and no prefill tokens."""
    positions = np.array([position], np.int32)
    return StepInputs(
        token_ids=np.array([token_id], np.int32),
        positions=positions,
        slot_mapping=slots(positions),
        decode_block_tables=np.array([BLOCKS], np.int32),
        decode_context_lens=positions + 1,  # it attends to itself and to everything before it
        prefill_block_tables=np.zeros((0, len(BLOCKS)), np.int32),
        prefill_query_start_loc=np.zeros(1, np.int32),
        prefill_context_lens=np.zeros(0, np.int32),
        logit_ids=np.zeros(1, np.int32),
        state_ids=np.zeros(1, np.int32),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="a Hugging Face folder, a GGUF file or a hub id; by default the demo model (93 MB, downloaded once)"
    )
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--max-tokens", type=int, default=16)
    options = parser.parse_args(arguments)
    if options.max_tokens < 1:
        parser.error(f"--max-tokens is {options.max_tokens}; it must be at least 1")

    with open_checkpoint(resolve_model(options.model)) as checkpoint:
        config = load_config(checkpoint)
        tokenizer = checkpoint.tokenizer()
        params = load_params(checkpoint, config)

    # The cache is donated: XLA writes this step's keys and values in place, and the old value may not be used again.
    step = jax.jit(forward, static_argnames=("config", "mesh"), donate_argnames="cache")
    cache = make_cache(config, num_blocks=max(BLOCKS), block_size=BLOCK_SIZE)

    token_ids = tokenizer.encode(options.prompt)
    if not token_ids:
        parser.error("the prompt is empty; the model needs at least one token to go on from")
    num_new = min(options.max_tokens, len(BLOCKS) * BLOCK_SIZE - len(token_ids))
    if num_new < 1:
        parser.error(f"the prompt has {len(token_ids)} tokens; the blocks hold {len(BLOCKS) * BLOCK_SIZE}, one at least for the answer")
    logits, cache = step(params, cache, prompt_inputs(token_ids), config)  # logits f32[1, V]
    token_ids.append(int(np.argmax(logits[0])))
    for _ in range(num_new - 1):
        logits, cache = step(params, cache, token_inputs(token_ids[-1], len(token_ids) - 1), config)
        token_ids.append(int(np.argmax(logits[0])))

    print(tokenizer.decode(token_ids))
    used = -(-(len(token_ids) - 1) // BLOCK_SIZE)
    print(f"(in physical blocks {BLOCKS[:used]} of a pool {cache.keys[0].shape} a layer)")


if __name__ == "__main__":
    main()
