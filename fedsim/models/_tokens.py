"""Loss and metrics of models that predict the next token: logits ``[n, length, ids]`` and labels ``y int [n, length]``.

An example is a sequence, so there is one loss per sequence. The metrics are means over tokens, so they do not depend on where
a text is divided into sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp

from fedsim import metrics
from fedsim.metrics import Examples, token_losses
from fedsim.model import Model

PAD, BOS, EOS = 0, 1, 2


def language_model(
    logits: Callable[[jax.Array, bool], jax.Array],
    *,
    length: int,
    num_ids: int,
    oov_buckets: int,
    divisor: float,
    truncates: bool,
) -> Model:
    """Returns a model whose ``logits(tokens int32 [n, length], training)`` are ``float32 [n, length, num_ids]``.

    The loss of a sequence is the sum of the losses of its tokens except pad, divided by ``divisor``. The last ``oov_buckets``
    ids are those of unknown words. If the tokenizer ``truncates`` long sequences, the rate is among the metrics; otherwise it
    joins texts, so bos may be a label.
    """
    oov = tuple(range(num_ids - oov_buckets, num_ids))
    special = (PAD, BOS, EOS, *oov)
    tokens = jax.ShapeDtypeStruct((length,), jnp.int32)

    def loss(examples: Examples, outputs: jax.Array) -> jax.Array:
        labels = examples["y"].astype(jnp.int32)
        counted = (labels != PAD).astype(jnp.float32)
        return jnp.sum(token_losses(labels, outputs) * counted, axis=1) / divisor

    measured: dict[str, metrics.Metric] = {
        "loss": metrics.TokenCrossEntropy(masked_labels=(PAD,)),
        "accuracy": metrics.TokenAccuracy(masked_labels=special),
        "accuracy_in_vocab": metrics.TokenAccuracy(masked_labels=(PAD, EOS), masked_logits=special),
        "oov_rate": metrics.OOVRate(masked_labels=(PAD,), oov_labels=oov),
    }
    if truncates:
        measured["truncation_rate"] = metrics.TruncationRate(masked_labels=(PAD,), eos_label=EOS)
    else:
        measured["accuracy_with_eos"] = metrics.TokenAccuracy(masked_labels=(PAD, BOS))
    return Model.from_haiku(
        hk.transform(lambda examples, training: logits(examples["x"].astype(jnp.int32), training)),
        features={"x": tokens, "y": tokens},
        loss=loss,
        metrics=measured,
        num_classes=num_ids,
        train_kwargs={"training": True},
        eval_kwargs={"training": False},
    )
