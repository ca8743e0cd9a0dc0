"""ProbMask's released training step, written from its description.

An independent reference for ``ProbMask(compat="official")`` that shares no code with it. Weights
`w`, probabilities `s` and other parameters are lists of tensors; `network(weights, others, batch)`
returns the loss. The uniforms are passed in, so that both implementations use the same noise.
"""

import math

import torch

EPS = 1e-20


def mask(s, u0, u1, inverse_temperature):
    noise = -torch.log(torch.log(u0 + EPS) / torch.log(u1 + EPS) + EPS)
    logit = torch.log(s + EPS) - torch.log(1.0 - s + EPS)
    return torch.sigmoid((logit + noise) * inverse_temperature)


def shift(s, kept):
    """Return the shift: at most 21 midpoints, tolerance 1e-3, fp32 sums."""

    def f(v):
        total = 0
        for layer in s:
            total = total + (layer - v).clamp(0, 1).sum()
        return total - kept

    a, b = 0, max(0, *(layer.max() for layer in s))
    if f(0) < 0:
        return 0
    count = 0
    while True:
        count += 1
        v = (a + b) / 2
        gap = f(v)
        if abs(gap) < 1e-3 or count > 20:
            return v
        if gap < 0:
            b = v
        else:
            a = v


def kept_fraction(epoch, epochs, final):
    t1, t2 = int(0.16 * epochs), int(0.6 * epochs)
    if epoch < t1:
        return 1.0
    if epoch < t2:
        return final + (1 - final) * (1 - (epoch - t1) / (t2 - t1)) ** 3
    return final


def train(w, others, s, network, batches, uniforms, *, epochs, per_epoch, final, lr, draws):
    """Train in place; `uniforms(step, draw)` returns one (u0, u1) per layer."""
    n = sum(layer.numel() for layer in s)
    scores = torch.optim.Adam(s, lr=6e-3)
    weights = torch.optim.SGD([*w, *others], lr=lr, momentum=0.9, weight_decay=5e-4)
    for step in range(epochs * per_epoch):
        epoch = step // per_epoch
        factor = 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        scores.param_groups[0]["lr"] = 6e-3 * factor
        weights.param_groups[0]["lr"] = lr * factor
        temperature = 0.97 * (1 - epoch / epochs) + 0.03
        scores.zero_grad()
        weights.zero_grad()
        for draw in range(draws):
            inverse = torch.tensor(temperature).reciprocal()
            masked = [
                layer * mask(prob, u0, u1, inverse)
                for layer, prob, (u0, u1) in zip(w, s, uniforms(step, draw), strict=True)
            ]
            (network(masked, others, batches[step]) / draws).backward()
        torch.nn.utils.clip_grad_norm_([*w, *others, *s], 3)
        scores.step()
        weights.step()
        with torch.no_grad():
            v = shift(s, kept_fraction(epoch, epochs, final) * n)
            for layer in s:
                layer.sub_(v).clamp_(0, 1)
