"""Models for Stack Overflow: two that predict the next word, and one that predicts a question's tags.

Features of the next word: ``x: int32 [length]``, ``y: int32 [length]``, ids of `fedsim.text.WordTokenizer`. Of tags: see
`stackoverflow_logistic`.

The loss of a sentence is the sum over its tokens except pad, divided by ``expected_length`` if this is given, as in FedJAX. TFF
takes the mean over all tokens of a batch instead, so learning rates published for TFF need an ``expected_length`` of about the
mean number of tokens, which is 13.3 for Stack Overflow.

The metrics are means over tokens: ``loss`` over all tokens except pad; ``accuracy`` over all except pad, bos, eos and oov (S.
Reddi et al. 2021 and TFF); ``accuracy_in_vocab`` over all except pad and eos, where special ids are never predicted, so oov
labels are always misses (FedJAX); and ``oov_rate`` over all except pad. ``truncation_rate`` is the share of sentences that were
cut before eos.
"""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.metrics import Examples, RecallAtK
from fedsim.model import Feature, Model
from fedsim.models._recurrent import LSTM
from fedsim.models._tokens import language_model
from fedsim.models._transformer import token_logits


def stackoverflow_lstm(
    vocabulary: int = 10_000,
    *,
    length: int = 20,
    oov_buckets: int = 1,
    embedding: int = 96,
    hidden: int = 670,
    layers: int = 1,
    expected_length: float | None = None,
    tanh: bool = False,
) -> Model:
    """An LSTM layer over words with a projection to the width of the embedding: 4,050,748 parameters.

    S. Reddi et al., "Adaptive Federated Optimization", ICLR 2021, https://arxiv.org/abs/2003.00295, appendix C. The number of
    parameters is the same there, in TFF and in FedJAX. It differs from TFF's model in its initial weights, which are Haiku's.
    Parameters have the names and shapes of FedJAX's model.

    Args:
      vocabulary: the number of words, without pad, bos, eos and the ``oov_buckets``.
      length: the length of the sequences.
      oov_buckets: the number of ids of unknown words.
      embedding: the width of the embedding.
      hidden: the width of the LSTM layers.
      layers: the number of LSTM layers.
      expected_length: a divisor of the loss of a sentence. None means 1.
      tanh: whether to apply tanh to the output of each LSTM layer, as FedJAX does, and TFF and the paper do not.

    Raises:
      ValueError: a size is not positive.

    >>> model = stackoverflow_lstm()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    4050748
    """
    checks.whole(1, vocabulary=vocabulary, length=length, oov_buckets=oov_buckets, embedding=embedding, hidden=hidden)
    checks.whole(1, layers=layers)
    checks.truth(tanh=tanh)
    num_ids = vocabulary + 3 + oov_buckets

    def logits(tokens: jax.Array, training: bool) -> jax.Array:
        x = hk.Embed(num_ids, embedding)(tokens)
        for _ in range(layers):
            x = LSTM(hidden)(x)
            x = hk.Linear(embedding)(jnp.tanh(x) if tanh else x)
        return hk.Linear(num_ids)(x)

    divisor = _divisor(expected_length)
    return language_model(logits, length=length, num_ids=num_ids, oov_buckets=oov_buckets, divisor=divisor, truncates=True)


def stackoverflow_transformer(
    vocabulary: int = 10_000,
    *,
    length: int = 20,
    oov_buckets: int = 1,
    embedding: int = 96,
    heads: int = 8,
    feedforward: int = 1536,
    layers: int = 3,
    dropout: float = 0.1,
    remat: bool = False,
    expected_length: float | None = None,
) -> Model:
    """A causal transformer whose output layer shares the weights of the embedding: 1,962,912 parameters.

    The architecture of J. Wang et al., "A Field Guide to Federated Optimization", 2021, https://arxiv.org/abs/2107.06917,
    in the size that pfl-research (F. Granqvist et al., 2024, https://arxiv.org/abs/2404.06430) gives it: A. Vaswani et al.,
    "Attention is all you need", NeurIPS 2017, https://arxiv.org/abs/1706.03762, with layer normalization after each residual
    sum, ReLU, and fixed sinusoidal positions. A word attends to itself and to the words before it, so never to pad, which
    follows the words. Initial weights are Haiku's, except those of the embedding. As in TFF, there is no dropout of attention
    weights.

    Args:
      vocabulary: the number of words, without pad, bos, eos and the ``oov_buckets``.
      length: the length of the sequences.
      oov_buckets: the number of ids of unknown words.
      embedding: the width of the embedding and of the blocks.
      heads: the number of attention heads, which must divide ``embedding``.
      feedforward: the width of the hidden layer of a block.
      layers: the number of blocks.
      dropout: the dropout rate in training, after the embedding and before each residual sum.
      remat: whether to compute the activations inside of blocks again for the gradient, instead of storing them.
      expected_length: a divisor of the loss of a sentence. None means 1.

    Raises:
      ValueError: a size is not positive, ``embedding`` is odd, or ``heads`` does not divide it.

    >>> model = stackoverflow_transformer()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    1962912
    """
    checks.whole(1, vocabulary=vocabulary, length=length, oov_buckets=oov_buckets)
    num_ids = vocabulary + 3 + oov_buckets
    logits = token_logits(num_ids, embedding, heads, feedforward, layers, dropout, remat=remat)
    divisor = _divisor(expected_length)
    return language_model(logits, length=length, num_ids=num_ids, oov_buckets=oov_buckets, divisor=divisor, truncates=True)


