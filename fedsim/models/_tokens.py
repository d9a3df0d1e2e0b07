"""Loss and metrics of models that predict the next token: logits ``[n, length, ids]`` against ``y int [n, length]``.

An example is a sequence, so losses come per sequence, and metrics are `Mean`s whose total is a sum over the counted
tokens of a sequence and whose weight is their number: a mean over tokens, wherever sequences are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from fedsim.metrics import Examples, Mean
from fedsim.model import Model

PAD, BOS, EOS = 0, 1, 2


def language_model(
    logits: Callable[[jax.Array, bool], jax.Array], *, length: int, num_ids: int, oov_buckets: int, divisor: float
) -> Model:
    """A model whose ``logits(tokens int32 [n, length], training)`` are ``float32 [n, length, num_ids]``.

    Its loss of a sequence is the sum of its tokens' losses, pad counting for nothing, over ``divisor``. The last
    ``oov_buckets`` ids are those of unknown words.
    """
    special = (PAD, BOS, EOS, *range(num_ids - oov_buckets, num_ids))
    tokens = jax.ShapeDtypeStruct((length,), jnp.int32)
    return Model.from_haiku(
        hk.transform(lambda examples, training: logits(examples["x"].astype(jnp.int32), training)),
        features={"x": tokens, "y": tokens},
        loss=lambda examples, outputs: _token_losses(examples, outputs)[0] / divisor,
        metrics={
            "loss": lambda examples, outputs: Mean(*_token_losses(examples, outputs)),
            "accuracy": lambda examples, outputs: _token_accuracy(examples, outputs, uncounted=special),
            "accuracy_in_vocab": lambda examples, outputs: _token_accuracy(
                examples, outputs, uncounted=(PAD, EOS), never=special
            ),
        },
        num_classes=num_ids,
        train_kwargs={"training": True},
        eval_kwargs={"training": False},
    )


def _token_losses(examples: Examples, outputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums over the tokens of each sequence that are not pad, and how many these are."""
    labels = examples["y"].astype(jnp.int32)
    picked = jnp.take_along_axis(outputs, labels[..., None], axis=2)[..., 0]
    counted = (labels != PAD).astype(jnp.float32)
    losses = (jax.nn.logsumexp(outputs, axis=2) - picked) * counted
    return jnp.sum(losses, axis=1), jnp.sum(counted, axis=1)


def _token_accuracy(examples: Examples, outputs: jax.Array, uncounted: Collection[int], never: Collection[int] = ()) -> Mean:
    """Share of tokens, but for the labels ``uncounted``, that the largest logit hits; ``never`` is not answered."""
    labels = examples["y"].astype(jnp.int32)
    if never:
        answers = np.zeros(outputs.shape[-1], np.float32)
        answers[list(never)] = -np.inf
        outputs = outputs + answers[None, None]
    counted = jnp.ones(labels.shape, jnp.float32)
    for label in uncounted:
        counted = jnp.where(labels == label, 0.0, counted)
    hits = jnp.where(jnp.argmax(outputs, axis=2) == labels, counted, 0.0)
    return Mean(jnp.sum(hits, axis=1), jnp.sum(counted, axis=1))
