"""Looking for updates that were dropped must not cost what it is there to report about."""

import types

import numpy as np

from fedsim.execution import RoundInfo
from fedsim.execution._dropped import watch_dropped


class Computed:
    """A number that is there already: it can be read, and whatever would compute with it waits behind the devices' queue."""

    def __array__(self, dtype=None, copy=None):
        return np.zeros([], dtype or np.int32)

    def is_ready(self):
        return True

    def sum(self, *args, **kwargs):
        raise AssertionError("a sum on the device waits for the rounds under way")


def test_counts_are_read_and_not_computed_with():
    program, info = types.SimpleNamespace(nonfinite="drop"), RoundInfo({}, *(Computed() for _ in range(5)))
    watch_dropped(program, info, [])
    assert program._execution["unread"] == []
