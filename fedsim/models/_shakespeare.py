"""A model that predicts the next character of Shakespeare's plays.

Features: ``x: int32 [length]``, ``y: int32 [length]``, ids of `fedsim.text.CharacterTokenizer`.
"""

from __future__ import annotations

import haiku as hk
import jax

from fedsim import checks
from fedsim.model import Model
from fedsim.models._recurrent import LSTM
from fedsim.models._tokens import language_model


def shakespeare_lstm(
    num_characters: int = 86, *, length: int = 80, embedding: int = 8, hidden: int = 256, layers: int = 2, tanh: bool = False
) -> Model:
    """Two LSTM layers over characters: 820,522 parameters with TFF's 86 characters, and pad, bos, eos, oov: 90 ids.

    The network of B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
    2017, https://arxiv.org/abs/1602.05629, section 3; that paper's own 866,578 parameters belong to another vocabulary.
    S. Reddi et al., "Adaptive Federated Optimization", ICLR 2021, https://arxiv.org/abs/2003.00295, appendix C, give 820,522,
    and so do FedJAX and TFF.

    The loss of a sequence is the mean over its ``length`` positions, those of pad as 0: FedJAX's. The metrics are means over
    tokens: ``loss`` over all but pad, ``accuracy`` over all but pad, bos, eos and oov, as published. ``accuracy_in_vocab``
    is FedJAX's: oov labels count, as misses, and special ids are never answered. FedJAX's own takes bos and eos for 87 and
    88, where its data have 1 and 2, and so forbids the characters ``9`` and ``\\r`` instead; this one does not.

    Args:
      num_characters: of the vocabulary, without special ids.
      length: of the sequences.
      embedding, hidden, layers: sizes.
      tanh: squash each layer's output once more, as FedJAX does and neither TFF nor the paper.

    Raises:
      ValueError: a size is not positive.

    >>> model = shakespeare_lstm()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    820522
    """
    checks.whole(1, num_characters=num_characters, length=length, embedding=embedding, hidden=hidden, layers=layers)
    num_ids = num_characters + 4

    def logits(tokens: jax.Array, training: bool) -> jax.Array:
        x = hk.Embed(num_ids, embedding)(tokens)
        for _ in range(layers):
            x = LSTM(hidden)(x)
            x = jax.numpy.tanh(x) if tanh else x
        return hk.Linear(num_ids)(x)

    return language_model(logits, length=length, num_ids=num_ids, oov_buckets=1, divisor=length, truncates=False)
