"""What is measured, and against what: numbers that can be checked by hand."""

import pytest

from pagedjax.bench.roofline import Limits, decode_step_s, matmul_parameters, measure_limits, prefill_s, workload_s
from pagedjax.bench.shapes import SHAPES, shape_config
from pagedjax.bench.workload import Workload, mixed, uniform
from pagedjax.config import ModelConfig
from pagedjax.errors import ConfigError
from pagedjax.params import hf_names

ONE_B = shape_config("llama-3.2-1b")
LIMITS = Limits(copy_bytes_per_s=4e12, matmul_flops_per_s=8e14)
# 16 layers of q, k, v and o (2048 x (2048 + 512 + 512 + 2048)) and three MLP matrices, and the output head.
ONE_B_MATMULS = 16 * (2048 * 5120 + 3 * 2048 * 8192) + 2048 * 128256


def test_the_shape_is_the_published_model():
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        }
    )
    assert config == ONE_B


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_has_weights(name):
    assert hf_names(shape_config(name))
    assert uniform(1, 3, 2, shape_config(name).vocab_size, 0).prompts


def test_an_unknown_shape_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"shape is 'llama-4'; there are llama-3.2-1b, .*tiny"):
        shape_config("llama-4")


def test_mixed_is_the_workload_that_others_were_measured_on():
    workload = mixed(128256)
    assert (len(workload.prompts), workload.num_prompt_tokens, workload.num_output_tokens) == (512, 280_978, 141_425)
    assert {len(p) for p in workload.prompts} <= set(range(32, 1025)) and set(workload.output_lens) <= set(range(32, 513))
    again = mixed(128256, 1)
    assert (list(map(len, again.prompts)), again.output_lens) == (list(map(len, workload.prompts)), workload.output_lens)
    # Fresh prompts: no block of 16 is found again.
    assert not {tuple(p[:16]) for p in again.prompts} & {tuple(p[:16]) for p in workload.prompts}
    assert mixed(128256, 1) == again != mixed(128256, 2)


def test_answers_go_to_their_full_length():
    workload = uniform(2, 3, 5, 100, 1)
    assert [len(p) for p in workload.prompts] == [3, 3] and workload.prompts != uniform(2, 3, 5, 100, 2).prompts
    assert [(p.max_tokens, p.ignore_eos, p.temperature) for p in workload.sampling_params()] == [(5, True, 0.0)] * 2
    sampled = workload.sampling_params(temperature=0.8, top_p=0.9)
    assert [(p.max_tokens, p.ignore_eos, p.temperature, p.top_p) for p in sampled] == [(5, True, 0.8, 0.9)] * 2


def test_floor_of_a_decode_step():
    assert matmul_parameters(ONE_B) == ONE_B_MATMULS == 1_235_746_816
    # One row of 100 tokens: every weight once in two bytes, and 32,768 bytes of KV a token.
    assert decode_step_s(ONE_B, LIMITS, [100]) == pytest.approx((2 * ONE_B_MATMULS + 100 * 32768) / 4e12)
    # At 2048 rows of a token the matmuls take longer: 2 operations a weight and row.
    assert decode_step_s(ONE_B, LIMITS, [1] * 2048) == pytest.approx(2 * ONE_B_MATMULS * 2048 / 8e14)


def test_floor_of_a_prefill():
    layers = ONE_B_MATMULS - 2048 * 128256
    # Causal attention: n^2 / 2 pairs, two products of 2 operations for 32 heads of 64, in 16 layers.
    flops = 2 * layers * 8192 + 2 * 2048 * 128256 * 64 + 64 * 128**2 // 2 * 4 * 32 * 64 * 16
    assert prefill_s(ONE_B, LIMITS, [128] * 64) == pytest.approx(flops / 8e14)
    assert prefill_s(ONE_B, LIMITS, [1]) == pytest.approx(2 * layers / 4e12)  # the weights have to be read


def test_floor_of_a_workload():
    two = Workload("two", [[1] * 10, [1] * 20], [3, 5])
    # Two rows side by side: 4 steps after the first tokens. Contexts 11, 12 and 21 to 24 are read.
    kv = (11 + 12 + 21 + 22 + 23 + 24) * 32768
    expected = prefill_s(ONE_B, LIMITS, [10, 20]) + (4 * 2 * ONE_B_MATMULS + kv) / 4e12
    assert workload_s(ONE_B, LIMITS, two, 2) == pytest.approx(expected)
    # One after the other: 2 + 4 steps.
    assert workload_s(ONE_B, LIMITS, two, 1) == pytest.approx(expected + 2 * 2 * ONE_B_MATMULS / 4e12)


def test_limits_are_measured():
    limits = measure_limits("float32", copy_bytes=1 << 22, matmul_size=256)
    # Nothing that runs this test copies slower or multiplies faster than that.
    assert 1e7 < limits.copy_bytes_per_s < 1e14 and 1e8 < limits.matmul_flops_per_s < 1e16
