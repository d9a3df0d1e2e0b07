"""Metrics of text. Labels are token ids ``examples["y"] int [n, length]``, and outputs are logits ``[n, length, ids]``."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks
from fedsim.metrics._examples import in_top_k, predicted_class
from fedsim.metrics._statistics import Better, Examples, Mean, Sum, array_module


@dataclasses.dataclass(frozen=True)
class _Tokens:
    masked_labels: tuple[int, ...] = (0,)
    # The feature ``[n, length]`` that is positive where a token counts, besides; None: all count.
    counted_where: str | None = dataclasses.field(default=None, kw_only=True)

    def counted(self, examples: Examples) -> tuple[jax.Array, jax.Array]:
        """Returns the labels ``int32 [n, length]``, and which of them count, of the same shape."""
        labels = examples["y"].astype(jnp.int32)
        counted = jnp.ones(labels.shape, bool)
        for label in self.masked_labels:
            counted &= labels != label
        if self.counted_where is not None:
            counted &= examples[self.counted_where] > 0
        return labels, counted


@dataclasses.dataclass(frozen=True)
class TokenCrossEntropy(_Tokens):
    """The mean softmax cross-entropy of tokens, in nats. Each token has the same weight, whatever the sequence.

    Attributes:
      masked_labels: labels that do not count, such as the id of padding.
      per_position: whether to report the mean of each position of a sequence, ``[length]``, instead of one mean.

    >>> mean = TokenCrossEntropy()({"y": jnp.array([[1, 2, 0]])}, jnp.zeros([1, 3, 4]))
    >>> round(float(mean.total[0]), 4), mean.weight.tolist()  # 2 tokens of log(4)
    (2.7726, [2])
    """

    per_position: bool = False

    def __call__(self, examples: Examples, outputs: jax.Array) -> Mean:
        labels, counted = self.counted(examples)
        return _mean(jnp.where(counted, token_losses(labels, outputs), 0.0), counted, self.per_position, "lower")


class _Exponential(Mean):
    better = "lower"

    def result(self) -> Any:
        with np.errstate(over="ignore"):  # from 709.8 on, and in float32 from 88.8 on
            return array_module(self).exp(super().result())


@dataclasses.dataclass(frozen=True)
class Perplexity(_Tokens):
    """The exponential of the mean softmax cross-entropy of tokens, over all tokens that count, of a client or of all.

    Attributes:
      masked_labels: labels that do not count, such as the id of padding.
      counted_where: a feature ``[n, length]`` that is positive where a token counts, such as ``"document"`` of
        `fedsim.text.pack`.

    >>> found = Perplexity()({"y": jnp.array([[1, 2, 0]])}, jnp.zeros([1, 3, 4]))
    >>> found.result().round(4).tolist()  # of 4 equally likely ids
    [4.0]
    """

    def __call__(self, examples: Examples, outputs: jax.Array) -> Mean:
        labels, counted = self.counted(examples)
        losses = jnp.sum(jnp.where(counted, token_losses(labels, outputs), 0.0), axis=1)
        return _Exponential(losses, jnp.sum(counted, axis=1, dtype=jnp.int32))


@dataclasses.dataclass(frozen=True)
class SequenceCrossEntropy(_Tokens):
    """The mean over sequences of the sum of their tokens' softmax cross-entropies, in nats.

    Sequences without tokens that count are left out.

    Attributes:
      masked_labels: labels that do not count, such as the id of padding.

    >>> mean = SequenceCrossEntropy()({"y": jnp.array([[1, 2, 0], [0, 0, 0]])}, jnp.zeros([2, 3, 4]))
    >>> [round(float(total), 4) for total in mean.total], mean.weight.tolist()
    ([2.7726, 0.0], [1, 0])
    """

    def __call__(self, examples: Examples, outputs: jax.Array) -> Mean:
        labels, counted = self.counted(examples)
        losses = jnp.sum(jnp.where(counted, token_losses(labels, outputs), 0.0), axis=1)
        return Mean(losses, _any(counted), better="lower")


@dataclasses.dataclass(frozen=True)
class TokenAccuracy(_Tokens):
    """The fraction of tokens whose largest logit is that of the label.

    With the ids of padding and of the end of sequence in ``masked_labels``, and all special and out-of-vocabulary ids in
    ``masked_logits``, this is the accuracy in the vocabulary: special tokens are never predicted, and unknown words are
    always misses.

    Attributes:
      masked_labels: labels that do not count, such as the id of padding.
      masked_logits: ids that are never predicted: their logits are set to minus infinity.
      per_position: whether to report the accuracy of each position of a sequence, ``[length]``, instead of one accuracy.

    >>> logits = jnp.array([[[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [9.0, 0.0, 0.0]]])
    >>> mean = TokenAccuracy()({"y": jnp.array([[1, 2, 0]])}, logits)
    >>> mean.total.tolist(), mean.weight.tolist()
    ([1], [2])
    >>> TokenAccuracy(masked_logits=(2,), per_position=True)({"y": jnp.array([[1, 2, 0]])}, logits).total.tolist()
    [[1, 0, 0]]
    """

    masked_logits: tuple[int, ...] = ()
    per_position: bool = False

    def __call__(self, examples: Examples, outputs: jax.Array) -> Mean:
        labels, counted = self.counted(examples)
        predicted = predicted_class(_without(outputs, self.masked_logits))
        return _mean((predicted == labels) & counted, counted, self.per_position, "higher")


@dataclasses.dataclass(frozen=True)
class TokenTopKAccuracy(_Tokens):
    """The fraction of tokens whose label is among the ``k`` ids with the largest logits.

    Of equal logits, those of lower ids come first.

    Attributes:
      masked_labels: labels that do not count, such as the id of padding.
      masked_logits: ids that are never predicted: their logits are set to minus infinity.
      per_position: whether to report the accuracy of each position of a sequence, ``[length]``, instead of one accuracy.
      k: the number of ids.

    Raises:
      ValueError: ``k`` is not a positive whole number.

    >>> logits = jnp.array([[[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]])
    >>> TokenTopKAccuracy(k=2)({"y": jnp.array([[2, 1]])}, logits).total.tolist()
    [1]
    """

    masked_logits: tuple[int, ...] = ()
    per_position: bool = False
    k: int = dataclasses.field(kw_only=True)

    def __post_init__(self) -> None:
        checks.whole(1, k=self.k)

    def __call__(self, examples: Examples, outputs: jax.Array) -> Mean:
        labels, counted = self.counted(examples)
        hits = in_top_k(_without(outputs, self.masked_logits), labels, self.k)
        return _mean(hits & counted, counted, self.per_position, "higher")


@dataclasses.dataclass(frozen=True)
class OOVRate(_Tokens):
    """The fraction of tokens that are out of the vocabulary.

    Attributes:
      masked_labels: labels that do not count, such as the id of padding.
      per_position: whether to report the rate of each position of a sequence, ``[length]``, instead of one rate.
      oov_labels: the ids of tokens that are out of the vocabulary.

    >>> mean = OOVRate(oov_labels=(8, 9))({"y": jnp.array([[1, 8, 9, 2, 0]])}, None)
    >>> mean.total.tolist(), mean.weight.tolist()
    ([2], [4])
    """

    per_position: bool = False
    oov_labels: tuple[int, ...] = dataclasses.field(kw_only=True)

    def __call__(self, examples: Examples, outputs: object) -> Mean:
        labels, counted = self.counted(examples)
        in_vocabulary = jnp.ones(labels.shape, bool)
        for label in self.oov_labels:
            in_vocabulary &= labels != label
        return _mean(~in_vocabulary & counted, counted, self.per_position, "lower")


@dataclasses.dataclass(frozen=True)
class TruncationRate(_Tokens):
    """The fraction of sequences without the token for the end of a sequence, because they were cut to the model's length.

    Sequences without tokens that count are left out.

    Attributes:
      masked_labels: labels that do not count, such as the id of padding.
      eos_label: the id of the end of a sequence.

    >>> mean = TruncationRate(eos_label=2)({"y": jnp.array([[5, 5, 5], [5, 2, 0], [0, 0, 0]])}, None)
    >>> mean.total.tolist(), mean.weight.tolist()
    ([1, 0, 0], [1, 1, 0])
    """

    eos_label: int = dataclasses.field(kw_only=True)

    def __call__(self, examples: Examples, outputs: object) -> Mean:
        labels, counted = self.counted(examples)
        sequences = _any(counted)
        return Mean(jnp.where(jnp.any(labels == self.eos_label, axis=1), 0, sequences), sequences, better="lower")


@dataclasses.dataclass(frozen=True)
class SequenceLength(_Tokens):
    """The mean number of tokens of a sequence. Sequences without tokens that count are left out.

    Attributes:
      masked_labels: labels that do not count, such as the id of padding.

    >>> mean = SequenceLength()({"y": jnp.array([[5, 2, 0], [0, 0, 0]])}, None)
    >>> mean.total.tolist(), mean.weight.tolist()
    ([2, 0], [1, 0])
    """

    def __call__(self, examples: Examples, outputs: object) -> Mean:
        _, counted = self.counted(examples)
        return Mean(jnp.sum(counted, axis=1, dtype=jnp.int32), _any(counted))


@dataclasses.dataclass(frozen=True)
class TokenCount(_Tokens):
    """The number of tokens.

    Attributes:
      masked_labels: labels that do not count, such as the id of padding.

    >>> TokenCount()({"y": jnp.array([[5, 2, 0], [0, 0, 0]])}, None).total.tolist()
    [2, 0]
    """

    def __call__(self, examples: Examples, outputs: object) -> Sum:
        _, counted = self.counted(examples)
        return Sum(jnp.sum(counted, axis=1, dtype=jnp.int32))


@dataclasses.dataclass(frozen=True)
class SequenceCount(_Tokens):
    """The number of sequences with at least one token that counts.

    Attributes:
      masked_labels: labels that do not count, such as the id of padding.

    >>> SequenceCount()({"y": jnp.array([[5, 2, 0], [0, 0, 0]])}, None).total.tolist()
    [1, 0]
    """

    def __call__(self, examples: Examples, outputs: object) -> Sum:
        _, counted = self.counted(examples)
        return Sum(_any(counted))


def token_losses(labels: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns the softmax cross-entropy of each token, ``float32 [n, length]``, in nats.

    Args:
      labels: the tokens, ``int32 [n, length]``.
      logits: ``float32 [n, length, vocabulary]``.

    >>> losses = token_losses(jnp.array([[1, 2]]), jnp.zeros([1, 2, 4]))  # of 4 equally likely ids
    >>> losses.shape, round(float(losses[0, 0]), 4)
    ((1, 2), 1.3863)
    """
    return jax.nn.logsumexp(logits, axis=2) - jnp.take_along_axis(logits, labels[..., None], axis=2)[..., 0]


def _mean(totals: jax.Array, counted: jax.Array, per_position: bool, better: Better) -> Mean:
    """Returns the mean over tokens of ``totals [n, length]``, or over the tokens of each position."""
    totals = totals.astype(jnp.int32) if totals.dtype == bool else totals
    weights = counted.astype(jnp.int32)
    if not per_position:
        totals, weights = jnp.sum(totals, axis=1), jnp.sum(weights, axis=1)
    return Mean(totals, weights, better)


def _any(counted: jax.Array) -> jax.Array:
    return jnp.any(counted, axis=1).astype(jnp.int32)


def _without(logits: jax.Array, masked: tuple[int, ...]) -> jax.Array:
    """Returns the logits ``[n, length, ids]``, with minus infinity for the ``masked`` ids."""
    if not masked:
        return logits
    penalty = np.zeros(logits.shape[-1], np.float32)
    penalty[list(masked)] = -np.inf
    return logits + penalty[None, None]
