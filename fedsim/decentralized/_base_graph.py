"""Base-(k+1) graphs: with at most k neighbours per round, any number of nodes agree exactly after few rounds.

Y. Takezawa, R. Sato, H. Bao, K. Niwa, M. Yamada, "Beyond exponential graph: communication-efficient topologies for
decentralized learning via finite-time convergence", NeurIPS 2023, https://arxiv.org/abs/2305.11420.

A round is a list of edges (i, j, weight), and a sequence of rounds averages some nodes exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import networkx as nx

from fedsim import checks
from fedsim.decentralized._topology import Topology

Round = list[tuple[int, int, float]]


def base_graph(nodes: int, degree: int = 1) -> Topology:
    """The Base-(k+1) graph: after a period of few rounds all nodes have the mean of all, exactly, for any number of nodes.

    Args:
      nodes: n.
      degree: k, the largest number of neighbours in a round, at least 1. The period is at most 2 log(n) / log(k + 1) + 2.

    Raises:
      ValueError: ``nodes`` or ``degree`` is not a positive whole number.

    >>> [base_graph(n).period for n in (5, 6, 7, 8, 25)], base_graph(25, degree=4).period
    ([5, 4, 5, 3, 9], 2)
    """
    checks.whole(1, nodes=nodes)
    checks.whole(1, degree=degree, remedy="it is the largest number of neighbours in a round")
    graphs = []
    for edges in _base(list(range(nodes)), degree) or [[]]:
        graph: nx.Graph = nx.empty_graph(nodes)
        graph.add_weighted_edges_from(edges)
        graphs.append(graph)
    return Topology(graphs, f"base-{degree + 1} graphs of {nodes}")


def _base(nodes: Sequence[int], k: int) -> list[Round]:
    """Averages groups of q nodes by `_simple`, then across the groups, if that takes fewer rounds than `_simple` alone.

    The number of groups p has no prime factor above k + 1, and n = p q.
    """
    p, q = _smooth_part(len(nodes), k)
    simple = _simple(nodes, k)
    groups = [nodes[start * q : (start + 1) * q] for start in range(p)]
    inside = _together([_simple(group, k) for group in groups])
    across = _together([_hyper([group[place] for group in groups], k) for place in range(q)])
    return min(simple, inside + across, key=len)


def _simple(nodes: Sequence[int], k: int) -> list[Round]:
    """The simple Base-(k+1) graph (Algorithm 2).

    n is written with base k + 1. For the digit a of the power s there is a set of a parts of s nodes. Each set is averaged.
    Then, set after set, every node of the later sets meets one node of each part, after which the later sets together, and each
    part, have the mean of all.
    """
    if _smooth_part(len(nodes), k)[1] == 1:
        return _hyper(nodes, k)
    digits: list[tuple[int, int]] = []  # (a, s), the largest power first
    rest, power = len(nodes), 1
    while rest:
        rest, digit = divmod(rest, k + 1)
        digits.insert(0, (digit, power))
        power *= k + 1
    places = iter(nodes)
    sets = [[list(itertools.islice(places, s)) for _ in range(a)] for a, s in digits if a]
    flat = [list(itertools.chain(*parts)) for parts in sets]
    first = _together([_hyper(members, k) for members in flat])
    ends: list[list[Round]] = []
    for number, parts in enumerate(sets):
        later = list(itertools.chain(*flat[number + 1 :]))
        weight = len(parts[0]) / (len(flat[number]) + len(later))
        meeting = [(node, part[place], weight) for place, node in enumerate(later) for part in parts]
        # The sets before this one have met earlier, so it waits for ``number`` rounds.
        own = [meeting, *_together([_hyper(part, k) for part in parts])] if later else []
        ends.append([[]] * number + own)
    return first + _together(ends)


def _hyper(nodes: Sequence[int], k: int) -> list[Round]:
    """The k-peer hyper-hypercube (Algorithm 1), for a number of nodes without a prime factor above k + 1."""
    rounds, stride = [], 1
    for factor in _factors(len(nodes), k + 1):
        edges = []
        for i in range(len(nodes)):
            for step in range(1, factor):
                j = i + step * stride
                if i // stride % factor + step < factor:
                    edges.append((nodes[i], nodes[j], 1 / factor))
        rounds.append(edges)
        stride *= factor
    return rounds


def _together(sequences: Sequence[list[Round]]) -> list[Round]:
    """Runs sequences of disjoint nodes at the same time."""
    return [list(itertools.chain(*rounds)) for rounds in itertools.zip_longest(*sequences, fillvalue=[])]


def _smooth_part(n: int, k: int) -> tuple[int, int]:
    """Returns n = p q, where p has all prime factors up to k + 1 and q the others."""
    q = n
    for prime in range(2, k + 2):  # A composite number divides no more here.
        while q % prime == 0:
            q //= prime
    return n // q, q


def _factors(n: int, largest: int) -> list[int]:
    """Returns as few factors of at most ``largest`` as possible whose product is n."""
    best: dict[int, list[int]] = {1: []}
    for divisor in (d for d in range(2, n + 1) if n % d == 0):
        shorter = [best[divisor // f] + [f] for f in range(2, largest + 1) if divisor % f == 0 and divisor // f in best]
        if shorter:
            best[divisor] = min(shorter, key=len)
    return best[n]
