"""Architectures of libraries other than transformers, with random weights: lane `models`."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.models.inputs import IDS, MASK, SMALL, TEXT, Shapes
from torch import Tensor, nn

from kd_nn import TensorDictModule

diffusers = pytest.importorskip("diffusers", reason="the lane `models` installs it")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the libraries import
    import peft
    import sb3_contrib.common.recurrent.policies as recurrent
    import stable_baselines3.common.policies as on_policy
    import stable_baselines3.dqn.policies as values
    import stable_baselines3.sac.policies as sac
    import torch_geometric.nn.models as graphs
    import transformers
    from gymnasium import spaces

SIGHT = spaces.Box(-1.0, 1.0, (4,), np.float32)
MOVES = spaces.Box(-1.0, 1.0, (2,), np.float32)
NOISY = {"sample": torch.randn(2, 1, 8, 8), "step": torch.tensor([3, 40])}
TEXTS = {"text": torch.randn(2, 3, 8)}
LATENT = {"sample": torch.randn(2, 4, 8, 8)}
BLOCKS = {"block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4}
NODES = {
    "x": torch.randn(5, 4),
    "source": torch.tensor([0, 1, 2, 3, 4, 0]),
    "target": torch.tensor([1, 2, 3, 4, 0, 2]),
}
GRAPH: Shapes = {"x": {0: "node"}, "source": {0: "edge"}, "target": {0: "edge"}}
OBS = {"obs": torch.randn(3, 4)}
MEMORY = {"h": torch.zeros(3, 8), "c": torch.zeros(3, 8)}
Forward = Callable[..., Tensor | tuple[Tensor, ...]]


class Called(nn.Module):
    """Call a model of a library as its authors do; give a tuple."""

    def __init__(self, net: nn.Module, call: Forward) -> None:
        super().__init__()
        self.net = net
        self.call = call

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = self.call(self.net, *tensors)
        return (result,) if isinstance(result, Tensor) else result


@dataclass
class Library:
    """A model of a library, and how it is called."""

    name: str
    make: Callable[[], nn.Module]
    call: Forward
    example: dict[str, Tensor]
    parts: tuple[str, ...] = ("result",)
    dynamic: Shapes | None = None
    not_onnx: str = ""

    def module(self) -> TensorDictModule:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net = Called(self.make(), self.call)
        return TensorDictModule(net, in_keys=list(self.example), out_keys=list(self.parts))

    @property
    def shapes(self) -> Shapes:
        return self.dynamic or batch_of(self.example)


def batch_of(example: dict[str, Tensor], most: int | None = None) -> Shapes:
    """Name the leading dimensions of all inputs; the layers of diffusers change at 64 rows."""
    shapes: Shapes = {name: {0: "batch"} for name in example}
    return shapes if most is None else {**shapes, "batch": (1, most)}


def first(net: nn.Module, *tensors: Tensor) -> Tensor:
    """Return the one tensor of a result of diffusers."""
    result: tuple[Tensor, ...] = net(*tensors, return_dict=False)
    return result[0]


def on_edges(net: nn.Module, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Call a graph network with its edges in one tensor."""
    result: Tensor = net(x, torch.stack([source, target]))
    return result


def unet() -> nn.Module:
    kinds = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
    kinds["up_block_types"] = ("AttnUpBlock2D", "UpBlock2D")
    net: nn.Module = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, **BLOCKS, **kinds
    )
    return net


def conditional_unet() -> nn.Module:
    net: nn.Module = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        cross_attention_dim=8,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        **BLOCKS,
    )
    return net


def coder() -> nn.Module:
    net: nn.Module = diffusers.AutoencoderKL(
        in_channels=1,
        out_channels=1,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        **BLOCKS,
    )
    return net


def dit() -> nn.Module:
    net: nn.Module = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=1,
        sample_size=8,
        num_embeds_ada_norm=100,
        norm_num_groups=4,
    )
    return net


def lora() -> nn.Module:
    net = transformers.BertModel(transformers.BertConfig(**SMALL))
    settings = peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
    adapted: nn.Module = peft.get_peft_model(net, settings)
    return adapted


def recurrent_policy() -> nn.Module:
    policy: nn.Module = recurrent.RecurrentActorCriticPolicy(
        SIGHT, MOVES, lambda _: 1e-3, net_arch=[8], lstm_hidden_size=8, enable_critic_lstm=False
    )
    return policy


