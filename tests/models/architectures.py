"""Architectures that nobody here wrote, with random weights: lane `models`."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from tests.models.inputs import (
    GPT,
    IDS,
    IMAGE,
    LLAMA,
    MASK,
    PIXELS,
    SMALL,
    T5,
    TEXT,
    VISION,
    Shapes,
)
from torch import Tensor, nn

from kd_nn import TensorDictModule

transformers = pytest.importorskip("transformers", reason="the lane `models` installs it")


class Named(nn.Module):
    """Call a model of transformers by keyword; give the parts of its result that are asked for."""

    def __init__(self, net: nn.Module, arguments: list[str], parts: list[str]) -> None:
        super().__init__()
        self.net = net
        self.arguments = arguments
        self.parts = parts

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = self.net(**dict(zip(self.arguments, tensors, strict=True)), return_dict=True)
        return tuple(result[part] for part in self.parts)


@dataclass
class Case:
    """A model by the name of its classes, its settings, and the outputs looked at."""

    name: str
    settings: Mapping[str, object]
    parts: tuple[str, ...] = ("last_hidden_state",)
    dynamic: Shapes | None = None
    config: str = ""
    not_onnx: str = ""
    """The operator of its own for which torch has no words in ONNX."""

    def module(self) -> TensorDictModule:
        torch.manual_seed(0)
        prefix = self.name.removesuffix("Model").removesuffix("ForMaskedLM").removesuffix("Encoder")
        config = getattr(transformers, self.config or f"{prefix}Config")(**self.settings)
        arguments = list(self.example)
        net = Named(getattr(transformers, self.name)(config), arguments, list(self.parts))
        return TensorDictModule(net, in_keys=list(arguments), out_keys=list(self.parts))

    @property
    def shapes(self) -> Shapes:
        return self.dynamic or TEXT

    @property
    def example(self) -> dict[str, Tensor]:
        known = {"input_ids": IDS, "attention_mask": MASK, "pixel_values": IMAGE}
        return {name: known[name] for name in known if name in self.shapes}


CASES = [
    Case("BertModel", SMALL, ("last_hidden_state", "pooler_output")),
    Case("BertForMaskedLM", SMALL, ("logits",)),
    Case("RobertaModel", SMALL | {"pad_token_id": 0}),
    Case(
        "DistilBertModel",
        {"vocab_size": 50, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32},
    ),
    Case("ElectraModel", SMALL | {"embedding_size": 16}),
    Case("GPT2Model", GPT | {"use_cache": False}),
    Case("LlamaModel", LLAMA),
    Case("MistralModel", LLAMA),
    Case("MixtralModel", LLAMA | {"num_local_experts": 2}, not_onnx="grouped_mm_fallback"),
    Case("T5EncoderModel", T5, config="T5Config"),
    Case("ViTModel", VISION, dynamic=PIXELS),
    Case("DeiTModel", VISION, dynamic=PIXELS),
    Case("BeitModel", VISION | {"use_relative_position_bias": True}, dynamic=PIXELS),
    Case(
        "ConvNextModel", {"hidden_sizes": [8, 8], "depths": [1, 1], "num_stages": 2}, dynamic=PIXELS
    ),
    Case(
        "ResNetModel",
        {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"},
        dynamic=PIXELS,
    ),
    Case("AlbertModel", SMALL | {"embedding_size": 16}),
    Case("XLMRobertaModel", SMALL | {"pad_token_id": 0}),
    Case("MPNetModel", SMALL | {"pad_token_id": 0}),
    Case("CamembertModel", SMALL | {"pad_token_id": 0}),
    Case(
        "ModernBertModel",
        SMALL | {"pad_token_id": 0, "local_attention": 8, "attn_implementation": "eager"},
    ),
    Case("DebertaV2Model", SMALL),
    Case("GPTNeoXModel", SMALL | {"use_cache": False}),
    Case(
        "OPTModel",
        {
            "vocab_size": 50,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "ffn_dim": 32,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 16,
            "use_cache": False,
        },
    ),
    Case("Qwen2Model", LLAMA),
    Case("PhiModel", LLAMA),
    Case("GemmaModel", LLAMA | {"head_dim": 8}),
    Case("FalconModel", SMALL | {"use_cache": False, "num_kv_heads": 1}),
    Case(
        "BloomModel",
        {"vocab_size": 50, "hidden_size": 16, "n_layer": 1, "n_head": 2, "use_cache": False},
    ),
    Case("Dinov2Model", VISION, dynamic=PIXELS),
    Case(
        "SwinModel",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "window_size": 4,
        },
        dynamic=PIXELS,
    ),
    Case(  # with the usual small weights what it gives is 1e-25, and no difference would be seen
        "MobileNetV2Model",
        {"depth_multiplier": 0.35, "image_size": 32, "initializer_range": 0.24},
        dynamic=PIXELS,
    ),
    Case(
        "RegNetModel",
        {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "groups_width": 8},
        dynamic=PIXELS,
    ),
    Case(
        "SegformerModel",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "hidden_sizes": [8, 8],
            "num_attention_heads": [1, 2],
            "sr_ratios": [2, 1],
            "patch_sizes": [3, 3],
            "strides": [4, 2],
            "mlp_ratios": [2, 2],
        },
        dynamic=PIXELS,
    ),
    Case("SiglipVisionModel", VISION, dynamic=PIXELS),
    Case("CLIPVisionModel", VISION, dynamic=PIXELS),
]
