"""One server of the tiny model for all tests, and OpenAI's clients to it."""

import openai
import pytest

from pagedjax import LLM, SamplingParams
from tests.server.running import SMALL, running
from tests.tiny_model import write_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="session")
def server(folder):
    with running(folder) as one:
        yield one
        one.wait_idle()


@pytest.fixture(scope="session")
def offline(folder):
    """What the model answers without a server: ``offline(prompt, max_tokens=..., ...)`` gives the `CompletionOutput`s."""
    llm = LLM(folder, engine_config=SMALL)

    def answers(prompt, **settings):
        params = SamplingParams(**{"temperature": 0.0, **settings})
        if isinstance(prompt, list) and isinstance(prompt[0], dict):
            return llm.chat(prompt, params, use_tqdm=False)[0]
        given = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
        return llm.generate(given, params, use_tqdm=False)[0]

    return answers


@pytest.fixture(scope="session")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as one:
        yield one
