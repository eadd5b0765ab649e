"""`LLM` on a whole tiny model folder: what comes back, in which order, and what is refused."""

import dataclasses
import functools
import itertools
import json
import shutil

import pytest
from tqdm import tqdm

from pagedjax import (
    LLM,
    CheckpointError,
    ConfigError,
    EngineConfig,
    EngineError,
    RequestError,
    SamplingParams,
    UnsupportedModelError,
    generate,
)
from tests.tiny_model import write_model

TEXTS = ["one", "two and two", "a rather longer prompt that fills more than two blocks of cells", "x"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("llm") / "tiny")


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder)


@pytest.fixture(scope="module")
def outputs(llm):
    return llm.generate(TEXTS, GREEDY, use_tqdm=False)


def test_outputs_are_in_order_and_complete(llm, outputs):
    assert [o.prompt for o in outputs] == TEXTS
    assert len({o.request_id for o in outputs}) == len(TEXTS)
    want = generate(llm.params, llm.config, [llm.tokenizer.encode(t) for t in TEXTS], 12)
    for output, ids in zip(outputs, want.token_ids, strict=True):
        assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt)
        (one,) = output.outputs
        assert (one.index, one.token_ids, one.finish_reason, one.stop_reason) == (0, ids, "length", None)
        assert one.text == llm.tokenizer.decode(ids)
        assert one.logprobs is None and one.cumulative_logprob is None
        assert output.finished and output.metrics["prefill_s"] > 0