def stackoverflow_logistic(
    vocabulary: int = 10_000, tags: int = 500, *, length: int | None = None, divisor: float = 1.0
) -> Model:
    """A logistic regression for each tag on the frequencies of words: 5,000,500 parameters.

    Outputs are logits ``[n, tags]``. Tag prediction of S. Reddi et al., "Adaptive Federated Optimization", ICLR 2021,
    https://arxiv.org/abs/2003.00295, appendix C. The features are those of `fedsim.text.TagTokenizer`: ``x: float32
    [vocabulary]``, the frequency of each word in the post, and ``y: uint8 [tags]``. With ``length``, they are ``x: int32
    [length]``, the ids of the words, from which the model computes the frequencies; this is faster. ``recall_at_5`` is the
    share of all tags that are among the 5 largest logits of their post.

    The loss of a post is the sum of the tags' cross-entropies, divided by ``divisor``; the metric ``loss`` is not divided. The
    loss of a batch is the mean of its posts. The code of the paper (google-research/federated) takes the mean over the tags and
    the sum over the posts, so learning rates published for it need the number of tags divided by the batch size: 500 / 100 = 5.

    Args:
      vocabulary: the number of words.
      tags: the number of tags.
      length: the number of word ids of a post; None reads frequencies.
      divisor: a divisor of the loss of a post.

    Raises:
      ValueError: a size or the divisor is not positive.

    >>> model = stackoverflow_logistic()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    5000500
    """
    checks.whole(1, vocabulary=vocabulary, tags=tags)
    checks.whole(1, or_none=True, length=length)
    checks.positive(divisor=divisor)
    x: Feature = jax.ShapeDtypeStruct((vocabulary,), jnp.float32)
    if length is not None:
        x = jax.ShapeDtypeStruct((length,), jnp.int32)

    def logits(examples: Examples) -> jax.Array:
        if length is None:
            return hk.Linear(tags)(examples["x"])
        ids = examples["x"].astype(jnp.int32)
        words = jnp.maximum(jnp.sum(ids > 0, axis=1, keepdims=True), 1).astype(jnp.float32)
        with hk.name_scope("linear"):
            w = hk.get_parameter("w", [vocabulary, tags], init=hk.initializers.TruncatedNormal(vocabulary**-0.5))
            b = hk.get_parameter("b", [tags], init=jnp.zeros)
        known = (ids > 0) & (ids <= vocabulary)
        rows = jnp.where(known[..., None], w[jnp.where(known, ids - 1, 0)], 0.0)
        return jnp.sum(rows, axis=1) / words.astype(w.dtype) + b[None]

    def sum_over_tags(examples: Examples, outputs: jax.Array) -> jax.Array:
        y = examples["y"].astype(jnp.float32)
        return jnp.sum(jax.nn.softplus(outputs) - y * outputs, axis=1)

    return Model.from_haiku(
        hk.transform(logits),
        features={"x": x, "y": jax.ShapeDtypeStruct((tags,), jnp.uint8)},
        loss=lambda examples, outputs: sum_over_tags(examples, outputs) / float(divisor),
        metrics={"loss": sum_over_tags, "recall_at_5": RecallAtK(5)},
    )


def _divisor(expected_length: float | None) -> float:
    checks.positive(or_none=True, expected_length=expected_length)
    return 1.0 if expected_length is None else float(expected_length)
