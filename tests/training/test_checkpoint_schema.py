"""The schema of checkpoints: every state of every method fits, and nothing else does."""

import pytest
import torch

from contracts.training import NAMES, STEPS, Run
from probmask.errors import CheckpointError
from probmask.training import checkpoint_schema as schema


@pytest.mark.parametrize("name", NAMES)
def test_every_state_of_a_method_fits_the_schema_of_a_new_run(tmp_path, name):
    """Otherwise the run could not be resumed."""
    run, new = Run(name), Run(name)
    field = schema.Field(tmp_path)
    rules = {
        "model": schema.model_state(new.model.state_dict()),
        "optimizer": schema.optimizer_state(new.optimizer),
    }
    for step in range(1, STEPS + 1, 3):
        state = run.go(step).checkpoint()
        for key, rule in rules.items():
            rule(state[key], field[key])
        rule = schema.sparsifier_state(new.sparsifier, new.model, step=step)
        rule(state["sparsifier"], field["sparsifier"])
        state["sparsifier"]["method"]["sites"].pop()
        with pytest.raises(CheckpointError, match=r"sparsifier\.method\.sites is a list, expected"):
            rule(state["sparsifier"], field["sparsifier"])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_the_state_of_an_optimizer_has_the_shapes_of_its_parameters(tmp_path, kind):
    model = torch.nn.Linear(3, 2)
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    rule, field = schema.optimizer_state(optimizer), schema.Field(tmp_path)
    rule(optimizer.state_dict(), field)  # before the first step
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    rule(optimizer.state_dict(), field)
    entries = optimizer.state[model.weight]
    for key, value in list(entries.items()):
        for wrong in (torch.ones(7), torch.full_like(value, torch.nan), "text"):
            entries[key] = wrong
            with pytest.raises(CheckpointError, match=rf"state\.0\.{key} "):
                rule(optimizer.state_dict(), field)
        entries[key] = value
