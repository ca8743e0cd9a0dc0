"""The encoder block of `text_encoder` and `vit`, with LayerNorm before its layers."""

from torch import Tensor, nn
from torch.nn import functional


class EncoderBlock(nn.Module):
    """Self-attention and two linear layers, each after LayerNorm and with a shortcut."""

    def __init__(self, *, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.hidden_norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, 4 * width)
        self.hidden_output = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, attended: Tensor | None = None) -> Tensor:
        """Return the new states of all tokens; ``attended`` is False for padding."""
        x = x + self.dropout(self._attend(self.attention_norm(x), attended))
        hidden = functional.gelu(self.hidden(self.hidden_norm(x)))
        out: Tensor = x + self.dropout(self.hidden_output(hidden))
        return out

    def _attend(self, x: Tensor, attended: Tensor | None) -> Tensor:
        batch, tokens, width = x.shape
        split = self.queries_keys_values(x).view(batch, tokens, 3, self.heads, -1)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        mask = None if attended is None else attended[:, None, None, :]
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        out: Tensor = self.attention_output(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return out
