"""Data sets of sentences, held in memory as tokens.

Batches are padded to their longest sentence. Training batches contain sentences of similar length,
so that little of a batch is padding.
"""

import hashlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self, final

import torch
from torch import Tensor

from probmask.core.noise import RunStream
from probmask.data.settings import Sentences
from probmask.data.source import WHOLE, Batch, DataSource, Inputs, Shard, generator
from probmask.data.splits import limited_count, select_validation
from probmask.data.tokenizer import make_tokenizer

# Sentences are sorted by length within this number of shuffled batches.
_POOL = 32
_TOKENS_PER_PASS = 16_384


@dataclass(frozen=True)
class Texts:
    """Sentences and their labels."""

    sentences: Sequence[str]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor) -> "Texts":
        return Texts([self.sentences[i] for i in index.tolist()], self.labels[index])


@dataclass(frozen=True)
class Tokens:
    """Tokenized sentences: all tokens in a row, where each sentence starts, its length, its label.

    An empty sentence is one padding token.
    """

    tokens: Tensor
    starts: Tensor
    lengths: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | slice) -> "Tokens":
        return Tokens(self.tokens, self.starts[index], self.lengths[index], self.labels[index])

    @classmethod
    def of(cls, encoded: Sequence[Sequence[int]], labels: Tensor, pad: int) -> "Tokens":
        """Store encoded sentences."""
        filled = [list(tokens) or [pad] for tokens in encoded]
        lengths = torch.tensor([len(tokens) for tokens in filled], dtype=torch.int64)
        tokens = torch.tensor([token for each in filled for token in each], dtype=torch.int32)
        return cls(tokens, lengths.cumsum(0) - lengths, lengths, labels)

    def padded(self, index: Tensor, pad: int) -> dict[str, Tensor]:
        """Return the sentences at these indices, padded to the longest of them."""
        lengths = self.lengths[index][:, None]
        columns = torch.arange(int(lengths.max()))
        real = columns < lengths
        where = (self.starts[index][:, None] + columns).where(real, torch.tensor(0))
        ids = self.tokens[where].long().where(real, torch.tensor(pad))
        return {"input_ids": ids, "attention_mask": real.long()}


