"""``fedsim algorithms``: lists the algorithms, with a server and without one."""

from __future__ import annotations

from fedsim import algorithms, decentralized
from fedsim.commands._listing import print_listing


def main(arguments: list[str]) -> int:
    """Runs ``fedsim algorithms`` and returns the exit status."""
    print_listing(dict(sorted({**algorithms.ALGORITHMS, **decentralized.ALGORITHMS}.items())))
    return 0
