"""Llama 3's own vocabulary: ids as tiktoken gives them, one BOS in a chat, and three tokens that end an answer.

The vocabulary comes from Meta's package on PyPI, under Meta's licence: it is downloaded when the tests run and stays in their
temporary folder. The Hugging Face folder around it is made here, the chat template in the header format that Meta documents.
"""

import base64
import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, pre_tokenizers, processors

from pagedjax.checkpoint import open_checkpoint
from pagedjax.config import ModelConfig
from pagedjax.load import eos_token_ids
from pagedjax.params import hf_names
from pagedjax.text import Tokenizer
from tests.host.tiny_vocabularies import CONTROL, NORMAL, gguf, write_folder

pytestmark = pytest.mark.parity

PACKAGE, MEMBER = "llama-models==0.3.0", "llama_models/llama3/tokenizer.model"
NUM_RANKS, VOCAB_SIZE = 128_000, 128_256
BOS, END_OF_TEXT, END_OF_MESSAGE, END_OF_TURN = 128_000, 128_001, 128_008, 128_009
NAMED = {
    BOS: "<|begin_of_text|>",
    END_OF_TEXT: "<|end_of_text|>",
    128_004: "<|finetune_right_pad_id|>",
    128_006: "<|start_header_id|>",
    128_007: "<|end_header_id|>",
    END_OF_MESSAGE: "<|eom_id|>",
    END_OF_TURN: "<|eot_id|>",
    128_010: "<|python_tag|>",
}
SPECIAL = {NAMED.get(i, f"<|reserved_special_token_{i}|>"): i for i in range(NUM_RANKS, VOCAB_SIZE)}
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": BOS,
    "eos_token_id": END_OF_TEXT,
}
# Prompts of one token, with the token that the model of `folder` follows each with.
FOLLOWED_BY = {10: END_OF_TEXT, 11: END_OF_MESSAGE, 12: END_OF_TURN, 13: 20, 20: 20}

TEXTS = [
    "hi",
    "Hello, world! It's 12345678 o'clock; WE'LL see.",
    "  two  spaces   and\ttabs\t\n\n\n  lines\r\n\r\n end  ",
    "def f(x):\n    return x ** 2  # comment\n",
    "नमस्ते दुनिया 你好，世界！ こんにちは مرحبا שלום Привет",
    "👨‍👩‍👧‍👦 👍🏽 🇮🇳 e\u0301 \u00a0\u2003\u200b½ ²³ Ⅷ ١٢٣٤",
    "công việc của nhiều người",  # words that no sequence of merges reaches
    "<|eot_id|> and <|begin_of_text|> in text",
    "a" * 300 + " " * 100 + "!?" * 50 + "0" * 40,
    "".join(map(chr, range(0x20, 0x250))),
    "\x00\x01\x7f\ufeff\ufffd\U0010ffff",
]


def pip(*arguments):
    """Run pip; where it cannot deliver, skip with what it said."""
    command = [sys.executable, "-m", "pip", *arguments, "--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip did not end in time: {' '.join(arguments)}")
    if ran.returncode:
        pytest.skip(f"pip cannot fetch {' '.join(arguments)}: {(ran.stderr.strip() or 'it said nothing').splitlines()[-1]}")


@pytest.fixture(scope="module")
def vocabulary_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama-models")
    pip("download", PACKAGE, "--dest", str(folder))
    (wheel,) = folder.glob("llama_models-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.extract(MEMBER, folder)


@pytest.fixture(scope="module")
def ranks(vocabulary_file):
    """Bytes of each token to its rank, which is its id."""
    with open(vocabulary_file, "rb") as file:
        read = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in file)}
    assert sorted(read.values()) == list(range(NUM_RANKS))
    return read


@pytest.fixture(scope="module")
def spelled(ranks):
    """The vocabulary and the merges in GPT-2's spelling. A token may come of each two tokens that it is made of."""
    # Printable bytes stand for themselves, the others for the characters from 256 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    character = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    spelling = {token: "".join(character[byte] for byte in token) for token in ranks}
    merges = []
    for token in ranks:  # in order of rank
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        halves = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        merges += [(spelling[left], spelling[right]) for left, right in sorted(halves, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))]
    return {spelling[token]: rank for token, rank in ranks.items()}, merges


