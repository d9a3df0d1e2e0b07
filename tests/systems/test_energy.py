"""`EnergyModel` against a sum by hand."""

import pytest

from fedsim.systems import EnergyModel


def test_joules_are_a_sum_of_bytes_and_seconds():
    model = EnergyModel(joules_per_byte_up=3.0, joules_per_byte_down=5.0, watts=7.0)
    assert model.joules(bytes_up=2, bytes_down=11, seconds=13) == 2 * 3 + 11 * 5 + 13 * 7


@pytest.mark.parametrize("name", ["joules_per_byte_up", "joules_per_byte_down", "watts"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_numbers_that_are_negative_or_not_finite_are_refused(name, value):
    fields = {"joules_per_byte_up": 1.0, "joules_per_byte_down": 1.0, "watts": 1.0} | {name: value}
    with pytest.raises(ValueError, match=f"Expected {name} >= 0 and finite, got {name}={value}"):
        EnergyModel(**fields)
