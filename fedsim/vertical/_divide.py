"""Parties that are made from one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedsim import checks, rng
from fedsim.vertical._party import Party, check_different


def divide_columns(
    x: Any,
    labels: Any,
    blocks: Mapping[str, Sequence[int] | np.ndarray],
    *,
    labels_at: str,
    overlap: float = 1.0,
    names: Sequence[str] | None = None,
    ids: Sequence[str] | Sequence[int] | None = None,
    seed: int = 0,
) -> dict[str, Party]:
    """Divides the columns of a table among parties, which may know some people in common only.

    Args:
      x: the table, ``[n, features]``.
      labels: ``[n]``.
      blocks: the positions of each party's columns, for example
        ``dict(zip(["a", "b"], fedsim.partitioners.vertical(x, parties=2)))``.
      labels_at: the name of the party with the labels. A name that is not in ``blocks`` adds a party with labels only.
      overlap: the share of people whom all parties know, in [0, 1]; their number is rounded. Each of the others is known to one
        party, which is drawn uniformly.
      names: the names of the columns; default ``x0``, ``x1``, ....
      ids: the ids of the people; default 0 to n - 1.
      seed: the same seed gives the same parties.

    Returns:
      The parties by name, each with its rows in an order of its own.

    Raises:
      ValueError: ``x`` is not a table; ``overlap`` is not in [0, 1]; the numbers of labels, names or ids do not fit; a position
        is not in [0, features) or occurs twice; or two columns have the same name.

    >>> parties = divide_columns(np.eye(4), [0, 1, 1, 0], {"a": [0, 1], "b": [2, 3]}, labels_at="c", overlap=0.5)
    >>> {name: (len(party.ids), list(party.columns), party.labels is not None) for name, party in parties.items()}
    {'a': (2, ['x0', 'x1'], False), 'b': (3, ['x2', 'x3'], False), 'c': (3, [], True)}
    """
    x, labels = np.asarray(x), np.asarray(labels)
    if x.ndim != 2:
        raise ValueError(f"Expected x to be a table [n, features], got shape {list(x.shape)}: flatten the features.")
    checks.number(least=0, most=1, overlap=overlap)
    checks.instance(Mapping, 'dict(zip(["a", "b"], fedsim.partitioners.vertical(x, parties=2)))', blocks=blocks)
    n, width = x.shape
    column_names = [f"x{i}" for i in range(width)] if names is None else list(names)
    people = np.arange(n) if ids is None else np.asarray(ids)
    for what, values, count in (("labels", labels, n), ("ids", people, n), ("names", column_names, width)):
        if len(values) != count:
            raise ValueError(f"Expected {count} {what} for x of shape {[n, width]}, got {len(values)}.")
    check_different("columns", column_names)
    holders: dict[int, str] = {}
    for party, block in blocks.items():
        for position in block:
            given: dict[str, Any] = {f"blocks[{party!r}]": position}
            checks.whole(0, width - 1, **given, remedy="columns are numbered from 0")
            if position in holders:
                raise ValueError(
                    f"Expected every column at one party and once, got blocks[{party!r}]={position}, which is also at "
                    f"{holders[position]!r}: leave it out."
                )
            holders[position] = party
    everybody = list(dict.fromkeys([*blocks, labels_at]))
    draw = rng.generator(np.asarray(rng.words(rng.stream(rng.root(seed), "vertical"))))
    common, others = np.split(draw.permutation(n), [round(overlap * n)])
    knows = draw.integers(len(everybody), size=len(others))
    parties = {}
    for number, name in enumerate(everybody):
        rows = draw.permutation(np.concatenate([common, others[knows == number]]))
        parties[name] = Party(
            ids=people[rows].tolist(),
            columns={column_names[i]: x[rows, i] for i in blocks.get(name, ())},
            labels=labels[rows] if name == labels_at else None,
        )
    return parties
