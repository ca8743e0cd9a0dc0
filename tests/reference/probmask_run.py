"""A small training of ProbMask with any recipe, and ways to look at it that all of them have."""

import torch

import probmask
from reference.networks import build, loss_of, make_batches, probs_of, sgd

STEPS = 20


def begin(name="mlp", seed=1, total_steps=STEPS, model=None, **settings):
    """Attach to a network; what `attach` takes goes there, all else into the method."""
    arguments = {
        key: settings.pop(key)
        for key in ("example_inputs", "steps_per_epoch", "exclude")
        if key in settings
    }
    settings = {"sparsity": 0.8} | settings
    model = build(name) if model is None else model
    optimizer = sgd(model)
    sparsifier = probmask.attach(
        model,
        probmask.ProbMask(**settings),
        optimizer=optimizer,
        total_steps=total_steps,
        seed=seed,
        **arguments,
    )
    return model, optimizer, sparsifier


def run(name="mlp", **settings):
    """Train to the end."""
    model, optimizer, sparsifier = begin(name, **settings)
    for batch in make_batches(name, STEPS):
        optimizer.zero_grad()
        for share in sparsifier.draws():
            (share * loss_of(model, batch)).backward()
        optimizer.step()
    return model, sparsifier


def ranking(model):
    """What weights are chosen by, layer by layer: their probabilities, or if tied their sizes."""
    probs = list(probs_of(model).values())
    weights = [p for name, p in model.named_parameters() if name.endswith(".original")]
    return [p.detach().abs() for p in probs or weights]


def starve(model, layer):
    """Leave one layer without a chance: at a temperature below 1 there is no way back from 0."""
    probs = probs_of(model)
    with torch.no_grad():
        if probs:
            probs[f"{layer}.parametrizations.weight.0.prob"].fill_(0.0)
        else:
            model.get_parameter(f"{layer}.parametrizations.weight.original").mul_(1e-6)


def parts(sparsifier):
    """Each site's mask and weight."""
    masker = sparsifier._masker
    return list(zip(masker.masks, [w.detach() for w in masker.weights], strict=True))
