"""Hierarchical label skew, as in TensorFlow Federated's CIFAR-100.

S. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konečný, S. Kumar, B. McMahan, "Adaptive federated optimization",
ICLR 2021, appendix: https://arxiv.org/abs/2003.00295, after W. Li, A. McCallum, "Pachinko allocation", ICML 2006. There:
500 clients of 100 examples, alpha = 0.1 over 20 coarse labels, beta = 10 over 5 fine labels each. The distribution has no
deviations. The clients are not those of TFF's file, which was drawn with another library's random numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsim import checks
from fedsim.partitioners._draw import assign_by_label, check_clients, check_labels, even_sizes, generator


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
    """Draws for every client a mixture of coarse labels and mixtures of the fine labels below them, and its examples by these.

    Examples are assigned one at a time, client by client: a coarse label is drawn from the client's Dirichlet(alpha) mixture,
    a fine label below it from the client's Dirichlet(beta) mixture, and then an example of that label that has not been
    assigned yet. A fine label without examples left is removed, and so is a coarse label without fine labels left; the rest of
    the mixture is rescaled.

    Args:
      fine: ``[n]``, the fine label of each example, whole numbers or names.
      coarse: ``[n]``, the coarse label of each example; ``table[fine]`` if you have a table from fine to coarse labels.
      clients: number of clients.
      examples: number of examples per client; None divides all examples evenly.
      alpha: concentration of each coarse label. Small values give skewed clients, large values similar ones.
      beta: concentration of each fine label.
      seed: the same seed gives the same partition.
      replace: if true, every draw is from all examples, so an example can occur twice and no label runs out.

    Returns:
      One sorted ``int64`` index array per client.

    Guarantees:
      - Without ``replace``, no example is assigned twice.
      - With ``examples=None`` and without ``replace``, every example is assigned to exactly one client, and sizes differ by at
        most 1.
      - With ``examples``, every client has exactly that many; the remaining examples are not used.

    Raises:
      ValueError: ``alpha``, ``beta``, ``clients`` or ``examples`` is not positive, a fine label has two coarse labels, or there
        are fewer than ``clients * examples`` examples and ``replace`` is false.

    >>> fine = np.arange(600) % 6
    >>> parts = pachinko(fine, fine // 2, clients=10, seed=0)
    >>> {len(rows) for rows in parts}, len(set(np.concatenate(parts)))
    ({60}, 600)
    """
    fine, coarse = check_labels(fine), check_labels(coarse)
    checks.positive(alpha=alpha, beta=beta)
    if len(fine) != len(coarse):
        raise ValueError(f"There are {len(fine)} fine and {len(coarse)} coarse labels: give one of each per example.")
    check_clients(clients, len(fine), 1 if examples is None else 0)
    checks.whole(
        1,
        or_none=True,
        examples=examples,
        remedy="give a number per client, or None to divide all evenly",
    )
    if examples is not None and not len(fine):
        raise ValueError(f"There are no examples to give examples={examples} to each client: give labels that are not empty.")
    if examples is not None and clients * examples > len(fine) and not replace:
        raise ValueError(
            f"{len(fine)} examples are too few for clients={clients} with examples={examples} each: give smaller numbers, or "
            "replace=True, which may draw an example more than once."
        )
    names, codes = np.unique(fine, return_inverse=True)
    parents, parent_codes = np.unique(coarse, return_inverse=True)
    parent = np.zeros(len(names), np.int64)
    parent[codes] = parent_codes
    if np.any(parent[codes] != parent_codes):
        name = names[codes[np.flatnonzero(parent[codes] != parent_codes)[0]]]
        raise ValueError(f"Fine label {name!s} has more than one coarse label: give each fine label exactly one coarse label.")

    draw = generator(seed, "pachinko")
    roots = draw.dirichlet(np.full(len(parents), float(alpha)), size=clients)
    leaves = np.empty((clients, len(names)))
    for code in range(len(parents)):
        children = np.flatnonzero(parent == code)
        leaves[:, children] = draw.dirichlet(np.full(len(children), float(beta)), size=clients)
    below = np.equal(parent[:, None], np.arange(len(parents))).astype(np.float64)

    def mixture(receivers: np.ndarray, left: np.ndarray) -> np.ndarray:
        weights = leaves[receivers] * left
        of_parent = (weights @ below)[:, parent]
        # The division comes first because a share is at most 1, while the inverse of a tiny sum may overflow.
        return np.divide(weights, of_parent, out=np.zeros_like(weights), where=of_parent > 0) * roots[receivers][:, parent]

    sizes = even_sizes(len(fine), clients) if examples is None else np.full(clients, examples)
    if replace:
        return [
            _with_replacement(mixture(np.array([i]), np.ones(len(names), bool))[0], codes, n, draw) for i, n in enumerate(sizes)
        ]
    return assign_by_label(np.repeat(np.arange(clients), sizes), clients, codes, mixture, draw)


def _with_replacement(weights: np.ndarray, codes: np.ndarray, size: int, draw: np.random.Generator) -> np.ndarray:
    counts = draw.multinomial(size, weights / weights.sum())
    drawn = [draw.choice(np.flatnonzero(codes == code), counts[code]) for code in np.flatnonzero(counts)]
    return np.sort(np.concatenate(drawn)).astype(np.int64)
