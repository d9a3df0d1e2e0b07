"""Covariances of k Gaussians, stacked in one array. Diagonal covariances are stored as variances, full ones as matrices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

_einsum = functools.partial(jnp.einsum, precision="highest")


class Diagonal:
    """Diagonal covariances, stored as variances ``[k, features]``.

    >>> Diagonal().weighted_squares(jnp.array([[[3.0, 2.0]]]), jnp.array([[0.5]])).tolist()
    [[4.5, 2.0]]
    """

    def unit(self, features: int) -> jax.Array:
        """Returns the identity covariance of one Gaussian, without the axis k."""
        return jnp.ones(features, jnp.float32)

    def weighted_squares(self, differences: jax.Array, shares: jax.Array) -> jax.Array:
        """Returns sums over examples of ``shares [n, k]`` times the squares of ``differences [n, k, features]``."""
        return _einsum("nk,nki,nki->ki", shares, differences, differences)

    def corrected(self, covariances: jax.Array, errors: jax.Array, least: float) -> jax.Array:
        """Corrects rounding errors in covariances, of about ``errors [k, features]``: no variance is below ``errors + least``.

        >>> Diagonal().corrected(jnp.array([[-3.0, 2.0]]), jnp.array([[0.5, 0.5]]), 0.0).tolist()
        [[0.5, 2.0]]
        """
        return jnp.maximum(covariances, errors + least)

    def factors(self, covariances: jax.Array) -> jax.Array:
        """Returns the factors for `whiten`."""
        return jax.lax.rsqrt(covariances)

    def whiten(self, differences: jax.Array, factors: jax.Array) -> jax.Array:
        """Returns differences ``[n, k, features]``, transformed so that their covariance is the identity."""
        return differences * factors[None]

    def scales(self, factors: jax.Array) -> jax.Array:
        """Returns ``[k, features]``. The product over the features is one over the square root of the determinant."""
        return factors


class Full(Diagonal):
    """Full covariances, matrices ``[k, features, features]``.

    >>> Full().weighted_squares(jnp.array([[[3.0, 2.0]]]), jnp.array([[0.5]])).tolist()
    [[[4.5, 3.0], [3.0, 2.0]]]
    """

    def unit(self, features: int) -> jax.Array:
        return jnp.eye(features, dtype=jnp.float32)

    def weighted_squares(self, differences: jax.Array, shares: jax.Array) -> jax.Array:
        return _einsum("nk,nki,nkj->kij", shares, differences, differences)

    def corrected(self, covariances: jax.Array, errors: jax.Array, least: float) -> jax.Array:
        """Does the same, and keeps only the diagonal if the matrix is not positive definite or errors reach 1 % of a variance.

        >>> Full().corrected(jnp.array([[[1.0, 3.0], [3.0, 1.0]]]), jnp.zeros((1, 2)), 0.0).tolist()
        [[[1.0, 0.0], [0.0, 1.0]]]
        >>> Full().corrected(jnp.array([[[1.0, 0.5], [0.5, 1.0]]]), jnp.full((1, 2), 0.1), 0.0).tolist()
        [[[1.0, 0.0], [0.0, 1.0]]]
        """
        diagonal = self.unit(covariances.shape[-1])[None] > 0
        variances = jnp.maximum(covariances, errors[:, :, None] + least)
        covariances = jnp.where(diagonal, variances, covariances)
        accurate = jnp.all(~diagonal | (variances > 100 * errors[:, :, None]), axis=(1, 2), keepdims=True)
        positive = jnp.all(jnp.isfinite(jnp.linalg.cholesky(covariances)), axis=(1, 2), keepdims=True)
        return jnp.where(accurate & positive | diagonal, covariances, 0.0)

    def factors(self, covariances: jax.Array) -> jax.Array:
        identity = jnp.broadcast_to(self.unit(covariances.shape[-1])[None], covariances.shape)
        return jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(covariances), identity, lower=True)

    def whiten(self, differences: jax.Array, factors: jax.Array) -> jax.Array:
        return _einsum("nki,kji->nkj", differences, factors)

    def scales(self, factors: jax.Array) -> jax.Array:
        return jnp.diagonal(factors, axis1=1, axis2=2)
