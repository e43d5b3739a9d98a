"""A language model that any engine loads and that says nothing: a Llama of 0.7 million random weights.

    build/engines/vllm/bin/python -m tests.engines.tiny_model FOLDER [--gguf]

It needs numpy, tokenizers and safetensors (and gguf), hence the engine's own environment. The folder becomes
what `vllm serve` takes, with a tokenizer trained on the spot on the prose of Python's own help; `--gguf` adds
`tiny.gguf`, which is what llama.cpp's server takes.

The same weights and the same tokenizer each time, so greedy answers repeat. Tokens that end an answer, or
that are no printable ASCII, have an output row of zeros: some other row always wins, so that a request runs
to its `max_tokens`, and what comes is text.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY, HIDDEN, INNER, LAYERS, CONTEXT = 1000, 128, 512, 2, 4096
HEAD_SIZE = 64
"""One of the few that attention on a CPU has code for."""
QUERY_HEADS, KEY_HEADS = 2, 1
ROPE_BASE, NORM_EPSILON = 10_000.0, 1e-5

END, TURN, TURN_END = SPECIAL = ("<|end|>", "<|turn|>", "<|turn_end|>")
TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }} "
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "<|turn_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant {% endif %}"
)

Weights = dict[str, Any]
"""Name → array of float32, by the names of Hugging Face's Llama."""


def train_tokenizer() -> Tokenizer:
    """Byte pairs, so that every text has tokens; the special ones are numbers 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for _, text in sorted(topics.items())], trainer)
    return tokenizer


def random_weights(tokenizer: Tokenizer) -> Weights:
    """Small ones inside; a larger output layer, so that one token is clearly the likeliest."""
    draw = np.random.default_rng(seed=1)

    def matrix(rows: int, columns: int, spread: float = 0.08) -> Any:
        return draw.normal(0.0, spread, (rows, columns)).astype(np.float32)

    queries, keys = QUERY_HEADS * HEAD_SIZE, KEY_HEADS * HEAD_SIZE
    weights: Weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, spread=1.0),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN, spread=0.5),
    }
    for layer in range(LAYERS):
        inside = {
            "input_layernorm": np.ones(HIDDEN, np.float32),
            "self_attn.q_proj": matrix(queries, HIDDEN),
            "self_attn.k_proj": matrix(keys, HIDDEN),
            "self_attn.v_proj": matrix(keys, HIDDEN),
            "self_attn.o_proj": matrix(HIDDEN, queries),
            "post_attention_layernorm": np.ones(HIDDEN, np.float32),
            "mlp.gate_proj": matrix(INNER, HIDDEN),
            "mlp.up_proj": matrix(INNER, HIDDEN),
            "mlp.down_proj": matrix(HIDDEN, INNER),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": array for name, array in inside.items()}
    for token in range(VOCABULARY):
        if not _may_be_said(tokenizer.decode([token])):
            weights["lm_head.weight"][token] = 0.0
    return weights


def _may_be_said(text: str) -> bool:
    """Special tokens decode to nothing, halves of a character to a sign for that."""
    return text != "" and all(character.isascii() and character.isprintable() for character in text)


def configuration() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "hidden_act": "silu",
        "num_hidden_layers": LAYERS,
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD_SIZE,
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": ROPE_BASE,
        "tie_word_embeddings": False,
        "bos_token_id": SPECIAL.index(END),
        "eos_token_id": SPECIAL.index(TURN_END),
        "pad_token_id": SPECIAL.index(END),
    }


def tokenizer_configuration() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": END,
        "eos_token": TURN_END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }


def write_model(folder: Path, *, gguf: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = random_weights(tokenizer)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    files = {"config.json": configuration(), "tokenizer_config.json": tokenizer_configuration()}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if gguf:
        write_gguf(folder / "tiny.gguf", tokenizer, weights)


# ── the same for llama.cpp ───────────────────────────────────────────────────────────────────────────────

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROTATED = {"self_attn.q_proj": QUERY_HEADS, "self_attn.k_proj": KEY_HEADS}


def write_gguf(path: Path, tokenizer: Tokenizer, weights: Weights) -> None:
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(QUERY_HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(NORM_EPSILON)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = [tokenizer.id_to_token(token) for token in range(VOCABULARY)]
    kinds = gguf.TokenType
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.CONTROL if token in SPECIAL else kinds.NORMAL for token in tokens])
    writer.add_token_merges(list(_merges(tokenizer)))
    writer.add_bos_token_id(SPECIAL.index(END))
    writer.add_eos_token_id(SPECIAL.index(TURN_END))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, array in weights.items():
        writer.add_tensor(*_as_gguf(name.removesuffix(".weight"), array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _merges(tokenizer: Tokenizer) -> Iterator[str]:
    for merge in json.loads(tokenizer.to_str())["model"]["merges"]:
        yield merge if isinstance(merge, str) else " ".join(merge)


def _as_gguf(name: str, array: Any) -> tuple[str, Any]:
    """Its name and order there. Hugging Face turns the first half of a head with the second, llama.cpp each
    even row with the odd one behind it."""
    block = ""
    if name.startswith("model.layers."):
        _, _, layer, name = name.split(".", 3)
        block = f"blk.{layer}."
    if name in _ROTATED:
        halves = array.reshape(_ROTATED[name], 2, HEAD_SIZE // 2, HIDDEN)
        array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
    return f"{block}{_GGUF_NAMES[name]}.weight", array


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", action="store_true", help="write tiny.gguf as well")
    given = parser.parse_args()
    write_model(given.folder, gguf=given.gguf)
