"""Inputs, sizes and dynamic shapes that the architectures share."""

import torch

IDS = torch.tensor([[2, 17, 5, 9, 3], [2, 40, 8, 3, 0], [2, 6, 3, 0, 0]])
MASK = (IDS != 0).long()
IMAGE = torch.randn(2, 3, 32, 32)
SMALL = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 64,
}  # fmt: skip
GPT = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
T5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
VISION = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
LLAMA = {**SMALL, "num_key_value_heads": 1, "use_cache": False}
Shapes = dict[str, dict[int, str] | tuple[int, int]]
TEXT: Shapes = {
    "input_ids": {0: "batch", 1: "length"},
    "attention_mask": {0: "batch", 1: "length"},
    "length": (1, 64),  # of the positions that most of them have
}
PIXELS: Shapes = {"pixel_values": {0: "batch"}}
