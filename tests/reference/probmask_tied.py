"""Plain reference of TiedProbMask: sorted weights, SGD by hand, fp64.

`network(weights, others, batch)` returns the loss. This checks the rule, and when and in which
order its steps are applied.
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
    tau=1 / 3,
    choose_at=0.9,
    freeze_at=0.95,
    outside=None,
    forget_by=0.0,
    discount=0.0,
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
    end = End(keep, total, choose_at, freeze_at, tau)
    for step, batch in enumerate(batches):
        grown = w
        if end.chosen is None:
            kept = kept_at(step / total, keep, n, ramp_end)
            c = discount * (1 - kept / n)
            grown = [outgrown(x, x0, c, tau) for x, x0 in zip(w, start, strict=True)]
            theta = threshold(grown, kept)
            actives = [x.abs() > theta for x in grown]
        else:
            theta, actives = end.theta, end.chosen
        effective = [
            torch.where(active, x * prob(x, theta, tau), 0.0).requires_grad_()
            for active, x in zip(actives, grown, strict=True)
        ]
        leaves = [other.clone().requires_grad_() for other in others]
        network(effective, leaves, batch).backward()
        share = outside if end.chosen is None else 0.0
        grads = [
            tempered(e.grad, active, share) for e, active in zip(effective, actives, strict=True)
        ]
        grads += [leaf.grad for leaf in leaves]
        for x, grad, v in zip((*w, *others), grads, velocity, strict=True):
            v.mul_(MOMENTUM).add_(grad + DECAY * x)
            x -= lr * v
        if forget_by and not end.frozen:
            left = max(0.0, 1 - (step + 1) / total / forget_by)
            for x, x0 in zip(w, start, strict=True):
                x -= max(0.0, float((x * x0).sum() / (x0 * x0).sum()) - left) * x0
            forget_by = 0.0 if left == 0 else forget_by
        if end.chosen is None and end.is_due(step):
            for x, x0 in zip(w, start, strict=True):
                x.copy_(outgrown(x, x0, c, tau))
        end.after_update(w, step)
        end.freeze_if_due(w, step + 1)
        seen([x.clone() for x in w])
    return w, others


class End:
    """The end of a training: final selection, a threshold that falls to zero, frozen masks."""

    def __init__(self, keep, total, choose_at, freeze_at, tau):
        self.keep, self.total, self.tau = keep, total, tau
        self.choose_at, self.freeze_at = choose_at, freeze_at
        self.chosen = None
        self.frozen = False

    def is_due(self, step):
        """Whether the final selection is made after this update, or was made before."""
        return (step + 1) / self.total >= self.choose_at - 1e-9 and not self.frozen

    def after_update(self, w, step):
        done = (step + 1) / self.total
        if not self.is_due(step):
            return
        if self.chosen is None:
            self.first = self.theta = threshold(w, self.keep)
            self.chosen = [x.abs() > self.theta for x in w]
        left = max(0.0, 1 - (done - self.choose_at) / (self.freeze_at - self.choose_at))
        p = 1 / self.tau
        for x, active in zip(w, self.chosen, strict=True):
            effective = (x * prob(x, self.theta, self.tau)).abs()
            size = (effective**p + (left * self.first) ** p) ** self.tau
            size = size.clamp(min=self.first * 2.0**-20)
            lower = left * self.first
            x.copy_(torch.where(active, x.sign() * size, x.clamp(-lower, lower)))
        self.theta = left * self.first

    def freeze_if_due(self, w, step):
        if step / self.total >= self.freeze_at and not self.frozen:
            self.frozen = True
            for x, active in zip(w, self.chosen, strict=True):
                x.copy_(torch.where(active, x * prob(x, self.theta, self.tau), 0.0))
            self.theta = 0 * self.theta


def kept_at(done, keep, n, ramp_end):
    """Return the number of weights kept at this fraction of the training."""
    final = keep / n
    return round(n * (final + (1 - final) * (1 - min(done / ramp_end, 1.0)) ** 3))


def threshold(w, keep):
    """Return the value between the largest pruned and the smallest kept, by the kept fraction."""
    sizes = torch.cat([x.abs().flatten() for x in w]).sort(descending=True).values
    if keep == len(sizes):
        return torch.zeros((), dtype=torch.float64)
    stays, goes = sizes[keep - 1], sizes[keep]
    return goes + keep / len(sizes) * (stays - goes)


def temperature_at(done, ramp_end, start, end, freeze_at):
    """Return τ, constant while the budget falls; then its logarithm falls linearly."""
    return start * (end / start) ** (max(0.0, done - ramp_end) / (freeze_at - ramp_end))


def prob(x, theta, tau):
    """s = (1 - (θ / |w|)^(1/τ))^τ above the threshold, else 0."""
    size = x.abs().double()
    above = size > theta
    ratio = theta / size.where(above, 2 * theta + 1)
    return torch.where(above, (1 - ratio ** (1 / tau)) ** tau, 0.0)


def outgrown(x, x0, c, tau):
    """sign(w) (|w|^p - c |w₀|^p)^(1/p), or 0."""
    return x.sign() * (x.abs() ** (1 / tau) - c * x0.abs() ** (1 / tau)).clamp_min(0) ** tau


def tempered(grad, active, outside):
    """Return the gradient; where inactive, clamped to 3 RMS of the active and scaled."""
    limit = 3 * (grad[active].square().sum() / max(1, int(active.sum()))).sqrt()
    return torch.where(active, grad, outside * grad.clamp(-limit, limit))
