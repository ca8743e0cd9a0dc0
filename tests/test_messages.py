"""Suggestions for misspelt names, and lists of names in messages."""

import pickle

import pytest

from probmask.errors import InputError
from probmask.messages import NamedTable, listed, lookup

NETWORKS = {"resnet14": 14, "resnet20": 20, "resnet32": 32, "resnet50": 50, "vgg19": 19}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("vgg9", "did you mean 'vgg19'?"),
        ("resnet21", "did you mean 'resnet14', 'resnet20' or 'resnet32'?"),
        ("lenet", "did you mean 'resnet14', 'resnet20', 'resnet32' or 'resnet50'?"),
        ("mlp", "choose from resnet14, resnet20, resnet32, resnet50, vgg19."),
    ],
)
def test_an_unknown_name_suggests_the_closest_ones(name, hint):
    table = pickle.loads(pickle.dumps(NamedTable("model", NETWORKS)))
    with pytest.raises(KeyError) as caught:
        table[name]
    assert str(caught.value) == f"{name!r}: no such model; {hint}"
    with pytest.raises(InputError) as refused:
        lookup("model", "--model", name, table)
    assert str(refused.value) == f"--model {name}: no such model; {hint}"
    assert table.get(name) is None
    assert table == NETWORKS


def test_a_long_list_of_names_is_cut():
    assert listed(["a", "b"], most=2) == "a, b"
    assert listed(["a", "b", "c", "d"], most=2) == "a, b, 2 more"