@final
class TokenizedSentences(DataSource):
    """A data set of sentences.

    Args:
        name: Name of the data set.
        parts: The parts "train" and "test", and "val" if it has its own sentences.
        settings: Tokenizer, length, and numbers of sentences.
        class_names: Names of the classes, in the order of the labels.
    """

    examples = "sentences"
    settings: Sentences

    def __init__(
        self,
        name: str,
        parts: Mapping[str, Texts],
        settings: Sentences,
        *,
        class_names: tuple[str, ...],
    ) -> None:
        tokenizer = make_tokenizer(settings, parts["train"].sentences)
        self.name, self.classes, self.class_names = name, len(class_names), class_names
        self.settings = replace(settings, tokenizer_sha256=tokenizer.digest)
        self.vocabulary, self._pad = tokenizer.size, tokenizer.pad
        self._device = torch.device("cpu")
        limits = {
            "train": settings.train_sentences,
            "val": settings.validation_sentences,
            "test": settings.test_sentences,
        }
        tokens = {}
        for part, texts in parts.items():
            setting = f"{'validation' if part == 'val' else part}_sentences"
            count = limited_count(name, setting, limits[part], len(texts))
            encoded = tokenizer.encode(texts.sentences[:count], settings.max_length)
            tokens[part] = Tokens.of(encoded, texts.labels[:count], self._pad)
        self._own_validation = tokens.pop("val", None)
        self._set_parts({"train": tokens["train"], "val": tokens["train"][:0], **tokens})

    def _set_parts(self, parts: Mapping[str, Tokens]) -> None:
        self._parts = parts
        self.train_size, self.val_size = len(parts["train"]), len(parts["val"])
        self.test_size = len(parts["test"])

    @property
    def description(self) -> str:
        """The examples and their size, for messages."""
        return f"sentences of up to {self._longest} tokens"

    @property
    def example_text(self) -> str:
        """What `example` returns, for records: operations are counted for it."""
        return f"a sentence of {self.typical_length} tokens, the mean of the training sentences"

    @property
    def examples_per_pass(self) -> int:
        """Number of sentences that a network can evaluate at once without much memory."""
        return max(1, _TOKENS_PER_PASS // self._longest)

    @property
    def typical_length(self) -> int:
        """Mean number of tokens of a training sentence."""
        return max(1, round(float(self._parts["train"].lengths.double().mean())))

    @property
    def _longest(self) -> int:
        parts = [part for part in self._parts.values() if len(part)]
        return max(int(part.lengths.max()) for part in parts)

    def model_settings(self) -> dict[str, Any]:
        """Return the settings of a network that follow from the data."""
        return {
            "classes": self.classes,
            "vocabulary": self.vocabulary,
            "max_length": self.settings.max_length,
        }

    def example(self, *, largest: bool = False) -> Inputs:
        """Return one artificial sentence of typical length, or the longest with the last token."""
        shape = (1, self._longest if largest else self.typical_length)
        token = self.vocabulary - 1 if largest else 0
        return {
            "input_ids": torch.full(shape, token),
            "attention_mask": torch.ones(shape, dtype=torch.int64),
        }

    @property
    def train_labels(self) -> Tensor:
        """Labels of the training sentences."""
        return self._parts["train"].labels

    def with_validation(self) -> Self:
        """Return a copy that holds out validation sentences; always the same ones."""
        other, train = copy(self), self._parts["train"]
        if self._own_validation is not None:
            other._set_parts({**self._parts, "val": self._own_validation})
            return other
        count = self.settings.validation_sentences
        held = select_validation(self.name, train.labels, count, examples=self.examples)
        other._set_parts({**self._parts, "train": train[~held], "val": train[held]})
        return other

    def to(self, device: torch.device, *, workers: int = 0) -> Self:
        """Return a copy whose batches are on the device; worker processes are not needed."""
        other = copy(self)
        other._device = device
        return other

    def fingerprint(self) -> str:
        """Return a digest of all tokens and labels."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self._parts.values():
            for tensor in (part.tokens, part.starts, part.lengths, part.labels):
                digest.update(f"{tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    def training(
        self, epoch: int, *, batch_size: int, seed: int, start: int = 0, shard: Shard = WHOLE
    ) -> Generator[Batch, None, None]:
        """Yield the training batches of an epoch, shuffled, with sentences of similar length."""
        train = self._parts["train"]
        batches = self._shuffled_batches(epoch, batch_size=batch_size, seed=seed)
        for batch in batches[start:]:
            # Every rank takes every n-th sentence, so that all have about the same work.
            yield self._batch(train, batch[shard.rank :: shard.ranks])

    def _shuffled_batches(self, epoch: int, *, batch_size: int, seed: int) -> list[Tensor]:
        """Return the sentences of each batch of an epoch.

        The shuffled sentences are sorted by length within pools, and the batches are shuffled.
        """
        random = generator(seed, RunStream.BATCH_ORDER, epoch)
        lengths = self._parts["train"].lengths
        order = torch.randperm(self.train_size, generator=random)
        used = order[: self.steps_per_epoch(batch_size) * batch_size]
        batches: list[Tensor] = []
        for pool in torch.split(used, _POOL * batch_size):
            by_length = pool[lengths[pool].argsort(stable=True)]
            batches += torch.split(by_length, batch_size)
        return [batches[i] for i in torch.randperm(len(batches), generator=random).tolist()]

    def validation(self, *, batch_size: int) -> Iterator[Batch]:
        """Return all validation sentences once, the shortest first."""
        return self._by_length("val", batch_size)

    def testing(self, *, batch_size: int) -> Iterator[Batch]:
        """Return all test sentences once, the shortest first."""
        return self._by_length("test", batch_size)

    def _by_length(self, name: str, batch_size: int) -> Iterator[Batch]:
        part = self._parts[name]
        for index in torch.split(part.lengths.argsort(stable=True), batch_size):
            if len(index):
                yield self._batch(part, index)

    def _batch(self, part: Tokens, index: Tensor) -> Batch:
        inputs = part.padded(index, self._pad)
        moved = {name: tensor.to(self._device) for name, tensor in inputs.items()}
        return Batch(moved, part.labels[index].to(self._device))
