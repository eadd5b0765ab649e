"""What does a long system prompt cost, asked about again and again? Once, with the prefix cache: its blocks are shared.

Each question follows the same system prompt. Without the cache every request computes all of it; with it, the first one does (cold) and
the others find its full blocks in the pool (hot), so that their first token comes sooner. The answers are the same.

    python examples/prefix_sharing.py
"""

import argparse
import statistics
from collections.abc import Sequence

from pagedjax.allocator import blocks_for
from pagedjax.checkpoint import open_checkpoint
from pagedjax.cli.loading import resolve_model
from pagedjax.engine import Engine, RequestResult
from pagedjax.engine_config import EngineConfig
from pagedjax.load import eos_token_ids, load_config, load_params
from pagedjax.request import SamplingParams
from pagedjax.text import Tokenizer

FACTS = """\
The library opens at nine in the morning.
It is closed on Mondays.
A card costs two coins a year.
You may borrow five books at a time.
A book may be kept for three weeks.
Films may be kept for one week.
A late book costs one coin a day.
A lost card is replaced for four coins.
The reading room is on the second floor.
The children's corner is beside the entrance.
Maps and old newspapers are kept in the cellar.
The cellar may be visited with a guide only.
Guided tours start every Friday at noon.
The chess club meets on Wednesday evenings.
There is a story hour on Saturday mornings.
Bags are left in the lockers by the door.
The lockers take a coin and give it back.
Coffee is served on the terrace in summer.
Dogs wait outside, in the shade of the oak.
The copying machine stands next to the stairs.
Six computers may be used for an hour each.
The old harbour map may not be photographed.
Books in other languages are on the first floor.
The library was founded by a captain in 1874.
It burned down once and was built up again in brick.
The tower has a bell that is rung at closing time.
""".splitlines()
QUESTIONS = ("When does the library open?", "On which day is it closed?", "What does a card cost?", "How many books may I borrow?")
BLOCK_SIZE = 16  # tokens a block; only full blocks are shared


def encode(tokenizer: Tokenizer, facts: Sequence[str], question: str) -> list[int]:
    """The prompt: system prompt first, so that all prompts start alike, and the question behind it."""
    system = " ".join(["You are a librarian.", *facts])
    if tokenizer.chat_template is None:
        return tokenizer.encode(f"{system}\n\nQuestion: {question}\nAnswer:")
    return tokenizer.encode_chat([{"role": "system", "content": system}, {"role": "user", "content": question}])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="a Hugging Face folder, a GGUF file or a hub id; by default the demo model (93 MB, downloaded once)"
    )
    parser.add_argument("--max-tokens", type=int, default=24)
    options = parser.parse_args(arguments)
    greedy = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)

    with open_checkpoint(resolve_model(options.model)) as checkpoint:
        # float32 for the comparison of the answers below: in bfloat16 a prompt computed in one piece rounds otherwise than one in two.
        config = load_config(checkpoint, dtype="float32")
        tokenizer = checkpoint.tokenizer()
        end_ids = eos_token_ids(checkpoint)
        params = load_params(checkpoint, config)

    # As many of the facts as the model has room for.
    for num_facts in range(len(FACTS), 0, -1):
        prompts = [encode(tokenizer, FACTS[:num_facts], question) for question in QUESTIONS]
        longest = max(map(len, prompts))
        if longest + options.max_tokens <= config.max_model_len:
            break
    else:
        parser.error(f"--max-tokens is {options.max_tokens}; the model has room for {config.max_model_len} tokens in all")

    def engine(prefix_caching: bool) -> Engine:
        max_model_len = longest + options.max_tokens
        num_blocks = blocks_for(max_model_len, BLOCK_SIZE)
        settings = EngineConfig(
            max_num_seqs=1,  # one after the other: the times are then those of one request
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            num_kv_blocks=num_blocks * len(prompts),
            enable_prefix_caching=prefix_caching,
            # Steps are compiled for these sizes: a whole prompt in one step, or the little that is left behind the shared blocks.
            token_budget=longest,
            token_buckets=(2 * BLOCK_SIZE,),
            width_buckets=(num_blocks,),
        )
        made = Engine(params, config, settings, eos_token_ids=end_ids)
        made.warmup()
        return made

    def ask(engine: Engine) -> list[RequestResult]:
        return [engine.generate([prompt], greedy, use_tqdm=False)[0] for prompt in prompts]

    off = ask(engine(prefix_caching=False))
    cached = engine(prefix_caching=True)
    on = [ask(cached), ask(cached)]

    print(f"{'':36}first token after   prompt from the cache")
    for title, results in (("cache off", off), ("cache on", on[0]), ("cache on, asked again", on[1])):
        print(title)
        for question, result in zip(QUESTIONS, results, strict=True):
            print(f"  {question:34}{ms(result):14.1f} ms   {result.num_cached_tokens:4} of {len(result.prompt_token_ids)} tokens")
    print()
    for question, result in zip(QUESTIONS, on[0], strict=True):
        print(f"{question} {tokenizer.decode(result.token_ids).strip()}")

    cold, hot = (statistics.median(map(ms, results)) for results in ([*off, on[0][0]], [*on[0][1:], *on[1]]))
    print(f"\nfirst token after {cold:.1f} ms cold and {hot:.1f} ms hot (medians): {cold / hot:.1f} times sooner")
    same = [a.token_ids == b.token_ids for results in on for a, b in zip(off, results, strict=True)]
    print(f"{sum(same)} of {len(same)} answers are the same as with the cache off")


def ms(result: RequestResult) -> float:
    assert result.prefill_s is not None, result.error
    return 1000 * result.prefill_s


if __name__ == "__main__":
    main()
