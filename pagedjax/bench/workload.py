"""What an engine is given to do: prompts of random ids, each with a number of tokens to answer."""

from __future__ import annotations

import dataclasses

import numpy as np

from pagedjax.request import SamplingParams


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompts and how many tokens each answer gets; end tokens are ignored.

    Attributes:
      name: what a table calls it.
      prompts: lists of token ids.
      output_lens: tokens of each answer.
    """

    name: str
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Of all answers."""
        return sum(self.output_lens)

    def sampling_params(self, **settings: object) -> list[SamplingParams]:
        """Greedy unless `settings` say otherwise, and always to the full length."""
        given = {"temperature": 0.0, **settings, "ignore_eos": True}
        return [SamplingParams(max_tokens=n, **given) for n in self.output_lens]  # type: ignore[arg-type]


def uniform(batch: int, prompt_len: int, output_len: int, vocab_size: int, seed: int) -> Workload:
    """`batch` prompts of one length; another `seed` gives other prompts, so that no prefix is found again."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, (batch, prompt_len))
    return Workload(f"{batch} x {prompt_len} + {output_len}", ids.tolist(), [output_len] * batch)


def mixed(vocab_size: int, repeat: int = 0, num_requests: int = 512) -> Workload:
    """Prompts of 32 to 1024 tokens and answers of 32 to 512, each length as likely as any other.

    The lengths are those of ``default_rng(0)`` whatever `repeat` is; with 512 requests: 280,978 tokens in and 141,425 out. The ids come
    from the same generator for repeat 0 and from others after that, so that no prefix is found again.
    """
    rng = np.random.default_rng(0)
    prompt_lens = rng.integers(32, 1025, num_requests)
    output_lens = rng.integers(32, 513, num_requests)
    ids = rng if repeat == 0 else np.random.default_rng((0, repeat))
    return Workload(f"mixed, {num_requests} requests", [ids.integers(0, vocab_size, n).tolist() for n in prompt_lens], output_lens.tolist())
