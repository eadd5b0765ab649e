"""The example in the README of pallas_kernels runs and says what it promises."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels

README = pathlib.Path(pallas_kernels.__file__).parent / "README.md"


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_the_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    with jax.numpy_rank_promotion("raise"):
        exec(compile(code, str(README), "exec"), names)
    assert names["out"].shape == (2, 8, 64)
    assert bool(jnp.isfinite(names["out"].astype(jnp.float32)).all())
    assert "paged_attention on " in capsys.readouterr().out


def test_every_implementation_is_in_the_table():
    text = README.read_text(encoding="utf-8")
    for op in (
        "paged_attention",
        "paged_prefill_attention",
        "write_kv",
        "rope_write_kv",
        "skinny_matmul",
        "sample_tokens",
        "token_logprobs",
    ):
        for name in pallas_kernels.support(op).reasons:
            assert f"`{name}`" in text, f"{op}'s {name}"
