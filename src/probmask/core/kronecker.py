"""Importance under a Fisher information that is a Kronecker product; patches of convolutions.

The weight W of a layer is a matrix whose gradient is, for each example, a sum over positions of
outer products r cᵀ. K-FAC takes its Fisher information for F = R ⊗ C with R = E[r rᵀ] and
C = E[c cᵀ] (Martens and Grosse 2015; Grosse and Martens 2016 for convolutions). Groups of a
convolution are matrices of their own, along a leading dimension.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def unfold(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """(n, channels, *positions, *kernel): what a kernel of any rank sees at each position of x."""
    for axis, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(axis, gap * (size - 1) + 1, step)[..., ::gap]
    return x


def second_moment(v: Tensor) -> Tensor:
    """Σ v vᵀ of each group, for vectors v of shape (n, groups, d): (groups, d, d)."""
    by_group = v.transpose(0, 1)
    return by_group.mT @ by_group


def inverse_diagonal(M: Tensor, damping: float) -> Tensor:
    """diag((M + λ I)⁻¹) of each matrix, λ = damping · tr(M) / d, in float64.

    A matrix of zeros (nothing ever came in) is taken for nearly zero, not for singular.
    """
    M = M.double()
    mean = M.diagonal(dim1=-2, dim2=-1).mean(dim=-1).clamp_min(1e-30)
    identity = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    damped = M + (damping * mean)[..., None, None] * identity
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return inverse.diagonal(dim1=-2, dim2=-1)


def obs_importance(W: Tensor, R: Tensor, C: Tensor, damping: float) -> Tensor:
    """W_ij² / (2 [R⁻¹]_ii [C⁻¹]_jj): what removing a weight costs if the others may adapt to it.

    The optimal brain surgeon's w² / (2 [F⁻¹]_qq) for F = R ⊗ C, whose inverse has the diagonal
    [R⁻¹]_ii [C⁻¹]_jj. W has any shape of which (groups, i, j) is a view.
    """
    rows, columns = inverse_diagonal(R, damping), inverse_diagonal(C, damping)
    matrices = W.double().reshape(*rows.shape, columns.shape[-1])
    cost = matrices.square() / (2 * rows[..., :, None] * columns[..., None, :])
    return cost.reshape(W.shape)
