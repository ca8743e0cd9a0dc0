"""Networks over tokens that `inference.py` measures: transformers and an LSTM.

Their weights are random. The sizes are those of MiniLM-L6 (six layers of width 384, twelve heads,
128 tokens), of ViT-tiny (twelve layers of width 192, three heads, 197 tokens), and of four
`nn.TransformerEncoderLayer` of width 384 over 128 tokens. The LSTM has two layers of 512 units and
runs over 100 steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class MiniLM(nn.Module):
    """A BERT of transformers without its pooling; returns the last hidden state."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        sizes = {"hidden_size": 384, "intermediate_size": 1536}
        config = BertConfig(num_hidden_layers=6, num_attention_heads=12, **sizes)
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, tokens: Tensor) -> Any:
        """Return the hidden state of each token."""
        return self.bert(tokens).last_hidden_state


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        mixed = self.mix(self.norm1(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = mixed.permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """ViT-tiny for images of 224 × 224, with a class token."""

    def __init__(self, width: int = 192, depth: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 197, width))
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def encoder() -> nn.Module:
    """Return four layers of `nn.TransformerEncoderLayer`."""
    layer = nn.TransformerEncoderLayer(384, 6, 1536, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


class LSTM(nn.Module):
    """Two layers of an LSTM; returns the hidden state of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(512, 512, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last layer's hidden states."""
        hidden: Tensor = self.lstm(x)[0]
        return hidden


@dataclass(frozen=True)
class TokenNetwork:
    """How to build a network and its inputs."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Tensor]


TOKEN_NETWORKS = {
    "minilm": TokenNetwork(MiniLM, lambda n, g: torch.randint(0, 30522, (n, 128), generator=g)),
    "vit": TokenNetwork(ViT, lambda n, g: torch.randn(n, 3, 224, 224, generator=g)),
    "encoder": TokenNetwork(encoder, lambda n, g: torch.randn(n, 128, 384, generator=g)),
    "lstm": TokenNetwork(LSTM, lambda n, g: torch.randn(n, 100, 512, generator=g)),
}


def write_onnx(model: nn.Module, x: Tensor, path: Path) -> None:
    """Write the network as ONNX for inputs of this shape."""
    torch.onnx.export(
        model, (x,), path, dynamo=True, opset_version=18, external_data=False, verbose=False
    )


def write_old_onnx(model: nn.Module, x: Tensor, path: Path) -> None:
    """Write the network as ONNX of opset 14, for engines that know no LayerNormalization."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its operator cannot be exported
    try:
        torch.onnx.export(model, (x,), str(path), dynamo=False, opset_version=14)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
