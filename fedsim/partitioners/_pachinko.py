"""Hierarchical label skew: the partition of TFF's CIFAR-100.

S. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konečný, S. Kumar, B. McMahan, "Adaptive federated optimization",
ICLR 2021, appendix: https://arxiv.org/abs/2003.00295, after W. Li, A. McCallum, "Pachinko allocation", ICML 2006. There:
500 clients of 100 examples, alpha = 0.1 over 20 coarse labels, beta = 10 over 5 fine labels each. No deviations in the
law; the clients are not those of TFF's file, whose random numbers are another library's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsim import checks
from fedsim.partitioners._draw import check_clients, check_labels, deal, even_sizes, generator


def pachinko(
    fine: Any,
    coarse: Any,
    *,
    clients: int = 500,
    examples: int | None = None,
    alpha: float = 0.1,
    beta: float = 10.0,
    seed: int,
    replace: bool = False,
) -> list[np.ndarray]:
    """Every client draws a mixture of coarse labels, of each a mixture of fine labels, and its examples by these.

    Client after client, example after example: a coarse label from the client's Dirichlet(alpha), a fine label below it from
    its Dirichlet(beta), then an example of that label that nobody has. A fine label without examples left is taken out, and
    so is a coarse label without fine ones; what remains of a mixture is scaled up.

    Args:
      fine: ``[n]``, the fine label of each example, whole numbers or names.
      coarse: ``[n]``, the coarse label of each example. With a table from fine to coarse labels: ``table[fine]``.
      clients: number of clients.
      examples: how many each gets; None: all there are, evenly.
      alpha: of each coarse label; small means skewed, large means alike.
      beta: of each fine label.
      seed: same seed, same partition.
      replace: every draw is from all examples, so that one can come twice and no label is ever used up.

    Returns:
      One sorted ``int64`` index array per client.

    Guarantees:
      - No example goes to two clients, or to one twice, unless ``replace``.
      - With ``examples=None`` and without ``replace`` every example goes to exactly one client, and sizes differ by at most 1.
      - With ``examples``, every client has exactly so many; the others are left out.

    Raises:
      ValueError: ``alpha``, ``beta`` or a number not positive, a fine label under two coarse ones, fewer than
        ``clients * examples`` examples without ``replace``.

    >>> fine = np.arange(600) % 6
    >>> parts = pachinko(fine, fine // 2, clients=10, seed=0)
    >>> {len(rows) for rows in parts}, len(set(np.concatenate(parts)))
    ({60}, 600)
    """
    fine, coarse = check_labels(fine), check_labels(coarse)
    checks.positive(alpha=alpha, beta=beta)
    if len(fine) != len(coarse):
        raise ValueError(f"There are {len(fine)} fine and {len(coarse)} coarse labels: expected both of every example.")
    check_clients(clients, len(fine), 1 if examples is None else 0)
    checks.whole(1, or_none=True, examples=examples, remedy="give each client's number, or None for equal shares")
    if examples is not None and not len(fine):
        raise ValueError(f"Expected any examples at all, to give examples={examples} of them to each client.")
    if examples is not None and clients * examples > len(fine) and not replace:
        raise ValueError(
            f"{len(fine)} examples are too few for clients={clients} with examples={examples} each: ask for fewer, or give "
            "replace=True to draw some more than once."
        )
    names, codes = np.unique(fine, return_inverse=True)
    parents, parent_codes = np.unique(coarse, return_inverse=True)
    parent = np.zeros(len(names), np.int64)
    parent[codes] = parent_codes
    if np.any(parent[codes] != parent_codes):
        name = names[codes[np.flatnonzero(parent[codes] != parent_codes)[0]]]
        raise ValueError(f"Fine label {name!s} is under more than one coarse label: expected a tree.")

    draw = generator(seed, "pachinko")
    roots = draw.dirichlet(np.full(len(parents), float(alpha)), size=clients)
    leaves = np.empty((clients, len(names)))
    for code in range(len(parents)):
        children = np.flatnonzero(parent == code)
        leaves[:, children] = draw.dirichlet(np.full(len(children), float(beta)), size=clients)
    below = np.equal(parent[:, None], np.arange(len(parents))).astype(np.float64)

    def mixture(people: np.ndarray, left: np.ndarray) -> np.ndarray:
        weights = leaves[people] * left
        of_parent = (weights @ below)[:, parent]
        # Divided before it is multiplied: a share is at most 1, where the inverse of what is left may overflow.
        return np.divide(weights, of_parent, out=np.zeros_like(weights), where=of_parent > 0) * roots[people][:, parent]

    sizes = even_sizes(len(fine), clients) if examples is None else np.full(clients, examples)
    if replace:
        return [
            _with_replacement(mixture(np.array([i]), np.ones(len(names), bool))[0], codes, n, draw) for i, n in enumerate(sizes)
        ]
    return deal(np.repeat(np.arange(clients), sizes), clients, codes, mixture, draw)


def _with_replacement(weights: np.ndarray, codes: np.ndarray, size: int, draw: np.random.Generator) -> np.ndarray:
    counts = draw.multinomial(size, weights / weights.sum())
    drawn = [draw.choice(np.flatnonzero(codes == code), counts[code]) for code in np.flatnonzero(counts)]
    return np.sort(np.concatenate(drawn)).astype(np.int64)
