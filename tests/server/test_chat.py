"""``/v1/chat/completions`` through OpenAI's client: whole and streamed, one answer and several."""

import json
import math
import re

import openai
import pytest

MESSAGES = [{"role": "user", "content": "hi there"}]


def stream_of(client, **options):
    """Text of each choice, reasons, and all chunks of a stream."""
    texts, reasons, chunks = {}, {}, []
    for chunk in client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **options):
        chunks.append(chunk)
        for choice in chunk.choices:
            assert choice.index not in reasons, "a chunk after the reason"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, chunks


def test_a_whole_answer_is_the_offline_one(client, offline):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=24)
    want = offline(MESSAGES, max_tokens=24)
    (choice,) = answer.choices
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "tiny"
    assert (choice.message.role, choice.message.content) == ("assistant", want.outputs[0].text)
    assert choice.finish_reason == want.outputs[0].finish_reason and choice.logprobs is None
    assert answer.usage.prompt_tokens == len(want.prompt_token_ids)
    assert answer.usage.completion_tokens == len(want.outputs[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_ends_with_reason_usage_and_done(client, server, offline):
    texts, reasons, chunks = stream_of(client, temperature=0, max_tokens=24, stream_options={"include_usage": True})
    want = offline(MESSAGES, max_tokens=24)
    assert texts == {0: want.outputs[0].text} and reasons == {0: want.outputs[0].finish_reason}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert len({c.id for c in chunks}) == 1 and chunks[0].object == "chat.completion.chunk"
    assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(want.outputs[0].token_ids)

    body = {"messages": MESSAGES, "stream": True, "temperature": 0, "max_tokens": 9, "stream_options": {"include_usage": True}}
    status, text = server.post("/v1/chat/completions", body)
    events = text.split("\n\n")
    assert status == 200 and events[-2:] == ["data: [DONE]", ""]
    parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all("usage" in one and "finish_reason" in (one["choices"] or [{"finish_reason": 0}])[0] for one in parsed)


def test_several_answers_differ_and_are_the_offline_ones(client, offline):
    settings = dict(temperature=1.5, seed=7, n=3)
    want = [one.text for one in offline(MESSAGES, max_tokens=12, **settings).outputs]
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12, **settings)
    assert [c.index for c in answer.choices] == [0, 1, 2] and [c.message.content for c in answer.choices] == want
    assert len(set(want)) == 3
    texts, reasons, _ = stream_of(client, max_tokens=12, **settings)
    assert [texts[i] for i in range(3)] == want and sorted(reasons) == [0, 1, 2]
    assert answer.usage.prompt_tokens < 60  # the prompt once, not three times


def test_seeds_of_64_bits_and_a_sign(client):
    def answer(seed):
        return (
            client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=2, max_tokens=12, seed=seed)
            .choices[0]
            .message.content
        )

    assert answer(-5) == answer(-5) == answer(2**32 - 5)
    assert answer(-5) != answer(5)


def test_log_probabilities(client, offline):
    options = dict(temperature=0, max_tokens=6, logprobs=True, top_logprobs=3)
    want = offline(MESSAGES, max_tokens=6, logprobs=3).outputs[0]
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, **options).choices[0].logprobs.content
    _, _, chunks = stream_of(client, **options)
    streamed = [one for c in chunks if c.choices[0].logprobs for one in c.choices[0].logprobs.content]
    assert streamed == whole and len(whole) == 6
    for entry, token, ranked in zip(whole, want.token_ids, want.logprobs, strict=True):
        assert entry.logprob == pytest.approx(ranked[token].logprob, abs=1e-5)
        top = sorted(ranked.values(), key=lambda one: one.rank)[:3]
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx([one.logprob for one in top], abs=1e-5)
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    assert b"".join(bytes(one.bytes) for one in whole).decode("utf-8", "replace") == want.text
    none = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=2, logprobs=True)
    assert none.choices[0].logprobs.content[0].top_logprobs == []


def test_prompt_log_probabilities(client, offline):
    want = offline(MESSAGES, max_tokens=1, prompt_logprobs=2)
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=1, extra_body={"prompt_logprobs": 2})
    assert answer.prompt_logprobs[0] is None and len(answer.prompt_logprobs) == len(want.prompt_token_ids)
    for got, ranked in zip(answer.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True):
        assert {int(i): one["rank"] for i, one in got.items()} == {i: one.rank for i, one in ranked.items()}
        assert all(math.isclose(got[str(i)]["logprob"], one.logprob, abs_tol=1e-4) for i, one in ranked.items())


