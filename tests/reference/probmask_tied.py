"""ProbMask with tied probabilities, written down plainly: sorted weights, SGD by hand, fp64.

`network(weights, others, batch)` is the loss. What is checked with this is the rule, when its parts
are applied, and in which order.
"""

import torch

MOMENTUM, DECAY = 0.9, 5e-4


def train(
    w,
    others,
    network,
    batches,
    *,
    sparsity,
    lr,
    total,
    ramp_end=0.5,
    temperature=(1 / 3, 0.005),
    outside=None,
    forget_by=0.0,
    seen=lambda _: None,
):
    """Train on all of `batches`; return the weights and other parameters, in fp64.

    `seen` gets the weights after each update.
    """
    outside = (0.5 if sparsity > 0.95 else 1.0) if outside is None else outside
    w = [weight.detach().double() for weight in w]
    others = [other.detach().double() for other in others]
    start = [weight.clone() for weight in w]
    velocity = [torch.zeros_like(x) for x in (*w, *others)]
    n = sum(weight.numel() for weight in w)
    keep = n - round(sparsity * n)
    for step, batch in enumerate(batches):
        theta = threshold(w, kept_at(step / total, keep, n, ramp_end))
        tau = temperature_at(step / total, ramp_end, *temperature)
        effective = [(x * prob(x, theta, tau)).requires_grad_() for x in w]
        leaves = [other.clone().requires_grad_() for other in others]
        network(effective, leaves, batch).backward()
        grads = [
            tempered(e.grad, x.abs() > theta, outside) for e, x in zip(effective, w, strict=True)
        ]
        grads += [leaf.grad for leaf in leaves]
        for x, grad, v in zip((*w, *others), grads, velocity, strict=True):
            v.mul_(MOMENTUM).add_(grad + DECAY * x)
            x -= lr * v
        if forget_by:
            left = max(0.0, 1 - (step + 1) / total / forget_by)
            for x, x0 in zip(w, start, strict=True):
                x -= max(0.0, float((x * x0).sum() / (x0 * x0).sum()) - left) * x0
            forget_by = 0.0 if left == 0 else forget_by
        seen([x.clone() for x in w])
    return w, others


def kept_at(done, keep, n, ramp_end):
    """How many weights are kept at this part of the training."""
    final = keep / n
    return round(n * (final + (1 - final) * (1 - min(done / ramp_end, 1.0)) ** 3))


def threshold(w, keep):
    """Between the largest that goes and the smallest that stays, by the fraction that stays."""
    sizes = torch.cat([x.abs().flatten() for x in w]).sort(descending=True).values
    if keep == len(sizes):
        return torch.zeros((), dtype=torch.float64)
    stays, goes = sizes[keep - 1], sizes[keep]
    return goes + keep / len(sizes) * (stays - goes)


def temperature_at(done, ramp_end, start, end):
    """Constant while the budget falls; then evenly in its logarithm."""
    return start * (end / start) ** (max(0.0, done - ramp_end) / (1 - ramp_end))


def prob(x, theta, tau):
    """s = (1 - (θ / |w|)^(1/τ))^τ above the threshold, else 0."""
    size = x.abs().double()
    above = size > theta
    ratio = theta / size.where(above, 2 * theta + 1)
    return torch.where(above, (1 - ratio ** (1 / tau)) ** tau, 0.0)


def tempered(grad, active, outside):
    """The gradient; where not active clamped to three times the RMS of the others, and a part."""
    limit = 3 * (grad[active].square().sum() / max(1, int(active.sum()))).sqrt()
    return torch.where(active, grad, outside * grad.clamp(-limit, limit))
