"""A whole Hugging Face folder that any test can load: a tiny random Llama with a tokenizer that knows every byte and two turn marks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from pagedjax.config import ModelConfig
from pagedjax.params import hf_names

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 257,
}


def write_model(folder: Path, *, seed: int = 0, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write the folder and return it. The weights are spread widely enough for greedy answers to differ between prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    weights = {
        name: rng.normal(1.0 if len(shape) == 1 else 0.0, 0.2, shape).astype(np.float32)
        for name, shape in hf_names(ModelConfig.from_hf(CONFIG)).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257]}))
    _tokenizer().save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": TURN_END}
    if chat_template is not None:
        described["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


def _tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([TURN_START, TURN_END])
    return tokenizer
