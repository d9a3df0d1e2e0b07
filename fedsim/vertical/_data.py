"""`VerticalData`: the people whom all parties know, in one order, and `align`, which finds them."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedsim.data import FederatedData
from fedsim.vertical._party import Party


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PooledData(FederatedData):
    """One client's data with a column for each party, and the names of what a party's column consists of.

    >>> PooledData({"bank": np.zeros([2, 1])}, np.array([0, 2]), ["0"], names={"bank": ("income",)}).names["bank"]
    ('income',)
    """

    names: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class VerticalData:
    """Features and labels of the same people, row by row.

    Attributes:
      features: ``float32 [n, width]`` by the name of the party that holds them.
      labels: ``int32 [n]`` or ``float32 [n]``.
      labels_at: the name of the party that has the labels; it may have no features.
      columns: the names of each party's columns.
      ids: the ids of the people, ``[n]``.

    >>> data = VerticalData(
    ...     features={"shop": np.zeros([4, 2], np.float32)}, labels=np.zeros(4, np.int32), labels_at="bank",
    ...     columns={"shop": ("visits", "spent")}, ids=("a", "b", "c", "d"))
    >>> len(data), len(data.take(slice(0, 3)))
    (4, 3)
    """

    features: Mapping[str, np.ndarray]
    labels: np.ndarray
    labels_at: str
    columns: Mapping[str, tuple[str, ...]]
    ids: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Any) -> VerticalData:
        """Returns the data of some people; ``rows`` are positions, a slice, or the position of one person."""
        rows = np.atleast_1d(np.arange(len(self))[rows])
        return dataclasses.replace(
            self,
            features={party: values[rows] for party, values in self.features.items()},
            labels=self.labels[rows],
            ids=tuple(self.ids[row] for row in rows),
        )

    def only(self, *parties: str) -> VerticalData:
        """Returns the same people with the features of these parties, for example to train without the others.

        Raises:
          ValueError: a party has no features.
        """
        for party in parties:
            if party not in self.features:
                raise ValueError(f"Expected a party with features, got {party!r}: they are at {', '.join(self.features)}.")
        kept = {party: self.features[party] for party in self.features if party in parties}
        return dataclasses.replace(self, features=kept, columns={party: self.columns[party] for party in kept})

    def pooled(self) -> FederatedData:
        """Returns all features as columns by party, and the labels as ``y``, as one client's data.

        `VerticalModel.joint` reads it: it is what a single organization with all columns would have.
        """
        return PooledData({**self.features, "y": self.labels}, np.array([0, len(self)]), ["0"], names=self.columns)


def align(parties: Mapping[str, Party], *, secret: str | bytes) -> VerticalData:
    """Keeps the people that all parties know, and brings them into one order.

    Every party computes HMAC-SHA256 of its ids with a secret that all parties share, and the parties compare these hashes. What
    this protects: somebody who sees the hashes without the secret cannot test guessed ids. What it does not protect: every
    party has the secret and can test any id that it guesses against the hashes of the others, and all of them learn how many
    people each party knows and which people match. It is not a protocol of private set intersection.

    The order is that of the hashes. It depends on the secret and the ids, and not on the order of rows. A party's columns are
    in the order of their names (x2 before x10), so that training and test data agree whatever the order in their tables.

    Args:
      parties: the parties by name. Exactly one has labels.
      secret: the key of the hashes; texts are encoded in UTF-8.

    Raises:
      ValueError: no party or several parties have labels; two parties hold a column of the same name; no party has columns; a
        party has the name "y"; the secret is empty; or the parties have no id in common.

    >>> bank = Party(ids=["ann", "bob", "eve"], columns={"income": [3, 2, 1]}, labels=[1, 0, 0])
    >>> shop = Party(ids=["eve", "dan", "ann"], columns={"visits": [10, 20, 30]})
    >>> data = align({"bank": bank, "shop": shop}, secret="of both")
    >>> sorted(zip(data.ids, data.features["shop"][:, 0].tolist(), data.labels.tolist()))
    [('ann', 30.0, 1), ('eve', 10.0, 0)]
    """
    key = secret.encode() if isinstance(secret, str) else secret
    if not isinstance(key, bytes) or not key:
        raise ValueError(f"Expected secret to be a text or bytes, not empty, got secret={secret!r}: give secret='...'.")
    _check_columns(parties)
    with_labels = [name for name, party in parties.items() if party.labels is not None]
    if not with_labels:
        raise ValueError(f"Expected a party with labels, got none of {', '.join(parties)}: give labels to one party.")
    if len(with_labels) > 1:
        raise ValueError(f"Expected labels at one party, got them at {' and '.join(with_labels)}: keep those of one.")
    rows = {
        name: {hmac.digest(key, str(person).encode(), hashlib.sha256): row for row, person in enumerate(party.ids)}
        for name, party in parties.items()
    }
    common = sorted(set.intersection(*(set(hashes) for hashes in rows.values())))
    if not common:
        raise ValueError(
            f"Expected people that all parties know, got no id in common of {', '.join(parties)}: check that their ids mean "
            "the same and are written alike."
        )
    order = {name: np.array([hashes[each] for each in common]) for name, hashes in rows.items()}
    holder = with_labels[0]
    holding = {name: _with_sorted_columns(party) for name, party in parties.items() if party.columns}
    return VerticalData(
        features={name: party.matrix()[order[name]] for name, party in holding.items()},
        labels=np.asarray(parties[holder].labels)[order[holder]],
        labels_at=holder,
        columns={name: tuple(party.columns) for name, party in holding.items()},
        ids=tuple(str(parties[holder].ids[row]) for row in order[holder]),
    )


def _with_sorted_columns(party: Party) -> Party:
    def key(name: str) -> tuple[list[Any], str]:
        parts = re.split(r"(\d+)", name)  # texts and numbers by turns
        return [int(part) if i % 2 else part for i, part in enumerate(parts)], name

    return dataclasses.replace(party, columns={name: party.columns[name] for name in sorted(party.columns, key=key)})


def _check_columns(parties: Mapping[str, Party]) -> None:
    if "y" in parties:
        raise ValueError("Expected parties to have names other than 'y', which is that of the labels, got 'y': rename it.")
    holders: dict[str, str] = {}
    for name, party in parties.items():
        for column in party.columns:
            if column in holders:
                raise ValueError(
                    f"Expected every column at one party, got {column!r} at {holders[column]!r} and {name!r}: leave it out at "
                    "one of them, or rename it if they mean different things (Party.from_csv has prefix=...)."
                )
            holders[column] = name
    if not holders:
        raise ValueError("Expected a party with columns, got only labels: give columns to at least one party.")
