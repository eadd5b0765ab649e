"""How do I complete a text?

python examples/generate.py
python examples/generate.py --model path/to/model --prompt "Once upon a time"
"""

import argparse
from collections.abc import Sequence

from pagedjax import LLM, SamplingParams
from pagedjax.cli.loading import resolve_model


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="a Hugging Face folder, a GGUF file or a hub id; by default the demo model (93 MB, downloaded once)"
    )
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args(arguments)

    llm = LLM(resolve_model(options.model))
    greedy = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)

    # One prompt, one result; a result holds the prompt, its token ids and the answers.
    (result,) = llm.generate(options.prompt, greedy)
    answer = result.outputs[0]
    print(options.prompt + answer.text)
    print(f"({len(result.prompt_token_ids)} tokens in, {len(answer.token_ids)} out, finish reason {answer.finish_reason})")

    # A conversation goes through the model's chat template. `stream_chat` yields text as it comes; `chat` waits for all of it.
    if llm.tokenizer.chat_template is not None:
        for piece in llm.stream_chat([{"role": "user", "content": "What is the capital of France?"}], greedy):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
