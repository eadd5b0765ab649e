"""A stream's pieces joined are the whole answer, whatever the tokens cut: characters, and stop strings. Sync and async clients."""

import asyncio

import openai
import pytest

from tests.server.running import running
from tests.tiny_model import write_model

# Bytes of this text are the tiny model's tokens: one to four of them a character.
TEXT = "n日 né"


@pytest.fixture(scope="module")
def parrot(tmp_path_factory):
    """A server whose answers are made of whole and broken characters: hot sampling over the bytes of `TEXT`."""
    with running(write_model(tmp_path_factory.mktemp("parrot") / "m", seed=1)) as one:
        yield one
        one.wait_idle()


def allowed(server):
    return sorted(set(server.llm.tokenizer.encode(TEXT)))


def settings(server, seed, stop):
    extra = {"allowed_token_ids": allowed(server), "ignore_eos": True}
    return dict(model="tiny", seed=seed, temperature=3.0, max_tokens=60, stop=stop, extra_body=extra)


@pytest.mark.parametrize("stop", [None, ["é", "日"], ["n n"], [" n", "nn"]], ids=["none", "characters", "longer", "short"])
@pytest.mark.parametrize("seed", range(4))
def test_completions(parrot, seed, stop):
    with openai.OpenAI(base_url=f"{parrot.url}/v1", api_key="x", max_retries=0) as client:
        options = settings(parrot, seed, stop)
        whole = client.completions.create(prompt=TEXT, **options).choices[0]
        pieces = [c.choices[0] for c in client.completions.create(prompt=TEXT, stream=True, **options)]
        assert "".join(one.text for one in pieces) == whole.text
        assert pieces[-1].finish_reason == whole.finish_reason and pieces[-1].stop_reason == whole.stop_reason
        assert not stop or not any(one in whole.text for one in stop)
        included = client.completions.create(
            prompt=TEXT, **{**options, "extra_body": {**options["extra_body"], "include_stop_str_in_output": True}}
        )
        assert included.choices[0].text == whole.text + (whole.stop_reason or "")


def test_what_the_cases_are_about_occurs(parrot):
    """Else the test above would prove nothing: stops are found, and characters are cut."""
    with openai.OpenAI(base_url=f"{parrot.url}/v1", api_key="x", max_retries=0) as client:
        for stop in (["é", "日"], ["n n"], [" n", "nn"]):
            answers = [client.completions.create(prompt=TEXT, **settings(parrot, seed, stop)).choices[0] for seed in range(4)]
            assert "stop" in {one.finish_reason for one in answers}, stop
            assert len({one.text for one in answers}) > 1
        forced = settings(parrot, 0, None) | {"max_tokens": 9}
        # Only the three bytes of one character: most triples are broken, some are whole.
        forced["extra_body"] = {"allowed_token_ids": parrot.llm.tokenizer.encode("日"), "ignore_eos": True}
        text = client.completions.create(prompt=TEXT, **(forced | {"max_tokens": 200})).choices[0].text
        assert "日" in text and "\N{REPLACEMENT CHARACTER}" in text
        pieces = [c.choices[0].text for c in client.completions.create(prompt=TEXT, stream=True, **(forced | {"max_tokens": 200}))]
        assert "".join(pieces) == text


def test_async_clients_chat_side_by_side(parrot):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{parrot.url}/v1", api_key="x", max_retries=0) as client:

            async def both(seed):
                options = settings(parrot, seed, [" n"]) | {"messages": [{"role": "user", "content": TEXT}]}
                whole = (await client.chat.completions.create(**options)).choices[0]
                pieces, reason = [], None
                async for chunk in await client.chat.completions.create(stream=True, **options):
                    pieces.append(chunk.choices[0].delta.content or "")
                    assert reason is None
                    reason = chunk.choices[0].finish_reason
                assert "".join(pieces) == whole.message.content and reason == whole.finish_reason
                return whole.message.content

            texts = await asyncio.gather(*(both(seed) for seed in range(8)))
            assert len(set(texts)) == 8
            models = await client.models.list()
            assert [one.id for one in models.data] == ["tiny", "org/tiny"]
            completion = await client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=3)
            assert len(completion.choices) == 2

    asyncio.run(asyncio.wait_for(run(), 120))
