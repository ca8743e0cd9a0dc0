"""A small training of either member of the ProbMask family, and ways to inspect it."""

import torch

import probmask
from probmask.masking.parametrization import masked_parameters
from reference.networks import build, loss_of, make_batches, probs_of, sgd

STEPS = 20


def method_of(form, **settings):
    """Return the method of a form: "tied", "learned" (adaptive) or "paper".

    Tied weights are ranked by their magnitudes unless a discount of the initial values is given.
    """
    if form == "tied":
        return probmask.TiedProbMask(**{"discount": 0.0} | settings)
    return probmask.ProbMask(recipe="paper" if form == "paper" else "adaptive", **settings)


def begin(name="mlp", form="tied", seed=1, total_steps=STEPS, model=None, **settings):
    """Attach to a network; pass the arguments of `attach` to it and the others to the method."""
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
        method_of(form, **settings),
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
    """Return the values that rank the weights: probabilities or, if tied, magnitudes."""
    probs = list(probs_of(model).values())
    weights = {id(m): m._parameters[n] for _, m, n, _ in masked_parameters(model)}
    return [p.detach().abs() for p in probs or weights.values()]


def starve(model, layer):
    """Set one layer's probabilities to 0: below temperature 1 they cannot return."""
    probs = probs_of(model)
    with torch.no_grad():
        if probs:
            probs[f"{layer}.weight"].fill_(0.0)
        else:
            dict(model.named_parameters())[f"{layer}.weight"].mul_(1e-6)


def parts(sparsifier):
    """Return masked weight and weight of each site."""
    masker = sparsifier._masker
    return list(zip(masker.masked, [w.detach() for w in masker.weights], strict=True))