def recurrent_step(net: nn.Module, obs: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """Run one step of a recurrent policy by its parts: its own call decides by values."""
    assert isinstance(net, recurrent.RecurrentActorCriticPolicy)
    features = net.extract_features(obs)
    found, (new_h, new_c) = net.lstm_actor(features[None], (h[None], c[None]))
    return net.action_net(net.mlp_extractor.forward_actor(found[0])), new_h[0], new_c[0]


def parametrised() -> nn.Module:
    norm = nn.utils.parametrizations
    layers = norm.weight_norm(nn.Linear(4, 8)), norm.spectral_norm(nn.Linear(8, 8)), nn.Tanh()
    return nn.Sequential(*layers, norm.orthogonal(nn.Linear(8, 8)))


def bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
        max_position_embeddings=64, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    net: nn.Module = transformers.BartModel(config)
    return net


def series() -> nn.Module:
    config = transformers.PatchTSTConfig(
        num_input_channels=2, context_length=32, patch_length=8, patch_stride=8, d_model=16,
        num_hidden_layers=1, num_attention_heads=2, ffn_dim=16,
    )  # fmt: skip
    net: nn.Module = transformers.PatchTSTModel(config)
    return net


def yolos() -> nn.Module:
    config = transformers.YolosConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=[32, 32], patch_size=8, num_detection_tokens=5,
    )  # fmt: skip
    net: nn.Module = transformers.YolosForObjectDetection(config)
    return net


LIBRARIES = [
    Library("UNet2DModel", unet, first, NOISY, dynamic=batch_of(NOISY, most=63)),
    Library(
        "UNet2DConditionModel",
        conditional_unet,
        first,
        {**NOISY, **TEXTS},
        dynamic=batch_of({**NOISY, **TEXTS}, most=63),
    ),
    Library(
        "AutoencoderKL",
        coder,
        lambda net, x: net.decode(x, return_dict=False)[0],
        LATENT,
        dynamic=batch_of(LATENT, most=63),
    ),
    Library(
        "DiTTransformer2DModel",
        dit,
        lambda net, x, t, y: net(x, t, y, return_dict=False)[0],
        {**LATENT, "step": torch.tensor([3, 40]), "label": torch.tensor([1, 5])},
    ),
    Library("GCN", lambda: graphs.GCN(4, 8, 2, 2), on_edges, NODES, dynamic=GRAPH),
    Library("GraphSAGE", lambda: graphs.GraphSAGE(4, 8, 2, 2), on_edges, NODES, dynamic=GRAPH),
    Library("GIN", lambda: graphs.GIN(4, 8, 2, 2), on_edges, NODES, dynamic=GRAPH),
    Library("GAT", lambda: graphs.GAT(4, 8, 2, 2, heads=2), on_edges, NODES, dynamic=GRAPH),
    Library(
        "PPO",
        lambda: on_policy.ActorCriticPolicy(SIGHT, MOVES, lambda _: 1e-3, net_arch=[8]),
        lambda net, obs: net(obs, deterministic=True),
        OBS,
        ("action", "value", "log_prob"),
    ),
    Library(
        "SAC",
        lambda: sac.SACPolicy(SIGHT, MOVES, lambda _: 1e-3, net_arch=[8]),
        lambda net, obs: net.actor(obs, deterministic=True),
        OBS,
    ),
    Library(
        "DQN",
        lambda: values.DQNPolicy(SIGHT, spaces.Discrete(3), lambda _: 1e-3, net_arch=[8]),
        lambda net, obs: net.q_net(obs),
        OBS,
    ),
    Library(
        "RecurrentPPO", recurrent_policy, recurrent_step, {**OBS, **MEMORY}, ("action", "h1", "c1")
    ),
    Library(
        "LoRA",
        lora,
        lambda net, ids, mask: net(input_ids=ids, attention_mask=mask).last_hidden_state,
        {"input_ids": IDS, "attention_mask": MASK},
        dynamic=TEXT,
    ),
    Library(
        "parametrised", parametrised, lambda net, x: net(x), OBS, not_onnx="linalg_matrix_exp"
    ),
    Library(
        "BartModel",
        bart,
        lambda net, ids, mask, target: net(
            input_ids=ids, attention_mask=mask, decoder_input_ids=target
        ).last_hidden_state,
        {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS[:, :4].contiguous()},
    ),
    Library(
        "PatchTSTModel",
        series,
        lambda net, x: net(x).last_hidden_state,
        {"x": torch.randn(2, 32, 2)},
    ),
    Library(
        "YolosForObjectDetection",
        yolos,
        lambda net, x: (net(x).logits, net(x).pred_boxes),
        {"pixel_values": torch.randn(2, 3, 32, 32)},
        ("logits", "boxes"),
    ),
]  # fmt: skip
