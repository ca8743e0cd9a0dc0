"""Importance of weights under a Kronecker-factored Fisher information.

For each example, the gradient of a layer's weight matrix W is a sum over positions of outer
products r cᵀ. K-FAC approximates its Fisher information by F = R ⊗ C with R = E[r rᵀ] and
C = E[c cᵀ] (Martens and Grosse 2015; Grosse and Martens 2016 for convolutions). Each group of a
grouped convolution is a matrix of its own, along a leading dimension.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def unfold(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Return the patches of x under a kernel of any rank: (n, channels, *positions, *kernel)."""
    for axis, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(axis, gap * (size - 1) + 1, step)[..., ::gap]
    return x


def second_moment(v: Tensor) -> Tensor:
    """Σ v vᵀ for each group: vectors (n, groups, d) give matrices (groups, d, d)."""
    by_group = v.transpose(0, 1)
    return by_group.mT @ by_group


def inverse_diagonal(M: Tensor, damping: float) -> Tensor:
    """diag((M + λ I)⁻¹) for each matrix, with λ = damping · tr(M) / d, in float64.

    The trace has a lower bound, so that a matrix of zeros (an input that is always 0) is not
    singular. If an entry is NaN or infinite, so is the result.
    """
    M = M.double()
    if not M.isfinite().all():
        return torch.full_like(M.diagonal(dim1=-2, dim2=-1), torch.nan)
    mean = M.diagonal(dim1=-2, dim2=-1).mean(dim=-1).clamp_min(1e-30)
    identity = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    damped = M + (damping * mean)[..., None, None] * identity
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return inverse.diagonal(dim1=-2, dim2=-1)


def obs_importance(W: Tensor, R: Tensor, C: Tensor, damping: float) -> Tensor:
    """W_ij² / (2 [R⁻¹]_ii [C⁻¹]_jj): the loss increase when a weight is pruned.

    This is the optimal brain surgeon's w² / (2 [F⁻¹]_qq), which lets the other weights adapt. For
    F = R ⊗ C the inverse has the diagonal [R⁻¹]_ii [C⁻¹]_jj.

    Args:
        W: the weight, of any shape that can be viewed as (groups, i, j).
        R: E[r rᵀ], (groups, i, i).
        C: E[c cᵀ], (groups, j, j).
        damping: λ relative to the mean diagonal, as in `inverse_diagonal`.

    Returns:
        The importance of each weight, float64, in the shape of W.
    """
    rows, columns = inverse_diagonal(R, damping), inverse_diagonal(C, damping)
    matrices = W.double().reshape(*rows.shape, columns.shape[-1])
    importance = matrices.square() / (2 * rows[..., :, None] * columns[..., None, :])
    return importance.reshape(W.shape)
