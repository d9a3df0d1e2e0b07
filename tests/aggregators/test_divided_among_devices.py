"""Aggregators that store all updates, with coordinates divided among devices, compared with one device and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedsim import aggregators

pytestmark = pytest.mark.slow

AGGREGATORS = {
    "median": aggregators.CoordinateMedian(),
    "trimmed": aggregators.TrimmedMean(0.2),
    "krum": aggregators.Krum(attackers=2),
    "multi-krum": aggregators.Krum(attackers=2, selected=5),
    "bulyan": aggregators.Bulyan(attackers=2),
    "geometric": aggregators.GeometricMedian(),
    "min norm": aggregators.MinNorm(),
}


class Largest(aggregators.StackAggregator):
    """A user's subclass that defines only `combine`."""

    def combine(self, updates, weights):
        return jax.tree.map(
            lambda rows: jnp.max(jnp.where(weights.reshape(-1, *[1] * (rows.ndim - 1)) > 0, rows, -9), 0), updates
        )


class LargestOfKrum(aggregators.Krum):
    """A user's subclass that overrides `combine` of a built-in aggregator."""

    combine = Largest.combine


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("name", [*AGGREGATORS, "largest", "largest of Krum"])
def test_several_devices_give_the_same_aggregate_as_one(name, devices):
    """Some leaves are divided among devices, others are too small or not divisible or have other dtypes; the last slot is
    unused."""
    others = {"largest": Largest(), "largest of Krum": LargestOfKrum(attackers=2)}
    aggregator = others[name] if name in others else AGGREGATORS[name]
    draw, slots = np.random.default_rng(30), 12
    shapes = {
        "even": (160, 256),
        "odd": (131, 300),
        "half": (1024, 64),
        "flat": (40_000,),
        "small": (7,),
        "one": (),
        "none": (0, 2),
    }
    rows = {
        key: jnp.asarray(draw.normal(size=(slots, *shape)), jnp.bfloat16 if key == "half" else jnp.float32)
        for key, shape in shapes.items()
    }
    weights = jnp.asarray([*draw.integers(1, 9, slots - 2), 0, 0], jnp.float32)
    like, key = jax.tree.map(lambda leaf: leaf[0], rows), jax.random.key(31)

    def accumulate_rows(accumulator, on_this_device):
        def add(slot, accumulator):
            return jax.tree.map(
                lambda new, old: jnp.where(on_this_device(slot), new, old),
                aggregator.accumulate(accumulator, jax.tree.map(lambda leaf: leaf[slot], rows), weights[slot], slot),
                accumulator,
            )

        return jax.lax.fori_loop(0, slots - 1, add, accumulator)

    def together(_):
        device = jax.lax.axis_index("devices")
        mine = accumulate_rows(aggregator.zero_devices(like, slots, "devices"), lambda slot: slot * 5 % devices == device)
        return jax.tree.map(lambda x: x[None], aggregator.finish_round_devices(mine, (), key, "devices")[0])

    mesh, spec = jax.sharding.Mesh(jax.devices()[:devices], "devices"), jax.P("devices")
    shared = jax.jit(jax.shard_map(together, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(jnp.zeros(devices))
    zero = aggregator.zero(like, slots)
    alone = jax.jit(lambda: aggregator.finish_round(accumulate_rows(zero, lambda slot: True), (), key)[0])()
    for leaf, shape in shapes.items():
        assert shared[leaf].shape == (devices, *shape) and shared[leaf].dtype == alone[leaf].dtype
        close = {"rtol": 2e-5, "atol": 2e-6} if shared[leaf].dtype == jnp.float32 else {"atol": 2**-6}
        np.testing.assert_array_equal(shared[leaf], np.broadcast_to(shared[leaf][:1], shared[leaf].shape))
        np.testing.assert_allclose(shared[leaf][0].astype(np.float32), alone[leaf].astype(np.float32), **close)


class Counting(aggregators.StackAggregator):
    """A user's subclass with another accumulator."""

    def zero(self, update, slots):
        return super().zero(update, slots), jnp.float32(0)

    def accumulate(self, accumulator, update, weight, slot):
        return super().accumulate(accumulator[0], update, weight, slot), accumulator[1] + 1

    def finish(self, accumulator):
        return jax.tree.map(lambda x: x + accumulator[1], super().finish(accumulator[0]))

    combine = Largest.combine


class Twice(aggregators.AuxMean):
    def finish_round(self, accumulator, memory, key):
        result, memory = super().finish_round(accumulator, memory, key)
        return result._replace(update=jax.tree.map(lambda x: 2 * x, result.update)), memory


class AddsALeaf(aggregators.StackAggregator):
    def combine_coordinates(self, updates, weights, all_reduce):
        return {**jax.tree.map(lambda rows: rows[0], updates), "a norm": jnp.float32(1)}


def on_devices(aggregator, rows, devices=2):
    """Returns the aggregate of equally weighted updates that are distributed over the devices in turn."""
    slots = len(jax.tree.leaves(rows)[0])

    def together(_):
        device = jax.lax.axis_index("devices")
        accumulator = aggregator.zero_devices(jax.tree.map(lambda leaf: leaf[0], rows), slots, "devices")
        for slot in range(slots):
            row = jax.tree.map(lambda leaf, slot=slot: leaf[slot], rows)
            added = aggregator.accumulate(accumulator, row, jnp.float32(1), jnp.int32(slot))
            accumulator = jax.tree.map(lambda a, b, slot=slot: jnp.where(slot % devices == device, a, b), added, accumulator)
        return aggregator.finish_round_devices(accumulator, (), jax.random.key(0), "devices")[0]

    mesh = jax.sharding.Mesh(jax.devices()[:devices], "devices")
    return jax.shard_map(together, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)(jnp.zeros(()))


def test_overridden_methods_of_users_are_called_on_devices():
    x = jnp.asarray(np.random.default_rng(32).normal(size=(6, 160, 256)), jnp.float32)
    np.testing.assert_allclose(on_devices(Counting(), {"x": x})["x"], jnp.max(x, 0) + 6, rtol=1e-6)
    twice = on_devices(Twice(inner=aggregators.CoordinateMedian()), aggregators.WithAux({"x": x}, jnp.arange(6.0)))
    np.testing.assert_allclose(twice.update["x"], 2 * np.median(x, 0), rtol=1e-5, atol=1e-6)
    assert twice.aux == 2.5
    with pytest.raises(ValueError, match=r"Expected AddsALeaf.combine_coordinates to return .*, got .* define combine instead"):
        on_devices(AddsALeaf(), {"x": x})


def test_booleans_are_not_divided_among_devices():
    flags = jnp.asarray(np.random.default_rng(33).integers(0, 2, (5, 40_000)), bool)
    median = on_devices(aggregators.CoordinateMedian(), {"x": flags})["x"]
    np.testing.assert_array_equal(median, np.median(flags, 0))


class NotAny(aggregators.StackAggregator):
    """A user's subclass that aggregates booleans together with numbers that are divided among devices."""

    def combine_coordinates(self, rows, weights, all_reduce):
        assert rows["flags"].dtype == bool
        return {"large": rows["large"].max(0), "flags": ~rows["flags"].any(0)}


class NotAnyOfWholeUpdates(NotAny):
    """Overrides `combine`, and therefore receives whole updates."""

    def combine(self, updates, weights):
        return self.combine_coordinates(updates, weights, lambda sums: sums)


@pytest.mark.parametrize("aggregator", [NotAny(), NotAnyOfWholeUpdates()])
def test_booleans_keep_their_dtype_if_other_leaves_are_divided(aggregator):
    draw = np.random.default_rng(34)
    rows = {"large": draw.normal(size=(5, 40_000)).astype(np.float32), "flags": draw.integers(0, 4, (5, 9)) == 0}
    result = on_devices(aggregator, jax.tree.map(jnp.asarray, rows))
    assert result["flags"].dtype == bool
    np.testing.assert_array_equal(result["flags"], ~rows["flags"].any(0))
    np.testing.assert_array_equal(result["large"], rows["large"].max(0))


@pytest.mark.parametrize("name", AGGREGATORS)
def test_large_leaves_are_divided_among_devices(name):
    """Each device stores only its segment of the leaves."""
    like = {"even": jnp.zeros((160, 256)), "odd": jnp.zeros((131, 300)), "small": jnp.zeros(8)}
    mesh = jax.sharding.Mesh(jax.devices()[:4], "devices")

    def shapes(_):
        folds = AGGREGATORS[name].zero_devices(like, 12, "devices")
        return jnp.zeros(()), jax.tree.map(lambda x: jnp.zeros((0, *x.shape)), folds.updates)

    folds = jax.shard_map(shapes, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)(jnp.zeros(()))[1]
    assert {key: x.shape[1:] for key, x in folds.items()} == {
        "even": (4, 12, 40, 256),
        "odd": (1, 12, 131, 300),
        "small": (1, 12, 8),
    }
