"""BERT for sentences and labels, with the names of Hugging Face's `BertForSequenceClassification`.

Files of that class, and of `BertModel`, therefore fit. The package transformers is not needed.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from probmask.errors import InputError
from probmask.models.blocks import check_arguments, check_heads

_DEVIATION = 0.02  # of the initial weights
_EPSILON = 1e-12  # of LayerNorm
_HIDDEN = 4  # states between the two linear layers of a block, as a multiple of the width
_SEGMENTS = 2  # the first and the second sentence of a pair; here always the first


class Bert(nn.Module):
    """Embeddings, encoder layers and pooler: Hugging Face's `BertModel`."""

    def __init__(self, embeddings: "_Embeddings", layers: Sequence["_Layer"]) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.encoder = _Encoder(layers)
        self.pooler = _Pooler(embeddings.LayerNorm.normalized_shape[0])

    def forward(self, input_ids: Tensor, attended: Tensor) -> Tensor:
        """Return the pooled state of the first token; ``attended`` is False for padding."""
        pooled: Tensor = self.pooler(self.encoder(self.embeddings(input_ids), attended))
        return pooled


class BertClassifier(nn.Module):
    """BERT and a linear layer: Hugging Face's `BertForSequenceClassification`."""

    def __init__(self, bert: Bert, classifier: nn.Linear, *, dropout: float) -> None:
        super().__init__()
        self.bert = bert
        self.dropout = nn.Dropout(dropout)
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
        if attention_mask is None:
            attention_mask = input_ids.new_ones(input_ids.shape)
        pooled = self.bert(input_ids, attention_mask.bool())
        logits: Tensor = self.classifier(self.dropout(pooled))
        return logits


def bert(
    *,
    classes: int = 2,
    vocabulary: int = 30_522,
    positions: int = 512,
    width: int = 384,
    layers: int = 6,
    heads: int = 12,
    dropout: float = 0.1,
) -> BertClassifier:
    """BERT that classifies sentences; the default sizes are MiniLM-L6's.

    Its tensors have the names of Hugging Face's `BertForSequenceClassification`, so that ``init``
    loads the published weights. Embeddings, pooler and classifier stay dense by default.

    Args:
        classes: Number of classes.
        vocabulary: Number of different tokens.
        positions: Number of position embeddings, the largest number of tokens of a sentence.
        width: Size of a token's state, a multiple of ``heads``.
        layers: Number of encoder layers.
        heads: Number of attention heads.
        dropout: Probability of dropout, in [0, 1).

    Returns:
        The network, with new random weights.

    Raises:
        InputError: If a size is not a positive integer, or ``width`` not a multiple of ``heads``.

    Example:
        >>> import torch
        >>> model = bert(vocabulary=50, width=24, layers=2).eval()
        >>> model(torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])).shape
        torch.Size([2, 2])
    """
    check_arguments(
        "bert",
        classes=classes,
        vocabulary=vocabulary,
        positions=positions,
        width=width,
        layers=layers,
        heads=heads,
        dropout=dropout,
    )
    check_heads("bert", width, heads)
    embeddings = _Embeddings(vocabulary, positions, width, dropout)
    encoder = Bert(embeddings, [_Layer(width, heads, dropout) for _ in range(layers)])
    return BertClassifier(encoder, nn.Linear(width, classes), dropout=dropout)


class _Embeddings(nn.Module):
    """The sum of the embeddings of token, position and segment."""

    def __init__(self, vocabulary: int, positions: int, width: int, dropout: float) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, width)
        self.position_embeddings = nn.Embedding(positions, width)
        self.token_type_embeddings = nn.Embedding(_SEGMENTS, width)
        self.LayerNorm = nn.LayerNorm(width, eps=_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids: Tensor) -> Tensor:
        length, positions = input_ids.shape[1], self.position_embeddings.num_embeddings
        if length > positions:
            raise InputError(
                f"bert: a sentence has {length} tokens, but it was built for positions="
                f"{positions}; set data_args.max_length={positions}."
            )
        places = self.position_embeddings.weight[:length] + self.token_type_embeddings.weight[0]
        x: Tensor = self.dropout(self.LayerNorm(self.word_embeddings(input_ids) + places))
        return x


class _Encoder(nn.Module):
    """The encoder layers, in turn."""

    def __init__(self, layers: Sequence["_Layer"]) -> None:
        super().__init__()
        self.layer = nn.ModuleList(layers)

    def forward(self, x: Tensor, attended: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x, attended)
        return x


class _Layer(nn.Module):
    """Self-attention and two linear layers, each with a shortcut and LayerNorm after it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = _Attention(width, heads, dropout)
        self.intermediate = _Intermediate(width)
        self.output = _Output(_HIDDEN * width, width, dropout)

    def forward(self, x: Tensor, attended: Tensor) -> Tensor:
        x = self.attention(x, attended)
        out: Tensor = self.output(self.intermediate(x), x)
        return out


class _Attention(nn.Module):
    """Self-attention with its shortcut."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.self = _SelfAttention(width, heads, dropout)
        self.output = _Output(width, width, dropout)

    def forward(self, x: Tensor, attended: Tensor) -> Tensor:
        out: Tensor = self.output(self.self(x, attended), x)
        return out


class _SelfAttention(nn.Module):
    """Attention of every token to the tokens of its sentence."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, x: Tensor, attended: Tensor) -> Tensor:
        mixed = functional.scaled_dot_product_attention(
            self._split(self.query(x)),
            self._split(self.key(x)),
            self._split(self.value(x)),
            attn_mask=attended[:, None, None, :],
            dropout_p=self.dropout if self.training else 0.0,
        )
        return mixed.transpose(1, 2).flatten(2)

    def _split(self, x: Tensor) -> Tensor:
        """Return (sentences, heads, tokens, states of a head)."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class _Intermediate(nn.Module):
    """The first linear layer, and GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, _HIDDEN * width)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.dense(x))


class _Output(nn.Module):
    """A linear layer, its shortcut, and LayerNorm."""

    def __init__(self, inputs: int, width: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, width)
        self.LayerNorm = nn.LayerNorm(width, eps=_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        out: Tensor = self.LayerNorm(self.dropout(self.dense(x)) + shortcut)
        return out


class _Pooler(nn.Module):
    """A linear layer for the first token, and tanh."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.dense(x[:, 0]).tanh()
        return pooled
