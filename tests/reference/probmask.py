"""Plain reference of ProbMask's training step, without classes, hooks or masked modules.

Weights, probabilities and other parameters are lists of tensors; `network(weights, others, batch)`
returns the loss. The functions of `core` have references of their own. This one checks when they
are applied, in which order, and how often.
"""

import math

import torch

from probmask.core.noise import draw_key, logistic
from probmask.core.projection import project_
from probmask.core.relaxation import relaxed_mask
from probmask.core.selection import select_top


def train(
    w,
    others,
    network,
    batches,
    *,
    sparsity,
    seed,
    lr,
    total,
    draws=1,
    freeze_at=0.6,
    estimator="straight-through",
):
    """Train in place on all of `batches`; return probabilities and, once frozen, the masks."""
    s = [torch.ones_like(weight).requires_grad_() for weight in w]
    n = sum(weight.numel() for weight in w)
    final = (n - round(sparsity * n)) / n
    rate = 6e-3 * math.cbrt(max(1.0, 58_800 / total))
    adam = torch.optim.Adam(s)
    velocity, mean_square = [torch.zeros_like(prob) for prob in s], 0.0
    sgd = torch.optim.SGD([*w, *others], lr=lr, momentum=0.9, weight_decay=5e-4)
    hard = None
    for step, batch in enumerate(batches):
        done = step / total
        tau = torch.tensor((1.0 - 0.03) * (1 - done) + 0.03)
        for parameter in (*w, *others, *s):
            parameter.grad = None
        for draw in range(draws):
            effective = []
            for index, (weight, prob) in enumerate(zip(w, s, strict=True)):
                if hard is None:
                    key = torch.tensor(draw_key(seed, 0, step, draw, index))
                    noise = logistic(prob.shape, key)
                    effective.append(weight * _mask(prob, noise, tau, estimator))
                else:
                    effective.append(torch.where(hard[index], weight, 0.0))
            (network(effective, others, batch) / draws).backward()
        sgd.step()
        if hard is None:
            now = rate * (1 + math.cos(math.pi * done)) / 2
            if estimator == "relaxed":
                adam.param_groups[0]["lr"] = now
                adam.step()
            else:
                square = sum(float((prob.grad.double() ** 2).sum()) for prob in s) / n
                mean_square = 0.99 * mean_square + 0.01 * square
                rms = math.sqrt(mean_square / (1 - 0.99 ** (step + 1)))
                _step(s, velocity, now / rms)
            project_([prob.detach() for prob in s], _kept_fraction(done, final) * n)
            if freeze_at is not None and done >= freeze_at:
                ties = [weight.detach().abs() for weight in w]
                hard = select_top([prob.detach() for prob in s], round(final * n), ties=ties)
    return s, hard


def _mask(prob, noise, tau, estimator):
    mask = relaxed_mask(prob, noise, tau)
    return mask if estimator == "relaxed" else mask.detach() + prob - prob.detach()


def _step(s, velocity, rate):
    for prob, v in zip(s, velocity, strict=True):
        v.copy_(0.9 * v + 0.1 * prob.grad)
        prob.data -= rate * v


def _kept_fraction(done, final, begin=0.05, end=0.5):
    if done < begin:
        return 1.0
    if done >= end:
        return final
    return final + (1 - final) * (1 - (done - begin) / (end - begin)) ** 3
