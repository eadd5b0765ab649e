"""Text to token ids and back: tokenizers, incremental decoding and chat templates. Host only; no JAX.

`Tokenizer` is built from a Hugging Face folder or from a GGUF file's metadata. The README beside this file says what is
followed where the two disagree.
"""

from pagedjax.text.chat_template import Message
from pagedjax.text.stop import AnswerText
from pagedjax.text.stream import TextStream
from pagedjax.text.tokenizer import Tokenizer

__all__ = ["AnswerText", "Message", "TextStream", "Tokenizer"]
