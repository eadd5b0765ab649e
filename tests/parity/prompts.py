"""The prompts that the comparisons with transformers continue, and the texts on which the tokenizers must agree."""

from typing import Any

NUM_NEW_TOKENS = 64

TEXTS = (
    "The capital of France is",
    "In 1969, Apollo 11 carried three astronauts to the Moon. Their names were",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
)
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Name a large animal."},
        {"role": "assistant", "content": "The blue whale is the largest animal on Earth."},
        {"role": "user", "content": "And where does it live?"},
    ],
)

# Digits, runs of white space, contractions, scripts, emoji built of several code points, and special tokens inside the text.
# No numerals outside ASCII: transformers builds a GPT-2 tokenizer from any GGUF of that kind and does not know that this
# model splits digits off first, which for ASCII digits comes to the same.
TOKENIZER_TEXTS = (
    *TEXTS,
    "a",
    " a  b   c\t\td\n\n\ne \n f ",
    "1234567890 3.14159 1,000,000 v2.0",
    "I'm, you're, he's, WE'LL, they'd, I've, don't",
    "naïve café Ærøskøbing Straße İstanbul ﬁancé",
    "日本語のテキスト 한국어 中文，标点。 ไทย हिन्दी العربية עברית",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽 e\u0301 \u200b \ufeff x",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "https://example.com/a?b=c&d=%20#e <html>&amp;</html> snake_case camelCase --flag=1",
    "x" * 70 + "!" * 40 + " " * 30 + "end",
)


def prompt_ids(tokenizer: Any) -> list[list[int]]:
    """Token ids of `TEXTS` and then `CHATS` by a tokenizer of transformers."""
    texts = [tokenizer(text)["input_ids"] for text in TEXTS]
    chats = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in CHATS]
    return texts + [tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats]
