"""`Masks`: what a node adds to its sum, so that the server can read the sum of all nodes alone.

K. Bonawitz, V. Ivanov, B. Kreuter, A. Marcedone, H. B. McMahan, S. Patel, D. Ramage, A. Segal, K. Seth, "Practical secure
aggregation for privacy-preserving machine learning", CCS 2017: https://doi.org/10.1145/3133956.3133982. These are the pairwise
masks of its section 4, of nodes instead of clients: y_i = x_i + Σ_{j > i} m_ij - Σ_{j < i} m_ij modulo 2^32, where m_ij comes
from the key on which the nodes i and j have agreed. Deviations:

- there are no masks of single nodes and no shares of secrets: without the answer of a node, nobody can remove its masks, so the
  sum of this round is lost;
- the server passes the public keys on, and nothing proves whose they are, so it has to follow the protocol;
- keys are agreed on by X25519, HKDF and SHA-256, and masks come from ChaCha20, of the package cryptography.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

_WORD = np.dtype("<u4")


class Masks:
    """The masks of a node, with keys of its own for as long as its process lives.

    Args:
      secret: the private key, 32 bytes; None draws one.

    Attributes:
      public: the public key in hexadecimal digits, which the other nodes need.

    Raises:
      ImportError: the package cryptography, which flwr brings, is not installed.

    >>> one, other = Masks(b"1" * 32), Masks(b"2" * 32)
    >>> keys = {0: one.public, 1: other.public}
    >>> sums = [np.array([3, 4], np.uint32)], [np.array([10, 20], np.uint32)]
    >>> (a,), (b,) = one.added(sums[0], 0, keys, round=5), other.added(sums[1], 1, keys, round=5)
    >>> a.tolist() == [3, 4], (a + b).tolist()
    (False, [13, 24])
    """

    def __init__(self, secret: bytes | None = None) -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
        except ImportError as error:
            raise ImportError(
                "Masks of nodes need the package cryptography, which flwr brings: pip install 'fedsim-jax[run,flower]'."
            ) from error
        self._own = X25519PrivateKey.generate() if secret is None else X25519PrivateKey.from_private_bytes(secret)
        self.public = self._own.public_key().public_bytes_raw().hex()
        self._last = -1

    def added(self, sums: Sequence[np.ndarray], number: int, keys: Mapping[int, str], *, round: int) -> list[np.ndarray]:
        """Adds the masks of a round, and returns new arrays.

        Args:
          sums: what this node has summed, arrays of ``uint32`` and any shapes, which are the same at all nodes.
          number: of this node.
          keys: the public keys of all nodes whose sums the server adds in this round, by their numbers.
          round: the number of the round, larger than in every call before, because a mask that hides two sums shows their
            difference.

        Raises:
          ValueError: the round is not a later one, or the node has another key, because its process has been started again.
        """
        if keys[number] != self.public:
            raise ValueError(
                f"Expected the key of this node, got an older one in round {round + 1}, because node {number} has been started "
                "again: continue the run (fedsim resume, or flwr run), so that all nodes agree on new keys."
            )
        if round <= self._last:
            raise ValueError(
                f"Expected a round after round {self._last + 1}, whose masks are used, got round {round + 1}: continue the run "
                "(fedsim resume, or flwr run), so that all nodes agree on new keys."
            )
        self._last = round
        total = np.concatenate([np.asarray(each, _WORD).ravel() for each in sums])
        for other, key in keys.items():
            if other != number:
                (np.add if number < other else np.subtract)(total, self._mask(key, round, total.size), out=total)
        ends = np.cumsum([np.size(each) for each in sums])[:-1]
        return [part.reshape(np.shape(each)) for part, each in zip(np.split(total, ends), sums, strict=True)]

    def _mask(self, key: str, round: int, size: int) -> np.ndarray:
        """Returns the words that this node and the one with this public key draw in a round."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        agreed = self._own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(key)))
        drawn = HKDF(hashes.SHA256(), length=32, salt=None, info=b"fedsim mask of round %d" % round).derive(agreed)
        stream = Cipher(algorithms.ChaCha20(drawn, bytes(16)), mode=None).encryptor()
        return np.frombuffer(stream.update(bytes(size * _WORD.itemsize)), _WORD)
