"""Write the pocket model as one GGUF file, for llama.cpp: float32, as the NumPy engine computes.

    pip install gguf
    python training/pocket/export_gguf.py pocket.gguf

Send llama.cpp ids, as ``tokentrace`` does. None of its built-in ways to split text is the pocket tokenizer's: the
file names the closest one, so text that llama.cpp encodes may get other ids.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tokentrace.pocket.model import read_safetensors

POCKET = Path(__file__).resolve().parents[2] / "src" / "tokentrace" / "pocket"
SPLIT = "qwen2"
"""A way to split text that llama.cpp has, with every digit on its own."""


def export(target: Path, folder: Path = POCKET) -> None:
    """Write the model of a folder with config.json, tokenizer.json and model.safetensors to `target`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN3])
    add_shape(writer, config)
    add_vocabulary(writer, config, tokenizer)
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text(encoding="utf-8"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, tensor in read_safetensors(folder / "model.safetensors").items():
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        if gguf_name is None:
            raise SystemExit(f"{name}: there is no such tensor in {writer.arch}")
        writer.add_tensor(gguf_name, np.ascontiguousarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the numbers of config.json. Embeddings are tied: there is no output matrix."""
    writer.add_name("pocket")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def add_vocabulary(writer: gguf.GGUFWriter, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    """Add every id with its text and kind, and the merges."""
    tokens: list[str] = [""] * config["vocab_size"]
    kinds = [int(gguf.TokenType.UNUSED)] * len(tokens)
    for text, index in tokenizer["model"]["vocab"].items():
        tokens[index], kinds[index] = text, int(gguf.TokenType.NORMAL)
    for row in tokenizer["added_tokens"]:
        kind = gguf.TokenType.CONTROL if row["special"] else gguf.TokenType.USER_DEFINED
        tokens[row["id"]], kinds[row["id"]] = row["content"], int(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(SPLIT)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the file to write")
    export(parser.parse_args().target)
