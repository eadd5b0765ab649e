"""Make ``tests/golden/smollm2.json`` with transformers: what `make test` compares with where torch is not installed.

    python -m tests.make_goldens

needs the ``parity`` extra and the demo model, which it fetches. Two sets of weights: those of the file, dequantised to
float32, which is what ``LLM(..., dtype="float32")`` runs, and the same rounded to bfloat16 and held in float32.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import torch
import transformers

from pagedjax.checkpoint.demo import demo_model
from tests.parity.prompts import CHATS, NUM_NEW_TOKENS, TEXTS, TOKENIZER_TEXTS, prompt_ids
from tests.parity.transformers_reference import Reference, load_gguf

GOLDEN = pathlib.Path(__file__).parent / "golden" / "smollm2.json"
# Vocabulary ids whose logits are kept for every step: both ends, the end token and some between.
PROBE_IDS = (0, 2, 28, 1000, 12345, 30000, 49151)
# Two float32 implementations may differ by this much in a logit; a smaller margin would leave the next id open.
MIN_MARGIN = 2e-3


def run(reference: Reference, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Continue each prompt and keep ids, margins and a few logits."""
    rows = []
    for prompt in prompts:
        ids, logits = reference.greedy(prompt, NUM_NEW_TOKENS)
        top = np.sort(logits, axis=-1)[:, -2:]
        margins = top[:, 1] - top[:, 0]
        if margins.min() < MIN_MARGIN:
            raise SystemExit(f"a top-2 margin is {margins.min():.2e}, too close to call between two implementations; choose another prompt")
        rows.append(
            {
                "token_ids": ids,
                "text": reference.tokenizer.decode(ids, skip_special_tokens=True),
                "margins": [round(float(m), 5) for m in margins],
                "top_logits": [round(float(t), 5) for t in top[:, 1]],
                "probe_logits": [[round(float(x), 5) for x in step] for step in logits[:, PROBE_IDS]],
            }
        )
    return rows


def main() -> None:
    """Write the file."""
    path = demo_model()
    exact = load_gguf(path, round_to_bfloat16=False)
    tokenizer = exact.tokenizer
    prompts = prompt_ids(tokenizer)
    golden = {
        "made_by": f"python -m tests.make_goldens; transformers {transformers.__version__}, torch {torch.__version__}, "
        "CPU, float32, eager attention",
        "model": path.name,
        "texts": list(TEXTS),
        "chats": list(CHATS),
        "chat_texts": [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in CHATS],
        "prompt_token_ids": prompts,
        "tokenizer": [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in TOKENIZER_TEXTS],
        "probe_ids": list(PROBE_IDS),
        "float32": run(exact, prompts),
        "bfloat16_weights_in_float32": run(load_gguf(path, round_to_bfloat16=True), prompts),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{GOLDEN}: {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
