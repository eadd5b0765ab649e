"""``/v1/completions`` through OpenAI's client."""

import re

import openai
import pytest


def complete(client, prompt, **options):
    return client.completions.create(model="tiny", prompt=prompt, **{"temperature": 0, "max_tokens": 12, **options})


def stream_of(client, prompt, **options):
    texts, reasons, chunks = {}, {}, []
    for chunk in complete(client, prompt, stream=True, **options):
        chunks.append(chunk)
        for choice in chunk.choices:
            assert choice.index not in reasons
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, chunks


def test_texts_and_token_ids_alone_and_in_lists(client, offline):
    ids = list(b"abc def")  # not the ids of that text: any will do
    want = {key: offline(prompt, max_tokens=12).outputs[0].text for key, prompt in (("a", "hello"), ("b", "world"), ("ids", ids))}
    for prompt, texts in (
        ("hello", [want["a"]]),
        (["hello"], [want["a"]]),
        (["hello", "world"], [want["a"], want["b"]]),
        (ids, [want["ids"]]),
        ([ids], [want["ids"]]),
        ([ids, ids[:3]], [want["ids"], offline(ids[:3], max_tokens=12).outputs[0].text]),
    ):
        answer = complete(client, prompt)
        assert [c.text for c in answer.choices] == texts and [c.index for c in answer.choices] == list(range(len(texts)))
        got, reasons, _ = stream_of(client, prompt)
        assert [got[i] for i in range(len(texts))] == texts and len(reasons) == len(texts)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.usage.prompt_tokens == 10 and answer.usage.completion_tokens == 24


def test_sixteen_tokens_by_default(client):
    answer = client.completions.create(model="tiny", prompt="x", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16 and answer.choices[0].finish_reason == "length"


def test_several_answers_of_several_prompts(client, offline):
    settings = dict(temperature=1.3, seed=11, n=2, max_tokens=8)
    want = [one.text for prompt in ("hello", "world") for one in offline(prompt, **settings).outputs]
    answer = complete(client, ["hello", "world"], **settings)
    assert [c.text for c in answer.choices] == want and len(set(want)) == 4
    texts, _, chunks = stream_of(client, ["hello", "world"], **settings, stream_options={"include_usage": True})
    assert [texts[i] for i in range(4)] == want
    assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens == 10


@pytest.mark.parametrize("prompt", ["hello", list(b"hello")])
def test_echo(client, offline, prompt):
    text = offline(prompt, max_tokens=12).outputs[0].text
    shown = prompt if isinstance(prompt, str) else complete(client, prompt, echo=True, max_tokens=0).choices[0].text
    assert len(shown) == 5
    assert complete(client, prompt, echo=True).choices[0].text == shown + text
    assert stream_of(client, prompt, echo=True)[0] == {0: shown + text}


def test_log_probabilities(client, offline):
    want = offline("hello", max_tokens=6, logprobs=2).outputs[0]
    got = complete(client, "hello", max_tokens=6, logprobs=2).choices[0].logprobs
    assert got.token_logprobs == pytest.approx(
        [ranked[t].logprob for t, ranked in zip(want.token_ids, want.logprobs, strict=True)], abs=1e-5
    )
    assert len(got.tokens) == len(got.top_logprobs) == 6 and got.text_offset[0] == 0
    assert all(key.startswith(("bytes:\\x", "<|im")) or len(key) == 1 for key in got.tokens)
    assert all(2 <= len(top) <= 3 and token in top for token, top in zip(got.tokens, got.top_logprobs, strict=True))
    _, _, chunks = stream_of(client, "hello", max_tokens=6, logprobs=2)
    lists = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for some in lists for one in getattr(some, name)] == getattr(got, name)


def test_echo_scores_the_prompt(client, offline):
    """What evaluation harnesses ask: the prompt's log-probabilities and nothing new."""
    want = offline("hello", max_tokens=1, prompt_logprobs=1).prompt_logprobs
    ids = offline("hello", max_tokens=1).prompt_token_ids
    answer = complete(client, "hello", max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer.choices
    assert choice.text == "hello" and choice.logprobs.tokens == list("hello") and choice.logprobs.text_offset == [0, 1, 2, 3, 4]
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx([lp[t].logprob for t, lp in zip(ids[1:], want[1:], strict=True)], abs=1e-4)
    assert choice.finish_reason == "length" and answer.usage.completion_tokens == 0 and answer.usage.total_tokens == 5
    whole = complete(client, "hello", echo=True, logprobs=1).choices[0].logprobs
    assert whole.token_logprobs[1:5] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4) and len(whole.tokens) == 17
    lists = [c.choices[0].logprobs for c in stream_of(client, "hello", echo=True, logprobs=1)[2] if c.choices[0].logprobs]
    assert [token for some in lists for token in some.tokens] == whole.tokens
    assert [i for some in lists for i in some.text_offset] == whole.text_offset


