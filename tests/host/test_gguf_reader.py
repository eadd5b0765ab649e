"""GGUF tensors: each type against the library's numbers, llama.cpp's row order undone, damage reported by our own errors."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from pagedjax.checkpoint import Checkpoint, CheckpointNotFoundError, GgufCheckpoint
from pagedjax.checkpoint.gguf import _unpermute
from pagedjax.checkpoint.gguf_file import GgufFile
from pagedjax.errors import CheckpointError, UnsupportedModelError
from tests.host.gguf_files import METADATA, H, K, N, V, add_metadata, hf_weights, permute, write_gguf

Q = GGMLQuantizationType
PREFIX = "model.layers.0."
HF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.0.attn_norm.weight": PREFIX + "input_layernorm.weight",
    "blk.0.ffn_norm.weight": PREFIX + "post_attention_layernorm.weight",
    "blk.0.attn_q.weight": PREFIX + "self_attn.q_proj.weight",
    "blk.0.attn_k.weight": PREFIX + "self_attn.k_proj.weight",
    "blk.0.attn_v.weight": PREFIX + "self_attn.v_proj.weight",
    "blk.0.attn_output.weight": PREFIX + "self_attn.o_proj.weight",
    "blk.0.ffn_gate.weight": PREFIX + "mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": PREFIX + "mlp.up_proj.weight",
    "blk.0.ffn_down.weight": PREFIX + "mlp.down_proj.weight",
}


def test_names_shapes_and_values_are_hugging_faces(tmp_path):
    weights = hf_weights()
    with GgufCheckpoint(write_gguf(tmp_path / "m.gguf", weights)) as checkpoint:
        assert isinstance(checkpoint, Checkpoint)
        assert checkpoint.source == str(tmp_path / "m.gguf")
        assert checkpoint.names() == frozenset(HF_NAMES.values())
        for name, array in weights.items():
            assert checkpoint.shape(HF_NAMES[name]) == array.shape
            assert checkpoint.dtype(HF_NAMES[name]) == np.float32
            np.testing.assert_array_equal(checkpoint.read(HF_NAMES[name]), array, err_msg=name)


def test_row_order_by_hand(tmp_path):
    # Row r of a Hugging Face head of 8 holds the value r; llama.cpp stores the halves 0123 and 4567 as pairs 04 15 26 37.
    weights = hf_weights()
    weights["blk.0.attn_k.weight"] = np.broadcast_to(np.arange(K * H, dtype=np.float32)[:, None], (K * H, 32)).copy()
    path = write_gguf(tmp_path / "m.gguf", weights)
    file = GgufFile(path)
    stored = file.data("blk.0.attn_k.weight").view(np.float32)[:, 0].tolist()
    assert stored == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    with GgufCheckpoint(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read(PREFIX + "self_attn.k_proj.weight")[:, 0], np.arange(16))


def test_biases_are_put_back_too(tmp_path):
    weights = hf_weights(bias=True)
    with GgufCheckpoint(write_gguf(tmp_path / "m.gguf", weights)) as checkpoint:
        assert checkpoint.config["attention_bias"] is True
        for part, name in (("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj"), ("attn_output", "o_proj")):
            np.testing.assert_array_equal(checkpoint.read(f"{PREFIX}self_attn.{name}.bias"), weights[f"blk.0.{part}.bias"])


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1], ids=lambda kind: kind.name)
def test_each_type_that_the_library_writes(tmp_path, kind):
    weights = hf_weights()
    plain = {Q.F16: np.dtype(np.float16), Q.BF16: np.dtype(ml_dtypes.bfloat16)}
    with GgufCheckpoint(write_gguf(tmp_path / "m.gguf", weights, kind=kind)) as checkpoint:
        for name, array in weights.items():
            got = checkpoint.read(HF_NAMES[name])
            expected = array if array.ndim == 1 else dequantize(quantize(array, kind), kind).reshape(array.shape)
            assert (
                got.dtype == checkpoint.dtype(HF_NAMES[name]) == (plain.get(kind, np.dtype(np.float32)) if array.ndim > 1 else np.float32)
            )
            # Rows are quantised one by one, so undoing the row order first or last gives the same numbers.
            np.testing.assert_array_equal(got.astype(np.float32), expected, err_msg=name)
        assert checkpoint.config["torch_dtype"] == ("float16" if kind == Q.F16 else "bfloat16")


@pytest.mark.parametrize("kind", [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS], ids=lambda kind: kind.name)
def test_k_quants_from_random_blocks(tmp_path, kind):
    block, block_bytes = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (5, 2 * block_bytes), np.uint8)
    raw &= 0xBB  # clears an exponent bit of every float16 scale, wherever it lies: no infinity or NaN
    writer_path = tmp_path / "m.gguf"
    _write_with_extra(writer_path, "blk.0.ffn_up.weight", raw, kind)
    with GgufCheckpoint(writer_path) as checkpoint:
        got = checkpoint.read(PREFIX + "mlp.up_proj.weight")
    assert got.shape == (5, 2 * block)
    assert np.isfinite(got).all()
    assert got.std() > 0
    np.testing.assert_array_equal(got, dequantize(raw, kind))


def _write_with_extra(path: Path, name: str, raw: np.ndarray, kind: GGMLQuantizationType) -> None:
    """The small model with one tensor replaced by raw blocks."""
    writer = GGUFWriter(path, "llama")
    for key, value in METADATA.items():
        add_metadata(writer, key, value)
    for other, array in hf_weights().items():
        if other != name:
            writer.add_tensor(other, array)
    writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_q6_k_block_by_hand(tmp_path):
    # ggml-quants.c, dequantize_row_q6_K: 4 low bits in ql[128], 2 high bits in qh[64], 16 int8 scales, one float16 scale.
    rng = np.random.default_rng(1)
    ql, qh = rng.integers(0, 256, 128, np.uint8), rng.integers(0, 256, 64, np.uint8)
    scales, d = rng.integers(-128, 128, 16).astype(np.int8), np.float16(0.01)
    raw = np.concatenate([ql, qh, scales.view(np.uint8), np.array([d]).view(np.uint8)])[None]
    _write_with_extra(tmp_path / "m.gguf", "blk.0.ffn_up.weight", raw, Q.Q6_K)
    expected = np.empty(256)
    for half in range(2):
        for i in range(32):
            low, high = [int(ql[64 * half + i]), int(ql[64 * half + i + 32])], int(qh[32 * half + i])
            codes = [low[0] & 15, low[1] & 15, low[0] >> 4, low[1] >> 4]
            for part in range(4):
                q = (codes[part] | ((high >> (2 * part)) & 3) << 4) - 32
                expected[128 * half + 32 * part + i] = float(d) * int(scales[8 * half + i // 16 + 2 * part]) * q
    with GgufCheckpoint(tmp_path / "m.gguf") as checkpoint:
        # d * scale is rounded to float32 once and its product with q once: 2 eps.
        np.testing.assert_allclose(checkpoint.read(PREFIX + "mlp.up_proj.weight")[0], expected, rtol=2**-22, atol=0)


def test_a_q4_1_block_by_hand(tmp_path):
    # float16 scale, float16 minimum, then 16 bytes: low nibbles are values 0..15, high nibbles 16..31.
    nibbles = np.arange(32) % 16
    packed = (nibbles[:16] | nibbles[16:] << 4).astype(np.uint8)
    raw = np.concatenate([np.array([0.5, -3.0], np.float16).view(np.uint8), packed])[None]
    _write_with_extra(tmp_path / "m.gguf", "blk.0.ffn_up.weight", raw, Q.Q4_1)
    with GgufCheckpoint(tmp_path / "m.gguf") as checkpoint:
        np.testing.assert_array_equal(checkpoint.read(PREFIX + "mlp.up_proj.weight")[0], nibbles * 0.5 - 3.0)


def test_header_equals_the_librarys_reader(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf",
        metadata={"general.name": "größe", "x.floats": [0.5, -1.5], "x.bools": [True, False], "x.ints": [3, -4], "general.alignment": 64},
        kind=Q.Q8_0,
    )
    reader, file = GGUFReader(path), GgufFile(path)
    assert file.metadata == {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert ours == (tuple(tensor.shape.tolist()[::-1]), tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        np.testing.assert_array_equal(file.data(tensor.name), tensor.data.view(np.uint8).reshape(file.data(tensor.name).shape))
    file.close()


def test_arrays_outlive_the_file_and_are_writable(tmp_path):
    for kind in (Q.F32, Q.Q8_0):
        path = write_gguf(tmp_path / f"{kind.name}.gguf", kind=kind)
        with GgufCheckpoint(path) as checkpoint:
            arrays = [checkpoint.read(name) for name in sorted(checkpoint.names())]
        path.unlink()
        for array in arrays:
            assert array.flags.c_contiguous
            array += 1
        assert all(np.isfinite(array).all() for array in arrays)


def test_closed_and_unknown_tensor(tmp_path):
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "m.gguf"))
    for method in (checkpoint.read, checkpoint.shape, checkpoint.dtype):
        with pytest.raises(CheckpointError, match=r"m\.gguf: has no tensor 'nope'"):
            method("nope")
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(CheckpointError, match=r"m\.gguf: the checkpoint is closed"):
        checkpoint.read("model.norm.weight")


def test_missing_and_not_a_gguf(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"none\.gguf: no such file"):
        GgufCheckpoint(tmp_path / "none.gguf")
    for content in (b"", b"GG", b"PK\x03\x04 a zip"):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"bad\.gguf: is not a GGUF file"):
            GgufCheckpoint(tmp_path / "bad.gguf")
    with pytest.raises(CheckpointError, match="cannot be read"):
        GgufCheckpoint(tmp_path)


def test_cut_short_anywhere(tmp_path):
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    header_end = whole.index(b"blk.0.ffn_down.weight") + 60
    lengths = [*range(4, header_end, 13), *range(header_end, len(whole) - 1, 1999), len(whole) - 1]
    for length in lengths:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: is cut short"):
            GgufCheckpoint(cut)
    cut.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"tensor 'output\.weight' ends at byte [\d,]+, the file has"):
        GgufCheckpoint(cut)


def test_damaged_headers_give_our_errors_only(tmp_path):
    whole = write_gguf(tmp_path / "m.gguf", metadata={"x.nested": [1, 2, 3]}, kind=Q.Q8_0).read_bytes()
    header_end = whole.index(b"blk.0.ffn_down.weight") + 60
    rng = np.random.default_rng(0)
    path, messages = tmp_path / "damaged.gguf", []
    for _ in range(400):
        damaged = bytearray(whole)
        for position in rng.integers(4, header_end, rng.integers(1, 4)):
            damaged[position] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            GgufCheckpoint(path).close()
        except (CheckpointError, UnsupportedModelError) as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert all(str(path) in message for message in messages)


def _patched(tmp_path: Path, old: bytes, new: bytes) -> Path:
    whole = write_gguf(tmp_path / "m.gguf", metadata={"x.key1": 7, "x.key2": 8, "x.text": "plain"}).read_bytes()
    assert len(old) == len(new)
    assert whole.count(old) == 1
    path = tmp_path / "patched.gguf"
    path.write_bytes(whole.replace(old, new))
    return path


def test_versions_and_damaged_entries(tmp_path):
    u32 = lambda value: value.to_bytes(4, "little")  # noqa: E731
    u64 = lambda value: value.to_bytes(8, "little")  # noqa: E731
    for version, match in ((1, "has GGUF version 1; built are"), (4, "has GGUF version 4"), (3 << 24, "is big-endian")):
        with pytest.raises(UnsupportedModelError, match=match):
            GgufCheckpoint(_patched(tmp_path, b"GGUF" + u32(3), b"GGUF" + u32(version)))
    with pytest.raises(CheckpointError, match=r"metadata key 'x\.key1' appears twice"):
        GgufCheckpoint(_patched(tmp_path, b"x.key2", b"x.key1"))
    with pytest.raises(CheckpointError, match=r"metadata value 'x\.text' holds text that is not UTF-8"):
        GgufCheckpoint(_patched(tmp_path, b"plain", b"pl\xffin"))
    with pytest.raises(CheckpointError, match=r"metadata value 'x\.key1' has metadata type 99"):
        GgufCheckpoint(_patched(tmp_path, b"x.key1" + u32(4), b"x.key1" + u32(99)))
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.0\.attn_k\.weight' appears twice"):
        # "blk.0.attn_q.weight" and "blk.0.attn_k.weight" have the same length.
        GgufCheckpoint(_patched(tmp_path, b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"))
    name = b"output_norm.weight"
    with pytest.raises(CheckpointError, match=r"tensor 'output_norm\.weight' has 9 dimensions; GGUF allows 1 to 4"):
        GgufCheckpoint(_patched(tmp_path, name + u32(1), name + u32(9)))
    with pytest.raises(UnsupportedModelError, match=r"tensor 'output_norm\.weight' has type number 999"):
        GgufCheckpoint(_patched(tmp_path, name + u32(1) + u64(32) + u32(0), name + u32(1) + u64(32) + u32(999)))
    with pytest.raises(CheckpointError, match=r"'output_norm\.weight' has rows of 33 values, not a multiple of Q8_0's block of 32"):
        GgufCheckpoint(_patched(tmp_path, name + u32(1) + u64(32) + u32(0), name + u32(1) + u64(33) + u32(8)))


@pytest.mark.parametrize("length", [1, 33, 65, 97])  # of a text in the header, so that the padding before the data differs
def test_alignment_is_obeyed(tmp_path, length):
    weights = hf_weights()
    path = write_gguf(tmp_path / "m.gguf", weights, {"general.alignment": 128, "general.name": "x" * length})
    with GgufCheckpoint(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("model.norm.weight"), weights["output_norm.weight"])


def test_alignment_must_be_a_power_of_two(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", metadata={"general.alignment": 64})
    path.write_bytes(path.read_bytes().replace(b"general.alignment\x04\x00\x00\x00\x40", b"general.alignment\x04\x00\x00\x00\x30"))
    with pytest.raises(CheckpointError, match=r"general\.alignment is 48; it must be a power of two"):
        GgufCheckpoint(path)


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path):
    _write_with_extra(tmp_path / "m.gguf", "blk.0.ffn_up.weight", np.zeros((4, 8), np.int32), Q.I32)
    with pytest.raises(
        UnsupportedModelError, match=r"tensor 'blk\.0\.ffn_up\.weight' has type I32, which the gguf library cannot dequantise"
    ):
        GgufCheckpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "blk.0.attn_norm.bias", "output.bias", "blk.0.ffn_gate_exps.weight", "extra"])
def test_a_tensor_without_a_place_is_named(tmp_path, name):
    path = write_gguf(tmp_path / "m.gguf", hf_weights() | {name: np.zeros(32, np.float32)})
    with pytest.raises(UnsupportedModelError, match=f"tensor '{name}' has no place in a Llama model"):
        GgufCheckpoint(path)


def test_q_rows_must_fit_the_heads(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", metadata={"llama.attention.head_count_kv": 4})
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.0\.attn_k\.weight' has 16 rows, but the metadata's 4 heads of 8 need 32"):
        GgufCheckpoint(path)


def test_tokenizer_gets_the_metadata(tmp_path, monkeypatch):
    seen = []
    text = types.ModuleType("pagedjax.text")
    text.Tokenizer = types.SimpleNamespace(from_gguf=lambda metadata: seen.append(metadata) or "tokenizer")
    monkeypatch.setitem(sys.modules, "pagedjax.text", text)
    with GgufCheckpoint(write_gguf(tmp_path / "m.gguf")) as checkpoint:
        assert checkpoint.tokenizer() == "tokenizer"
    assert seen[0]["tokenizer.ggml.tokens"][:2] == ["t0", "t1"]
    assert len(seen[0]["tokenizer.ggml.tokens"]) == V


@pytest.mark.parity
@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.Q8_0, Q.Q4_1], ids=lambda kind: kind.name)
def test_equals_transformers_reader(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = write_gguf(tmp_path / "m.gguf", kind=kind)
    with GgufCheckpoint(path) as checkpoint:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**checkpoint.config))
        theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
        assert set(theirs) == checkpoint.names()
        assert N != K
        for name, tensor in theirs.items():
            np.testing.assert_array_equal(checkpoint.read(name).astype(np.float32), tensor.float().numpy(), err_msg=name)


def test_permute_of_the_tests_is_the_inverse():
    array = np.arange(32.0)
    np.testing.assert_array_equal(_unpermute(permute(array, 4), 4), array)
