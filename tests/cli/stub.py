"""A stand-in for `LLM` that answers from a script, so that the commands are tested without a model."""

import inspect
import os
import signal
from typing import ClassVar

from pagedjax.llm import LLM
from pagedjax.request import CompletionOutput, RequestOutput


class StubTokenizer:
    chat_template = "{{ messages }}"

    def apply_chat_template(self, messages):
        return str(messages)


class StubLLM:
    """Set the class attributes for a test; each instance and call is recorded on the class."""

    pieces = ("Par", "is", ".")
    error: Exception | None = None
    load_error: BaseException | None = None
    tokenizer = StubTokenizer()
    interrupt_after: int | None = None  # send ourselves a Ctrl-C before the piece of this number
    interrupts = 1
    made: ClassVar[dict] = {}
    calls: ClassVar[list] = []
    closed_early = False

    def __init__(self, model, **options):
        inspect.signature(LLM.__init__).bind(self, model, **options)  # the real one would take this call
        type(self).made = {"model": model, **options}
        options["progress"](1, 2)
        options["progress"](2, 2)
        if self.load_error is not None:
            raise self.load_error

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True):
        self.calls.append((prompts, sampling_params, use_tqdm))
        if self.error is not None:
            raise self.error
        ids = list(range(5, 5 + len(self.pieces)))
        completion = CompletionOutput(0, "".join(self.pieces), ids, None, None, "stop")
        return [RequestOutput("0", prompt, [1, 2, 3], [completion], metrics={"prefill_s": 0.5, "decode_s": 0.25}) for prompt in prompts]

    def stream_chat(self, messages, sampling_params=None, **template_args):
        self.calls.append(([dict(m) for m in messages], sampling_params))
        if self.error is not None:
            raise self.error
        return self._stream()

    def _stream(self):
        finished = False
        try:
            for number, piece in enumerate(self.pieces):
                if number == self.interrupt_after:
                    for _ in range(self.interrupts):
                        os.kill(os.getpid(), signal.SIGINT)
                yield piece
            finished = True
        finally:
            type(self).closed_early = not finished
