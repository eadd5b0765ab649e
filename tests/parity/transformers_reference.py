"""What we compare with: a Llama of transformers on torch, CPU, behind functions that take and give NumPy.

The only module of the tests that imports torch, so that the others can be collected without it.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import torch
import transformers


@dataclasses.dataclass(frozen=True)
class Reference:
    """A transformers model, and its tokenizer where it has one."""

    model: Any
    tokenizer: Any

    def logits(self, ids: list[int]) -> np.ndarray:
        """Logits f32[S, V] of the whole sequence in one pass."""
        with torch.inference_mode():
            return self.model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()

    def greedy(self, ids: list[int], num_new: int) -> tuple[list[int], np.ndarray]:
        """`num_new` greedy tokens by transformers' own ``generate``, end tokens ignored, and the logits f32[num_new, V] behind them."""
        out = self.generate([ids], num_new, output_logits=True, return_dict_in_generate=True)
        return out.sequences[0, len(ids) :].tolist(), torch.cat(out.logits).float().numpy()

    def generate(self, prompts: list[list[int]], num_new: int, stopping: Any = None, **outputs: Any) -> Any:
        """transformers' ``generate`` on prompts of one length, greedy, exactly `num_new` tokens each.

        Args:
          prompts: token ids.
          num_new: how many tokens to add to each.
          stopping: a `transformers.StoppingCriteriaList`, which sees every step.
          **outputs: fields of `transformers.GenerationConfig` that say what to return.
        """
        batch = torch.tensor(prompts)
        config = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=num_new, eos_token_id=None, pad_token_id=0, bos_token_id=None, use_cache=True, **outputs
        )
        with torch.inference_mode():
            out = self.model.generate(batch, attention_mask=torch.ones_like(batch), generation_config=config, stopping_criteria=stopping)
        sequences = out.sequences if outputs.get("return_dict_in_generate") else out
        assert sequences.shape[1] == batch.shape[1] + num_new, f"transformers stopped after {sequences.shape[1] - batch.shape[1]} tokens"
        return out


def load_gguf(path: pathlib.Path, *, round_to_bfloat16: bool, attention: str = "eager") -> Reference:
    """A GGUF through transformers' own reader, in float32.

    Args:
      path: of the file.
      round_to_bfloat16: round every weight to bfloat16 and back. Buffers stay: the model computes its rotary frequencies in float32
        whatever the dtype of its weights, so ``model.to(bfloat16)`` would be another model.
      attention: transformers' name of an implementation.
    """
    transformers.utils.logging.disable_progress_bar()
    folder, name = str(path.parent), path.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, attn_implementation=attention, dtype=torch.float32)
    if round_to_bfloat16:
        for weight in model.parameters():
            weight.data = weight.data.bfloat16().float()
    # Its settings fill in for every `None` of the configuration that `generate` is given, the end token's among them.
    model.generation_config = transformers.GenerationConfig()
    return Reference(model.eval(), tokenizer)


def random_llama(config: dict[str, Any], seed: int = 0) -> Reference:
    """A random Llama in float32 whose logits differ clearly, norms and biases included.

    Args:
      config: arguments of `transformers.LlamaConfig`.
      seed: of the weights.
    """
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, attn_implementation="eager"))
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim > 1:
            weight.data = noise * weight.shape[-1] ** -0.5
        else:
            weight.data = noise / 4 + (1 if "norm" in name else 0)
    return Reference(model.float().eval(), None)


def load_folder(path: pathlib.Path) -> Reference:
    """A folder in Hugging Face's layout, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(str(path), attn_implementation="eager", dtype=torch.float32)
    return Reference(model.eval(), None)


def save(reference: Reference, path: pathlib.Path, *, dtype: str = "float32", max_shard_size: str = "5GB") -> None:
    """``save_pretrained`` in `dtype`; shards are cut at `max_shard_size`. The model itself is changed to `dtype`."""
    reference.model.to(getattr(torch, dtype)).save_pretrained(str(path), max_shard_size=max_shard_size)