def test_one_text_token_ids_and_dicts_are_prompts_too(llm, outputs):
    for prompt in (TEXTS[1], {"prompt": TEXTS[1]}, {"prompt_token_ids": llm.tokenizer.encode(TEXTS[1])}):
        (got,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert got.outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert got.prompt is None


@pytest.mark.parametrize("limits", [dict(max_num_seqs=1), dict(max_num_seqs=3), dict(kv_cache_bytes=7 * 16 * 128)])
def test_batches_that_fit_give_the_same(folder, outputs, limits):
    # A token's keys and values take 2 * 1 layer * 2 heads * 8 * 4 bytes = 128; the third prompt needs 5 blocks of 16, the others 1 or 2.
    small = LLM(folder, **limits)
    assert [o.outputs[0].token_ids for o in small.generate(TEXTS, GREEDY, use_tqdm=False)] == [o.outputs[0].token_ids for o in outputs]


def test_no_more_memory_is_asked_for_than_there_is(folder):
    assert LLM(folder, kv_cache_bytes=8 * 16 * 128 - 1).engine.num_kv_blocks == 6
    assert LLM(folder, engine_config=EngineConfig(num_kv_blocks=9)).engine.num_kv_blocks == 9


def test_settings_reach_the_engine(folder):
    config = EngineConfig(max_num_seqs=3, block_size=32, max_model_len=96)
    engine = LLM(folder, engine_config=config, gpu_memory_utilization=0.5).engine
    assert (engine.max_model_len, engine.engine_config.max_num_seqs, engine.engine_config.block_size) == (96, 3, 32)
    assert engine.engine_config.gpu_memory_utilization == 0.5
    assert LLM(folder, engine_config=config, max_num_seqs=2, max_model_len=64).engine.max_model_len == 64


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(folder):
    small = LLM(folder, kv_cache_bytes=4 * 16 * 128)
    with pytest.raises(RequestError, match=r"prompts\[2\] has 63 tokens; with a KV cache of 3 blocks of 16 tokens it may have at most 47"):
        small.generate(TEXTS, GREEDY)
    assert small.generate(TEXTS[0], GREEDY, use_tqdm=False)[0].finished


def test_stop_tokens_and_end_tokens(llm, outputs):
    ids = outputs[2].outputs[0].token_ids
    stop = ids[4]
    first = ids.index(stop)
    (got,) = llm.generate(TEXTS[2], dataclasses.replace(GREEDY, stop_token_ids=(stop,)), use_tqdm=False)
    (one,) = got.outputs
    assert (one.token_ids, one.finish_reason, one.stop_reason) == (ids[: first + 1], "stop", stop)
    assert one.text == llm.tokenizer.decode(ids[:first])


def test_logprobs_fields(llm):
    (got,) = llm.generate(TEXTS[1], dataclasses.replace(GREEDY, logprobs=2), use_tqdm=False)
    (one,) = got.outputs
    assert len(one.logprobs) == len(one.token_ids) == 12
    assert one.cumulative_logprob == pytest.approx(sum(at[t].logprob for t, at in zip(one.token_ids, one.logprobs, strict=True)))
    for token, at in zip(one.token_ids, one.logprobs, strict=True):
        assert len(at) == 2 and at[token].rank == 1
        assert at[token].decoded_token == llm.tokenizer.decode([token], skip_special_tokens=False)


def test_params_for_each_prompt_and_seeds(llm, outputs):
    asked = [GREEDY, SamplingParams(temperature=1.5, seed=3, max_tokens=5), SamplingParams(temperature=1.5, max_tokens=7), GREEDY]
    got = llm.generate(TEXTS, asked, use_tqdm=False)
    assert got[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert [len(o.outputs[0].token_ids) <= n for o, n in zip(got, (12, 5, 7, 12), strict=True)] == [True] * 4
    # The seed that was drawn is reported, and gives the same answer again.
    again = llm.generate(TEXTS[2], dataclasses.replace(asked[2], seed=got[2].metrics["seed"]), use_tqdm=False)
    assert again[0].outputs[0].token_ids == got[2].outputs[0].token_ids
    assert got[1].metrics["seed"] == 3


def test_drawn_seeds_follow_the_llm_s_seed(folder):
    ask = SamplingParams(temperature=2.0, max_tokens=8)
    one, same, other = (LLM(folder, seed=s).generate(TEXTS[:2], ask, use_tqdm=False) for s in (5, 5, 6))
    assert [o.metrics["seed"] for o in one] == [o.metrics["seed"] for o in same] != [o.metrics["seed"] for o in other]
    assert one[0].metrics["seed"] != one[1].metrics["seed"]


def test_chat_and_streaming_chat_say_the_same(llm):
    messages = [{"role": "user", "content": "Grüße, 世界 👩‍👩‍👧!"}]
    (whole,) = llm.chat(messages, dataclasses.replace(GREEDY, max_tokens=30), use_tqdm=False)
    assert whole.prompt == "<|im_start|>user\nGrüße, 世界 👩‍👩‍👧!<|im_end|>\n<|im_start|>assistant\n"
    pieces = list(llm.stream_chat(messages, dataclasses.replace(GREEDY, max_tokens=30)))
    assert "".join(pieces) == whole.outputs[0].text
    assert len(pieces) > 1
    same = llm.chat(messages, GREEDY, chat_template_kwargs={"unused": 1}, use_tqdm=False)
    assert same[0].outputs[0].token_ids == whole.outputs[0].token_ids[:12]
    with pytest.raises(TypeError, match="lora_request"):
        llm.chat(messages, GREEDY, lora_request=None)
    several = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in several] == [whole.outputs[0].token_ids[:12]] * 2


def test_a_stream_gives_a_sign_of_life_when_there_is_no_text(llm, monkeypatch):
    """A reader that wants to stop must be able to even while only special tokens come."""
    monkeypatch.setattr(type(llm.tokenizer.stream()), "step", lambda self, token: "")
    monkeypatch.setattr(type(llm.tokenizer.stream()), "finish", lambda self: "")
    assert list(llm.stream_chat([{"role": "user", "content": "hi"}], dataclasses.replace(GREEDY, max_tokens=20))) == [""] * 5


def test_a_stream_can_be_left_and_the_next_one_starts_fresh(llm):
    messages = [{"role": "user", "content": "hi"}]
    stream = llm.stream_chat(messages, GREEDY)
    while not next(stream):
        pass
    stream.close()
    assert "".join(llm.stream_chat(messages, GREEDY)) == llm.chat(messages, GREEDY, use_tqdm=False)[0].outputs[0].text


def test_two_streams_read_in_turn_keep_their_own_text(llm):
    asked = [[{"role": "user", "content": text}] for text in ("one", "two, and longer")]
    want = [o.outputs[0].text for o in llm.chat(asked, GREEDY, use_tqdm=False)]
    streams = [llm.stream_chat(messages, GREEDY) for messages in asked]
    got = ["", ""]
    for pieces in itertools.zip_longest(*streams, fillvalue=""):
        got = [text + piece for text, piece in zip(got, pieces, strict=True)]
    assert got == want
    started = llm.stream_chat(asked[0], GREEDY)
    first = next(started)
    assert llm.generate(TEXTS[0], GREEDY, use_tqdm=False)[0].finished  # beside a stream that waits
    assert first + "".join(started) == want[0]


def test_prompts_share_blocks_and_salts_keep_them_apart(folder):
    llm = LLM(folder)
    (cold,) = llm.generate(TEXTS[2], GREEDY, use_tqdm=False)
    (hot,) = llm.generate(TEXTS[2], GREEDY, use_tqdm=False)
    (salted,) = llm.generate({"prompt": TEXTS[2], "cache_salt": "s"}, GREEDY, use_tqdm=False)
    assert [o.num_cached_tokens for o in (cold, hot, salted)] == [0, 48, 0]
    assert cold.outputs[0].token_ids == hot.outputs[0].token_ids == salted.outputs[0].token_ids


def test_a_failed_step_is_told_and_the_next_call_works(folder, outputs):
    llm = LLM(folder)
    runner = llm.engine._runner
    dispatch, failed = runner.dispatch, []

    def fail_once(inputs, *, report):
        if not failed:
            failed.append(inputs)
            raise RuntimeError("no more coffee")
        return dispatch(inputs, report=report)

    runner.dispatch = fail_once
    (got,) = llm.generate(TEXTS[0], GREEDY, use_tqdm=False)
    assert (got.outputs[0].finish_reason, got.error) == ("error", "a step failed: RuntimeError: no more coffee")
    failed.clear()
    with pytest.raises(EngineError, match="no more coffee"):
        list(llm.stream_chat([{"role": "user", "content": "hi"}], GREEDY))
    assert llm.generate(TEXTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_the_model_s_own_defaults(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "m")
    defaults = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "eos_token_id": [3, 4]}
    (copy / "generation_config.json").write_text(json.dumps(defaults))
    model = LLM(copy, dtype="bfloat16", max_model_len=64)
    assert model.default_sampling_params == SamplingParams(temperature=0.6, top_p=0.9, top_k=50)
    # The tokenizer's own end token ends an answer too.
    assert (model.eos_token_ids, model.max_model_len, model.config.dtype) == ((3, 4, 257), 64, "bfloat16")
    (copy / "generation_config.json").write_text(
        json.dumps(defaults | {"do_sample": False, "max_new_tokens": 7, "repetition_penalty": 1.0})
    )
    assert LLM(copy).default_sampling_params == SamplingParams(temperature=0.0, max_tokens=7)


def test_a_tokenizer_s_end_token_alone_ends_answers(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "m")
    (copy / "generation_config.json").unlink()
    break_config(eos_token_id=None)(copy)
    assert LLM(copy).eos_token_ids == (257,)


def test_defaults_that_are_not_built_are_named(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "m")
    (copy / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}))
    with pytest.warns(UserWarning, match="asks for no_repeat_ngram_size=2, which is not built"):
        LLM(copy)


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"eos_token_id": "two"}, "eos_token_id is 'two'; it must be a token id or a list of them"),
        ({"eos_token_id": [257, None]}, r"eos_token_id is \[257, None\]"),
        ({"eos_token_id": {}}, "eos_token_id is {}"),
        ({"temperature": -1}, "generation config: temperature is -1"),
    ],
)
def test_bad_defaults_are_named(folder, tmp_path, defaults, message):
    copy = shutil.copytree(folder, tmp_path / "m")
    (copy / "generation_config.json").write_text(json.dumps(defaults))
    with pytest.raises(CheckpointError, match=message):
        LLM(copy)