@pytest.fixture(scope="module")
def folder(spelled, tmp_path_factory):
    """A Llama 3 folder, weights included: a model that follows a token with what `FOLLOWED_BY` says."""
    vocabulary, merges = spelled
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(SPLIT), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.post_processor = processors.TemplateProcessing(single=f"{NAMED[BOS]} $A", special_tokens=[(NAMED[BOS], BOS)])
    path = write_folder(
        tmp_path_factory.mktemp("llama3"),
        backend,
        config=CONFIG,
        generation_config={"bos_token_id": BOS, "eos_token_id": [END_OF_TEXT, END_OF_MESSAGE, END_OF_TURN]},
        tokenizer_config={"bos_token": NAMED[BOS], "eos_token": NAMED[END_OF_TURN], "chat_template": TEMPLATE},
    )
    # Zeros make the layer add nothing, so that the output head sees the token's own embedding.
    weights = {name: np.zeros(shape, np.float32) for name, shape in hf_names(ModelConfig.from_hf(CONFIG)).items()}
    weights["model.norm.weight"][:] = 1
    for direction, (token, follower) in enumerate(FOLLOWED_BY.items()):
        weights["model.embed_tokens.weight"][token, direction] = 1
        weights["lm_head.weight"][follower, direction] = 1
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def tiktoken_ids(vocabulary_file, tmp_path_factory):
    """What tiktoken makes of `TEXTS`, special tokens included. A process of its own leaves this one's packages as they are."""
    packages = tmp_path_factory.mktemp("tiktoken")
    pip("install", "--no-compile", "--target", str(packages), "tiktoken", "regex")
    code = """
        import base64, json, sys
        sys.path.insert(0, sys.argv[1])
        import tiktoken
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in open(sys.argv[2], "rb"))}
        given = json.load(sys.stdin)
        encoding = tiktoken.Encoding("llama3", pat_str=given["split"], mergeable_ranks=ranks, special_tokens=given["special"])
        print(json.dumps([encoding.encode(text, allowed_special="all") for text in given["texts"]]))
    """
    ran = subprocess.run(
        [sys.executable, "-c", "if True:" + code, str(packages), vocabulary_file],
        input=json.dumps({"split": SPLIT, "special": SPECIAL, "texts": TEXTS}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_the_vocabulary_is_whole(tokenizer):
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.special_ids == frozenset(range(NUM_RANKS, VOCAB_SIZE))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, END_OF_TURN)


@pytest.mark.parametrize("index", range(len(TEXTS)))
def test_ids_are_tiktokens(tokenizer, tiktoken_ids, index):
    ids = tokenizer.encode(TEXTS[index], add_special_tokens=False)
    assert ids == tiktoken_ids[index]
    assert tokenizer.encode(TEXTS[index]) == [BOS, *ids]
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXTS[index]


def test_the_gguf_tokenizer_gives_the_same_ids(tokenizer, spelled):
    vocabulary, merges = spelled
    tokens = [*((token, NORMAL) for token in vocabulary), *((token, CONTROL) for token in SPECIAL)]
    keys = {"pre": "llama-bpe", "merges": [f"{left} {right}" for left, right in merges], "bos_token_id": BOS, "eos_token_id": END_OF_TURN}
    from_gguf = Tokenizer.from_gguf(gguf("gpt2", tokens, **keys))
    assert [from_gguf.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]


def test_a_chat_begins_with_the_only_bos(tokenizer):
    header, end_header = SPECIAL["<|start_header_id|>"], SPECIAL["<|end_header_id|>"]

    def plain(text):
        return tokenizer.encode(text, add_special_tokens=False)

    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert ids.count(BOS) == 1 and ids[0] == BOS
    user, assistant = ([header, *plain(role), end_header, *plain("\n\n")] for role in ("user", "assistant"))
    assert ids == [BOS, *user, *plain("hi"), END_OF_TURN, *assistant]


def test_the_folder_names_every_end_token(folder):
    with open_checkpoint(folder) as checkpoint:
        assert eos_token_ids(checkpoint) == (END_OF_TEXT, END_OF_MESSAGE, END_OF_TURN)


def test_each_end_token_ends_an_answer(folder):
    from pagedjax import LLM, SamplingParams

    llm = LLM(folder, max_num_seqs=4, kv_cache_bytes=1 << 20)
    assert sorted(llm.eos_token_ids) == [END_OF_TEXT, END_OF_MESSAGE, END_OF_TURN]
    prompts = [{"prompt_token_ids": [token]} for token in (10, 11, 12, 13)]
    outputs = [o.outputs[0] for o in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)]
    assert [o.token_ids for o in outputs] == [[END_OF_TEXT], [END_OF_MESSAGE], [END_OF_TURN], [20] * 4]
    assert [o.finish_reason for o in outputs] == ["stop", "stop", "stop", "length"]
