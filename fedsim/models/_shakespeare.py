"""Models that predict the next character of Shakespeare's plays.

Features: ``x: int32 [length]``, ``y: int32 [length]``, ids of `fedsim.text.CharacterTokenizer`.
"""

from __future__ import annotations

import haiku as hk
import jax

from fedsim import checks
from fedsim.model import Model
from fedsim.models._recurrent import LSTM
from fedsim.models._tokens import language_model
from fedsim.models._transformer import token_logits


def shakespeare_lstm(
    num_characters: int = 86, *, length: int = 80, embedding: int = 8, hidden: int = 256, layers: int = 2, tanh: bool = False
) -> Model:
    """Two LSTM layers over characters: 820,522 parameters with TFF's 86 characters.

    With pad, bos, eos and oov these are 90 ids.

    The network of B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
    2017, https://arxiv.org/abs/1602.05629, section 3. That paper counts 866,578 parameters, with another vocabulary.
    S. Reddi et al., "Adaptive Federated Optimization", ICLR 2021, https://arxiv.org/abs/2003.00295, appendix C, give 820,522,
    and so do FedJAX and TFF.

    The loss of a sequence is the mean over its ``length`` positions, where the loss of pad is 0, as in FedJAX. The metrics are
    means over tokens: ``loss`` over all tokens except pad; ``accuracy`` over all except pad, bos, eos and oov;
    ``accuracy_with_eos`` over all except pad and bos, as in the code of Reddi et al., whose clients have no bos as a label
    because speeches are not joined; ``accuracy_in_vocab`` over all except pad and eos, where special ids are never predicted,
    so oov labels are always misses, as in FedJAX; and ``oov_rate``, the share of oov among all tokens except pad. FedJAX's own
    model takes bos and eos to be 87 and 88, where its data have 1 and 2, so it never predicts the characters ``9`` and
    ``\\r``; this model does.

    Args:
      num_characters: the size of the vocabulary without special ids.
      length: the length of the sequences.
      embedding: the width of the embedding.
      hidden: the width of the LSTM layers.
      layers: the number of LSTM layers.
      tanh: whether to apply tanh to the output of each layer, as FedJAX does, and TFF and the paper do not.

    Raises:
      ValueError: a size is not positive.

    >>> model = shakespeare_lstm()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    820522
    """
    checks.whole(1, num_characters=num_characters, length=length, embedding=embedding, hidden=hidden, layers=layers)
    checks.truth(tanh=tanh)
    num_ids = num_characters + 4

    def logits(tokens: jax.Array, training: bool) -> jax.Array:
        x = hk.Embed(num_ids, embedding)(tokens)
        for _ in range(layers):
            x = LSTM(hidden)(x)
            x = jax.numpy.tanh(x) if tanh else x
        return hk.Linear(num_ids)(x)

    return language_model(logits, length=length, num_ids=num_ids, oov_buckets=1, divisor=length, truncates=False)


def shakespeare_transformer(
    num_characters: int = 86,
    *,
    length: int = 80,
    embedding: int = 128,
    heads: int = 4,
    feedforward: int = 512,
    layers: int = 4,
    dropout: float = 0.1,
    remat: bool = False,
) -> Model:
    """A causal transformer over characters: 804,608 parameters with TFF's 86 characters, about as many as `shakespeare_lstm`.

    It has the blocks of `stackoverflow_transformer`, and the loss and metrics of `shakespeare_lstm`.

    Args:
      num_characters: the size of the vocabulary without special ids.
      length: the length of the sequences.
      embedding: the width of the embedding and of the blocks.
      heads: the number of attention heads, which must divide ``embedding``.
      feedforward: the width of the hidden layer of a block.
      layers: the number of blocks.
      dropout: the dropout rate in training, after the embedding and before each residual sum.
      remat: whether to compute the activations inside of blocks again for the gradient, instead of storing them.

    Raises:
      ValueError: a size is not positive, ``embedding`` is odd, or ``heads`` does not divide it.

    >>> model = shakespeare_transformer()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    804608
    """
    checks.whole(1, num_characters=num_characters, length=length)
    num_ids = num_characters + 4
    logits = token_logits(num_ids, embedding, heads, feedforward, layers, dropout, remat=remat)
    return language_model(logits, length=length, num_ids=num_ids, oov_buckets=1, divisor=length, truncates=False)
