"""Base class of k-means and Gaussian mixtures: initial points, and updates from moments of the examples."""

from __future__ import annotations

import dataclasses

from fedsim.algorithms._seeding import Seeding


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Clusters(Seeding):
    """Base class of clustering algorithms: initial points, moments, a maximization step, and `scores` for evaluation.

    The initial points are ``start``, or are chosen by k-means++ from the examples of the clients that participate, one point
    per round. `maximize` receives moments only after that. Subclasses define ``no_moments``, `moments`, `maximize` and
    `scores`.

    Attributes:
      num_features: see `FlatFeatures`.
      num_clusters: k.
      start: the initial points, ``[num_clusters, num_features]``. None uses k-means++.
      feature, batches: see `Statistics`.

    >>> Clusters(num_features=2, num_clusters=0)
    Traceback (most recent call last):
    ...
    ValueError: Expected num_clusters >= 1, got num_clusters=0: give a positive whole number.
    """
