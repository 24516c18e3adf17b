"""The oracle: products in float64 on the host, and measures of the error."""

from __future__ import annotations

import numpy as np


def matmul(lhs, rhs, c=None, *, alpha: float = 1.0, beta: float = 0.0) -> np.ndarray:
  """alpha * lhs @ rhs + beta * c in float64, with np.matmul's broadcasting."""
  out = alpha * np.matmul(_float64(lhs), _float64(rhs))
  if beta:
    out = out + beta * _float64(c)
  return out


def dot_general(lhs, rhs, dimension_numbers) -> np.ndarray:
  """lax.dot_general in float64: [*batch, *free of lhs, *free of rhs]."""
  (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
  lhs, rhs = _float64(lhs), _float64(rhs)
  lhs_names = list(range(lhs.ndim))
  rhs_names = list(range(lhs.ndim, lhs.ndim + rhs.ndim))
  lhs_paired, rhs_paired = (*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch)
  for i, j in zip(lhs_paired, rhs_paired, strict=True):
    rhs_names[j] = lhs_names[i]
  batch = [lhs_names[i] for i in lhs_batch]
  taken = {*batch, *(lhs_names[i] for i in lhs_contract)}
  free = [name for name in [*lhs_names, *rhs_names] if name not in taken]
  return np.einsum(lhs, lhs_names, rhs, rhs_names, batch + free)


def relative_error(result, truth) -> float:
  """Frobenius norm of the error over that of the truth.

  Infinite if the result has another shape or is not finite where the truth is: a
  norm of NaN compares as neither large nor small, so a test could overlook it.
  """
  result, truth = _float64(result), _float64(truth)
  if result.shape != truth.shape or not _finite_alike(result, truth):
    return float("inf")
  norm = np.linalg.norm(truth.ravel())
  error = np.linalg.norm((result - truth).ravel())
  return float(error / norm) if norm else float(error)


def max_error(result, truth) -> float:
  """Largest error of an element over the root mean square of the truth."""
  result, truth = _float64(result), _float64(truth)
  if result.shape != truth.shape or not _finite_alike(result, truth):
    return float("inf")
  if not truth.size:
    return 0.0
  scale = np.sqrt(np.mean(np.square(truth)))
  error = np.max(np.abs(result - truth))
  return float(error / scale) if scale else float(error)


def _finite_alike(result: np.ndarray, truth: np.ndarray) -> bool:
  return bool(np.all(np.isfinite(result) | ~np.isfinite(truth)))


def _float64(x) -> np.ndarray:
  return np.asarray(x).astype(np.float64)
