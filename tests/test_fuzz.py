"""Tests that `fuzz.py` detects readers that fail in other ways than by a `FormatError`."""

import pytest
from fuzz import assert_only_format_errors, mutations

ONE_CLIENT = "fedsim.FederatedData.from_arrays({'x': numpy.zeros(1)}, sizes=[1])"


class Reader:
    """A picklable function of ``path``, given as source code that is evaluated for damaged files."""

    def __init__(self, on_damage):
        imports = "fedsim, numpy, os, time = map(__import__, ('fedsim', 'numpy', 'os', 'time'))"
        self.source = f"exec({imports!r}, globals()) or (lambda p: {ONE_CLIENT} if p.read_bytes() == b'whole' else {on_damage})"

    def __reduce__(self):
        return eval, (self.source,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_damage", "message"),
    [
        ("os.abort()", "mutation 0 of seed 0: -6"),
        ("{}['key']", "KeyError"),
        ("fedsim.data.FederatedData({'x': numpy.empty(10**13)}, [0], ['a'])", "MemoryError"),
        ("(_ for _ in ()).throw(fedsim.data.FormatError('something is wrong'))", "does not name the file"),
    ],
)
def test_a_reader_that_fails_otherwise_is_detected(on_damage, message):
    with pytest.raises(AssertionError, match=message):
        assert_only_format_errors(Reader(on_damage), b"whole", ".x", 3)


@pytest.mark.slow
def test_a_reader_that_raises_format_errors_passes():
    empty = "fedsim.data.ClientStream(lambda: iter([]), source=p).load()"
    assert_only_format_errors(Reader(empty), b"whole", ".x", 3)


def test_mutations_are_of_many_kinds_and_repeatable():
    original = bytes(range(256)) * 40
    first = list(mutations(original, 1, 200))
    assert first == list(mutations(original, 1, 200))
    assert len(set(first)) > 190
    assert {len(m) < len(original) for m in first} == {True, False}
    assert any(len(m) > len(original) for m in first)
