"""How do I run many prompts at once, each with its own sampling?

Prompts of different lengths run side by side in one batch. A request never sees its neighbours: in float32, with a seed of its
own, it gives the same answer alone. In bfloat16 that holds up to rounding: XLA may sum in another order for another batch size,
and where two tokens are almost equally likely, the other one may win.

    python examples/batch.py
"""

import argparse
from collections.abc import Sequence

from pagedjax import LLM, SamplingParams
from pagedjax.cli.loading import resolve_model

PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time, in a small house at the edge of the forest, there lived")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="a Hugging Face folder, a GGUF file or a hub id; by default the demo model (93 MB, downloaded once)"
    )
    parser.add_argument("--max-tokens", type=int, default=24)
    options = parser.parse_args(arguments)

    # float32 for the comparison with "alone" below; bfloat16 is the checkpoint's own and takes half the memory.
    llm = LLM(resolve_model(options.model), dtype="float32")
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=options.max_tokens),
        SamplingParams(temperature=0.6, top_p=0.95, seed=7, max_tokens=options.max_tokens),
        SamplingParams(temperature=0.9, top_k=40, seed=8, max_tokens=options.max_tokens, logprobs=2),
    ]
    together = llm.generate(PROMPTS, sampling)
    for result in together:
        answer = result.outputs[0]
        likelihood = "" if answer.cumulative_logprob is None else f", log-probability {answer.cumulative_logprob:.1f}"
        print(f"{result.prompt!r} -> {answer.text!r} ({answer.finish_reason}{likelihood})")

    alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt, params in zip(PROMPTS, sampling, strict=True)]
    same = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(together, alone, strict=True)]
    print(f"{sum(same)} of {len(same)} answers are the same alone")


if __name__ == "__main__":
    main()