def test_prompt_log_probabilities(client, offline):
    want = offline("hello", max_tokens=1, prompt_logprobs=0).prompt_logprobs
    (choice,) = complete(client, "hello", max_tokens=1, extra_body={"prompt_logprobs": 0}).choices
    got = choice.prompt_logprobs
    assert got[0] is None and choice.logprobs is None
    assert [list(map(int, one)) for one in got[1:]] == [list(one) for one in want[1:]]
    assert {len(one["decoded_token"]) for some in got[1:] for one in some.values()} == {1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"suffix": "x"}, "suffix is 'x'; text after the completion is not built; leave suffix out"),
        ({"best_of": 2}, "best_of is 2; choosing among more answers"),
        ({"prompt": 5}, "prompt is 5; it must be a text, a list of texts, a list of token ids or a list of those, and not empty"),
        ({"prompt": []}, r"prompt is \[\]; it must be a text"),
        ({"prompt": ["a", 1]}, "its entries must be all texts, all token ids, or all lists of token ids"),
        ({"prompt": [True]}, "its entries must be all texts"),
        ({"prompt": [[1], ["a"]]}, "its lists must hold token ids, which are integers"),
        ({"prompt": [[1], []]}, r"prompt\[1\] is empty; it needs at least one token"),
        ({"prompt": ""}, "prompt is empty; it needs at least one token"),
        ({"prompt": [[1], [999]]}, r"token id 999 at position 0 of prompt\[1\] is out of range; ids are 0 to 257"),
        ({"prompt": [-1]}, "token id -1 at position 0 of prompt is out of range"),
        ({"prompt": None}, "prompt is None; it must be a text"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"max_tokens": -5}, "max_tokens is -5; it must be at least 1"),
        ({"max_tokens": 10**30}, "maximum context length is 256 tokens"),
        ({"max_tokens": 256}, "prompt has 5 tokens and max_tokens is 256; this model's maximum context length is 256 tokens of both"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5; input should be a valid integer"),
        ({"max_tokens": "5"}, "max_tokens is '5'; input should be a valid integer"),
        ({"temperature": -1}, "temperature is -1.0; it must be 0"),
        ({"temperature": 1e300}, "temperature is 1e"),
        ({"temperature": True}, "temperature is True; input should be a valid number"),
        ({"top_p": 0}, "top_p is 0.0; it must be above 0"),
        ({"top_k": -2}, "top_k is -2; it must be 1 or more"),
        ({"n": 0}, "n is 0; it must be from 1"),
        ({"n": 33, "temperature": 1}, "make 33 answers; a request may ask for at most 32"),
        ({"n": 2}, "temperature is 0.0: 2 samples would all be the same"),
        ({"n": 10**25, "temperature": 1}, "n is 1"),
        ({"logprobs": 21}, "logprobs is 21; this engine reports at most"),
        ({"logprobs": -1}, "logprobs is -1; it must be from 0"),
        ({"seed": 2**70}, "seed is 1180591620717411303424; input should be less than"),
        ({"stop": ""}, "stop has an empty text in it"),
        ({"stop": 5}, "stop is 5; input should be a valid string or input should be a valid list"),
        ({"stop": ["x" * 5000]}, "stop strings have 5000 characters in all; at most"),
        ({"logit_bias": {"a": 1}}, "logit_bias has the key 'a'; keys are token ids"),
        ({"logit_bias": {"5": 101}}, r"logit_bias\[5\] is 101.0; it must be from -100 to 100"),
        ({"logit_bias": {"258": 1}}, "token id 258 of logit_bias is out of range"),
        ({"logit_bias": {"99999999999": 1}}, "logit_bias has the key '99999999999'"),
        ({"frequency_penalty": 3}, "frequency_penalty is 3.0; it must be from -2 to 2"),
        ({"min_tokens": 13}, "min_tokens is 13; it must be from 0 to max_tokens, 12"),
        ({"priority": 2**80}, "priority is 1208925819614629174706176; input should be less than"),
        ({"temprature": 1}, "Unrecognized request argument supplied: temprature"),
        ({"stream_options": {"x": 1}, "stream": True}, "Unrecognized request argument supplied: stream_options.x"),
    ],
)
def test_bad_bodies(server, change, message):
    status, body = server.post("/v1/completions", {"model": "tiny", "prompt": "hello", "temperature": 0, "max_tokens": 12, **change})
    assert status == 400 and set(body["error"]) == {"message", "type", "param", "code"}, body
    assert re.search(message, body["error"]["message"]), body
    assert body["error"]["type"] == "invalid_request_error"


def test_a_huge_top_k_keeps_every_token(client, offline):
    settings = dict(temperature=1.0, seed=5, max_tokens=8)
    got = complete(client, "hello", **settings, extra_body={"top_k": 10**40})
    assert got.choices[0].text == offline("hello", **settings).outputs[0].text


def test_too_long_has_its_own_code(client):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, "x" * 300)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"
    assert "prompt has 300 tokens and max_tokens is 12; this model's maximum context length is 256" in caught.value.body["message"]


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="model is 'gpt-4o'; this server has tiny, org/tiny") as caught:
        client.completions.create(model="gpt-4o", prompt="x")
    assert caught.value.code == "model_not_found"
    assert client.completions.create(model="org/tiny", prompt="x").model == "org/tiny"