def test_the_progress_bar_counts_prompts(llm, capfd):
    llm.generate(TEXTS[:2], GREEDY)
    seen = capfd.readouterr()
    assert "2/2" in seen.err and not seen.out


def test_the_progress_bar_moves_as_prompts_finish(llm, outputs, capfd, monkeypatch):
    monkeypatch.setattr("pagedjax.engine.tqdm", functools.partial(tqdm, mininterval=0))  # however fast, every update is drawn
    asked = [dataclasses.replace(GREEDY, max_tokens=n) for n in (1, 70, 140)]
    got = llm.generate(TEXTS[:3], asked)
    assert [len(o.outputs[0].token_ids) for o in got] == [1, 70, 140]
    assert [o.outputs[0].token_ids[:12] for o in got[1:]] == [o.outputs[0].token_ids for o in outputs[1:3]]
    seen = capfd.readouterr().err
    assert "1/3" in seen and "3/3" in seen


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.generate(""), "the prompt is empty"),
        (lambda m: m.generate({"prompt_token_ids": [0, 258]}), "token id 258 at position 1"),
        (lambda m: m.generate({"prompt_token_ids": [-1]}), "token id -1 at position 0"),
        (lambda m: m.generate("x" * 300), "the prompt has 300 tokens; with max_model_len 256 it may have at most 255"),
        (lambda m: m.generate([3]), "a prompt is 3; it must be a text"),
        (lambda m: m.generate({"text": "x"}), "a prompt is {'text': 'x'}; it must be a text"),
        (lambda m: m.generate(["a", "b"], [GREEDY]), "sampling_params has 1 entries for 2 prompts"),
        (lambda m: m.generate(["a", ""]), r"prompts\[1\] is empty"),
        (lambda m: m.chat([]), "messages is empty"),
        (lambda m: m.stream_chat([]), "messages is empty"),
    ],
)
def test_bad_prompts_are_refused_and_the_next_call_works(llm, outputs, call, message):
    with pytest.raises(RequestError, match=message):
        call(llm)
    assert llm.generate(TEXTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids


def break_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def break_config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (break_weights, CheckpointError, "model.safetensors"),
        (lambda f: (f / "model.safetensors").unlink(), CheckpointError, "safetensors"),
        (lambda f: (f / "config.json").unlink(), CheckpointError, "config.json"),
        (lambda f: (f / "tokenizer.json").unlink(), CheckpointError, "tokenizer"),
        (break_config(hidden_size=64), CheckpointError, "shape"),
        (break_config(num_hidden_layers=2), CheckpointError, "lacks 9 tensors: model.layers.1"),
        (break_config(tie_word_embeddings=False), CheckpointError, "lacks 1 tensor: lm_head.weight"),
        (break_config(architectures=["MysteryForCausalLM"]), UnsupportedModelError, "MysteryForCausalLM"),
    ],
    ids=["truncated", "no-weights", "no-config", "no-tokenizer", "shape", "missing", "untied", "architecture"],
)
def test_damaged_folders(folder, tmp_path, damage, error, message):
    copy = shutil.copytree(folder, tmp_path / "m")
    damage(copy)
    with pytest.raises(error, match=message):
        LLM(copy)


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        LLM(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(max_num_seqs=0), "max_num_seqs is 0; it must be a positive integer"),
        (dict(max_num_seqs=2.5), "max_num_seqs is 2.5"),
        (dict(kv_cache_bytes=-5), "kv_cache_bytes is -5; it must be a positive integer"),
        (dict(kv_cache_bytes=1e9), "kv_cache_bytes is 1000000000.0"),
        (dict(dtype="int8"), "dtype 'int8' is not one of float32, bfloat16, float16"),
        (dict(max_model_len=9999), "max_model_len 9999 exceeds the 256 positions"),
    ],
)
def test_bad_settings(folder, asked, message):
    with pytest.raises(ConfigError, match=message):
        LLM(folder, **asked)
