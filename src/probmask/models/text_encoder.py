"""A small transformer that classifies sentences."""

from collections.abc import Sequence

from torch import Tensor, nn

from probmask.errors import InputError
from probmask.models.blocks import check_arguments, check_heads
from probmask.models.encoder_block import EncoderBlock

_DEVIATION = 0.02  # of the initial weights, as in BERT


class TextEncoder(nn.Module):
    """Embeddings of tokens and positions, encoder blocks, and a classifier of their mean."""

    def __init__(
        self,
        tokens: nn.Embedding,
        positions: nn.Embedding,
        blocks: Sequence[EncoderBlock],
        classifier: nn.Linear,
        *,
        dropout: float,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, positions
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(classifier.in_features)
        self.classifier = classifier
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_DEVIATION)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return one logit per class.

        Args:
            input_ids: Tokens, (sentences, tokens).
            attention_mask: 1 for tokens, 0 for padding. None: no padding.
        """
        length = input_ids.shape[1]
        if length > self.positions.num_embeddings:
            raise InputError(
                f"text_encoder: a sentence has {length} tokens, but it was built for max_length="
                f"{self.positions.num_embeddings}; build it with a larger max_length."
            )
        if attention_mask is None:
            attention_mask = input_ids.new_ones(input_ids.shape)
        attended = attention_mask.bool()
        x = self.dropout(self.tokens(input_ids) + self.positions.weight[:length])
        for block in self.blocks:
            x = block(x, attended)
        present = attended[:, :, None].to(x.dtype)
        mean = (self.norm(x) * present).sum(1) / present.sum(1).clamp_min(1)
        logits: Tensor = self.classifier(mean)
        return logits


def text_encoder(
    *,
    classes: int = 2,
    vocabulary: int = 20_000,
    max_length: int = 128,
    width: int = 128,
    layers: int = 2,
    heads: int = 4,
    dropout: float = 0.1,
) -> TextEncoder:
    """Small transformer encoder that classifies sentences.

    Its weight matrices can be masked; the embeddings are not masked unless ``include`` names them.

    Args:
        classes: Number of classes.
        vocabulary: Number of different tokens.
        max_length: Largest number of tokens of a sentence.
        width: Size of a token's state, a multiple of ``heads``.
        layers: Number of encoder blocks.
        heads: Number of attention heads.
        dropout: Probability of dropout, in [0, 1).

    Returns:
        The network, with new random weights.

    Raises:
        InputError: If a size is not a positive integer, or ``width`` not a multiple of ``heads``.

    Example:
        >>> import torch
        >>> model = text_encoder(vocabulary=50, width=16).eval()
        >>> model(torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])).shape
        torch.Size([2, 2])
    """
    check_arguments(
        "text_encoder",
        classes=classes,
        vocabulary=vocabulary,
        max_length=max_length,
        width=width,
        layers=layers,
        heads=heads,
        dropout=dropout,
    )
    check_heads("text_encoder", width, heads)
    return TextEncoder(
        nn.Embedding(vocabulary, width),
        nn.Embedding(max_length, width),
        [EncoderBlock(width=width, heads=heads, dropout=dropout) for _ in range(layers)],
        nn.Linear(width, classes),
        dropout=dropout,
    )
