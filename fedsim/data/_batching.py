"""`Batches`: the batches of a client's local training.

A batch is computed as indices into the client's examples, so no array of the client's size is built.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, rng


class Batch(NamedTuple):
    """The input of one local step.

    Attributes:
      examples: feature name to array, first axis ``[size]``.
      mask: ``bool [size]``; False marks padding. Padded rows contain arbitrary examples of the client.
      key: PRNG key of this step, for dropout or noise.
      step: number of the step within the client's round, ``int32 []``, from 0.
    """

    examples: dict[str, jax.Array]
    mask: jax.Array
    key: jax.Array
    step: jax.Array | int


@dataclasses.dataclass(frozen=True)
class Batches:
    """The batch size and the number of steps of a client's local training.

    The examples are shuffled again for every epoch and every round. The epochs are concatenated and then divided into batches,
    as in TFF, so a batch may contain the end of one epoch and the start of the next. The last batch may be partial, which its
    mask shows. With ``steps``, every client takes exactly that many full batches, whatever its number of examples.

    Attributes:
      size: number of examples per batch.
      epochs: number of passes over the client's examples.
      steps: number of batches, instead of ``epochs``, which must be left out then.
      max_steps: largest number of batches. With ``epochs`` the client takes the smaller number of steps, as FedJAX's clients do
        if they are given both ``num_epochs`` and ``num_steps``.
      shuffle: whether to shuffle; False reads the examples in stored order.
      drop_remainder: whether to drop a partial last batch.
      microbatch: number of examples whose gradient is computed at a time, so that large batches fit in memory. The gradient of
        a step is the mean of those of its microbatches, weighted by their numbers of examples. For a loss that is a mean over
        examples it is that of the whole batch, up to rounding and to random draws, such as dropout, which each microbatch has
        of its own. A loss that compares the examples of a batch, such as a contrastive one, compares those of a microbatch.
        None computes the gradient of a batch at once.

    Raises:
      ValueError: a number is not positive, ``microbatch`` is larger than ``size``, or both ``epochs`` and ``steps`` are given.

    >>> [Batches(size=20).num_steps(n) for n in (0, 19, 20, 21)]
    [0, 1, 1, 2]
    >>> Batches(size=0)
    Traceback (most recent call last):
    ...
    ValueError: Expected size >= 1, got size=0: give the number of examples per batch.
    """

    size: int
    epochs: int = 1
    steps: int | None = None
    max_steps: int | None = None
    shuffle: bool = True
    drop_remainder: bool = False
    microbatch: int | None = None

    def __post_init__(self) -> None:
        meanings = {
            "size": "the number of examples per batch",
            "epochs": "the number of passes over a client's examples",
            "steps": "a number of batches, or None to count epochs",
            "max_steps": "a largest number of batches, or None for no limit",
            "microbatch": "a number of examples, or None for whole batches",
        }
        for name, meaning in meanings.items():
            value = getattr(self, name)
            checks.whole(1, or_none=name in ("steps", "max_steps", "microbatch"), **{name: value}, remedy=f"give {meaning}")
            object.__setattr__(self, name, value if value is None else int(value))
        if self.steps is not None and self.epochs != 1:
            raise ValueError(
                f"Expected epochs or steps, got epochs={self.epochs} and steps={self.steps}: leave out steps to make "
                "passes over the examples, leave out epochs to take a number of steps, or give epochs and max_steps for the "
                "smaller of the two."
            )
        if self.microbatch is not None and self.microbatch > self.size:
            raise ValueError(
                f"Expected microbatch <= size, got microbatch={self.microbatch} and size={self.size}: leave it out to compute "
                "the gradient of a batch at once."
            )
        checks.truth(shuffle=self.shuffle, drop_remainder=self.drop_remainder)

    def num_steps(self, num_examples: Any) -> Any:
        """Returns the number of steps of a client with ``num_examples`` examples; without examples it is 0.

        Args:
          num_examples: a Python integer, or an integer array of NumPy or JAX, which may be traced.
        """
        smaller: Any = jnp.minimum
        if isinstance(num_examples, int | np.ndarray | np.integer):  # Host values stay on the host.
            smaller = min if isinstance(num_examples, int) else np.minimum
        if self.steps is not None:
            steps = self.steps * smaller(num_examples, 1)
        else:
            spare = 0 if self.drop_remainder else self.size - 1
            steps = (num_examples * self.epochs + spare) // self.size
        return steps if self.max_steps is None else smaller(steps, self.max_steps)

    def has_padding(self, sizes: np.ndarray) -> np.ndarray:
        """Returns whether a batch of clients with ``sizes`` examples is partial and filled up with padding, ``bool [clients]``.

        >>> Batches(size=20, max_steps=2).has_padding(np.array([0, 19, 40, 41])).tolist()
        [False, True, False, False]
        """
        return np.zeros(len(sizes), bool) if self.steps is not None else self.num_steps(sizes) * self.size > sizes * self.epochs

    def one_pass(self) -> Batches:
        """Returns batches that read every example once, in stored order. They have the size of a microbatch, if there is one.

        >>> Batches(size=20, epochs=5, max_steps=7).one_pass() == Batches(size=20, shuffle=False)
        True
        """
        return Batches(size=self.microbatch or self.size, shuffle=False)

    def num_microbatches(self, rows: int) -> int:
        """Returns the number of microbatches of a batch with so many rows.

        >>> Batches(size=20, microbatch=8).num_microbatches(20), Batches(size=20).num_microbatches(20)
        (3, 1)
        """
        return 1 if self.microbatch is None else -(-rows // self.microbatch)

    def check(self, sizes: np.ndarray) -> None:
        """Checks that clients of these sizes, ``int [clients]``, can be trained; warns of clients that can never take a step.

        Raises:
          ValueError: a client reads more examples per round than fit in 32 bits.
        """
        largest = int(sizes.max(initial=0))
        if largest * self.epochs + self.size >= 2**31 or (self.steps or 0) * self.size >= 2**31:
            raise ValueError(
                f"epochs={self.epochs}, steps={self.steps} and size={self.size} go beyond 2**31 examples per round for a "
                f"client with {largest} examples. Lower epochs, steps or size."
            )
        never = sizes[(sizes > 0) & (self.num_steps(sizes) == 0)]
        if len(never):
            warnings.warn(
                f"{len(never)} of {len(sizes)} clients, the first with {never[0]} examples, can never take a step: "
                f"drop_remainder=True drops a last batch of fewer than size={self.size} examples, and they have no other. "
                "Set drop_remainder=False, a smaller size or more epochs.",
                stacklevel=2,
            )

    def indices(self, seed_words: Any, num_examples: Any, step: Any, xp: Any = jnp) -> tuple[Any, Any]:
        """Returns the indices ``int32 [size]`` and the mask ``bool [size]`` of the client's batch number ``step``."""
        position = xp.arange(self.size, dtype=xp.int32) + xp.asarray(step).astype(xp.int32) * xp.int32(self.size)
        num_examples = xp.maximum(xp.asarray(num_examples).astype(xp.int32), 1)
        epoch, index = position // num_examples, position % num_examples
        mask = xp.ones_like(position, bool) if self.steps is not None else epoch < self.epochs
        if self.shuffle:
            index = rng.permute(seed_words, epoch, num_examples, index, xp)
        return index, mask
