"""Methods with a threshold: clipped gradients, memory order of masks, time of the freeze."""

import pytest
import torch

import probmask
from probmask.methods.feather import Feather
from probmask.methods.st3 import ST3
from reference.networks import build, loss_of, make_batches, sgd, step


def begin(method, seed=0):
    model = build("conv", seed=seed)
    optimizer = sgd(model)
    return model, optimizer, probmask.attach(model, method, optimizer=optimizer, total_steps=20)


@pytest.mark.parametrize("kind", [Feather, ST3])
@pytest.mark.parametrize(("scale", "expected"), [(1000.0, 3.0), (1e-3, None)])
def test_the_joint_gradient_is_clipped_to_3_as_in_their_papers(kind, scale, expected):
    model, optimizer, _ = begin(kind(sparsity=0.8))
    optimizer.zero_grad()
    (scale * loss_of(model, make_batches("conv", 1)[0])).backward()
    before = joint_norm(model)
    optimizer.step()
    assert joint_norm(model) == pytest.approx(before if expected is None else expected, rel=1e-4)
    assert expected is None or before > 2 * expected


def joint_norm(model):
    return float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())


@pytest.mark.filterwarnings("ignore::probmask.EarlyEndWarning")
@pytest.mark.parametrize("kind", [probmask.TiedProbMask, ST3])
def test_no_mask_is_frozen_before_the_ranks_have_the_same_weights(kind):
    """DDP loads the first rank's weights into the others after `attach`."""
    method = kind(sparsity=0.8, freeze_at=0)
    (batch,) = make_batches("conv", 1)
    first, other = begin(method), begin(method, seed=1)
    other[0].load_state_dict(first[0].state_dict())
    for model, optimizer, sparsifier in (first, other):
        assert not sparsifier.frozen
        step(model, optimizer, batch)
        assert sparsifier.frozen
    for mine, its in zip(first[2]._masker.masked, other[2]._masker.masked, strict=True):
        assert torch.equal(mine.mask, its.mask)


@pytest.mark.parametrize("kind", [probmask.TiedProbMask, Feather])
def test_a_graph_from_before_the_last_cut_raises(kind):
    """The cut overwrites the masks that the graph has saved."""
    model, optimizer, _ = begin(kind(sparsity=0.8))
    batches = make_batches("conv", 5)
    for batch in batches[:3]:
        step(model, optimizer, batch)
    old = loss_of(model, batches[3])
    step(model, optimizer, batches[4])
    model(batches[3][0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


@pytest.mark.parametrize("kind", [probmask.TiedProbMask, Feather])
def test_masks_have_the_memory_order_of_their_weights_and_are_overwritten(kind):
    model, optimizer, sparsifier = begin(kind(sparsity=0.8))
    model.to(memory_format=torch.channels_last)
    places = [masked.active.data_ptr() for masked in sparsifier._masker.masked]
    for batch in make_batches("conv", 3):
        step(model, optimizer, batch)
    masker = sparsifier._masker
    assert [masked.active.data_ptr() for masked in masker.masked] == places
    for masked, weight in zip(masker.masked, masker.weights, strict=True):
        assert masked.active.stride() == weight.stride()
        assert 0 < int(masked.active.count_nonzero()) < weight.numel()