def test_stop_strings_and_reasons(client, offline):
    text = offline(MESSAGES, max_tokens=24).outputs[0].text
    stop = text[5:8]
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=24, stop=["never", stop])
    (choice,) = answer.choices
    assert choice.message.content == text[: text.index(stop)] and choice.finish_reason == "stop" and choice.stop_reason == stop
    single = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=24, stop=stop)
    assert single.choices[0].message.content == choice.message.content
    texts, reasons, _ = stream_of(client, temperature=0, max_tokens=24, stop=stop)
    assert texts[0] == choice.message.content and reasons == {0: "stop"}


def test_bias_penalties_and_extensions_reach_the_sampler(client, offline):
    forced = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=4, logit_bias={"65": 100})
    names = offline([65], max_tokens=1)
    assert len(set(forced.choices[0].message.content)) == 1 and names.prompt_token_ids == [65]
    settings = dict(frequency_penalty=1.5, presence_penalty=1.0)
    extra = dict(top_k=5, min_p=0.01, min_tokens=3, repetition_penalty=1.3, ignore_eos=True)
    got = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=0.9,
        seed=3,
        max_tokens=30,
        **settings,
        extra_body={**extra, "cache_salt": "a", "priority": -1},
    )
    want = offline(MESSAGES, temperature=0.9, seed=3, max_tokens=30, **settings, **extra).outputs[0]
    assert got.choices[0].message.content == want.text and got.choices[0].finish_reason == "length"


def test_text_parts_are_joined(client, server):
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]}]
    plain = [{"role": "user", "content": "hi\nthere"}]
    asked = dict(model="tiny", temperature=0, max_tokens=8)
    assert (
        client.chat.completions.create(messages=parts, **asked).choices == client.chat.completions.create(messages=plain, **asked).choices
    )
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[0\] has the type 'image_url'; this server reads text alone"):
        client.chat.completions.create(messages=image, **asked)
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[0\]\.text is None; it must be a text"):
        client.chat.completions.create(messages=[{"role": "user", "content": [{"type": "text"}]}], **asked)


def test_a_prefix_is_found_again_but_not_under_another_salt(client):
    messages = [{"role": "user", "content": "a prompt of more than a block of sixteen tokens"}]

    def cached(salt):
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1, extra_body={"cache_salt": salt})
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached("x"), cached("y")] == [0, 0]
    assert cached("x") >= 32


def test_what_is_not_built_is_refused_by_name(client):
    def refused(**options):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=MESSAGES, **options)
        return caught.value.body["message"], caught.value.body["param"]

    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert refused(tools=[tool], tool_choice="required") == (
        "tool_choice is 'required'; a forced tool choice is not built; use 'auto' or 'none'",
        "tool_choice",
    )
    assert refused(tools=[tool], tool_choice={"type": "function", "function": {"name": "f"}})[1] == "tool_choice"
    message, param = refused(response_format={"type": "json_object"})
    assert "answers of a given form are not built" in message and param == "response_format"
    assert client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=1, response_format={"type": "text"}, tool_choice="auto"
    )


def test_tools_reach_the_template(tmp_path, folder):
    from pagedjax.server import prompts
    from pagedjax.server.schemas import ChatRequest
    from pagedjax.text import Tokenizer

    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.chat_templates["default"] = "{{ tools | tojson }}|{{ flag }}|{% for m in messages %}{{ m | tojson }}{% endfor %}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    body = ChatRequest.model_validate(
        {
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "2", "tool_call_id": "c"},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "chat_template_kwargs": {"flag": True},
        }
    )
    text = prompts.of_conversation(tokenizer, body).text
    assert text.startswith('[{"type": "function", "function": {"name": "f"}}]|True|')
    assert '"arguments": {"x": 1}' in text and '"tool_call_id": "c"' in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{"}}]}]}, "arguments is not JSON"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": "x"}]}, r"messages\[0\].tool_calls is 'x'; it must be a list"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs has 'chat_template'; that is no variable"),
        ({"top_logprobs": 2}, "top_logprobs need logprobs; set logprobs to true"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs is 21; this engine reports at most max_logprobs = 20"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens and max_completion_tokens mean the same and differ"),
        ({"stream_options": {"include_usage": True}}, "stream_options are for a stream; set stream to true"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs come with whole answers only"),
        ({"messages": []}, r"messages is \[\]; list should have at least 1 item"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\].role is missing"),
    ],
)
def test_bad_bodies(server, change, message):
    status, body = server.post("/v1/chat/completions", {"messages": MESSAGES, **change})
    assert status == 400, body
    assert re.search(message, body["error"]["message"]), body


def test_a_message_may_be_continued(client, offline):
    messages = [*MESSAGES, {"role": "assistant", "content": "abc"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    got = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=6, extra_body=extra)
    want = offline("<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\nabc", max_tokens=6)
    assert got.choices[0].message.content == want.outputs[0].text
