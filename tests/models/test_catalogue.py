"""The list of networks: what it says is what one gets."""

import json

import torch

from probmask.masking.macs import count_macs
from probmask.masking.sites import find_sites
from probmask.models import MODELS, build_model
from probmask.models.catalogue import describe_models


def test_every_network_is_listed_once_per_number_of_classes():
    listed = [(row["name"], row["classes"]) for row in describe_models()]
    assert listed == [(name, n) for name, network in MODELS.items() for n in network.classes]
    assert ("resnet32", 100) in listed


def test_a_row_says_what_the_network_is():
    rows = {(row["name"], row["classes"]): row for row in describe_models()}
    assert rows["resnet50", 1000] == {
        "name": "resnet50",
        "summary": "ResNet50 for ImageNet: sixteen bottleneck blocks in four stages",
        "image_shape": [3, 224, 224],
        "classes": 1000,
        "layers": 54,
        "weights": 25_502_912,
        "parameters": 25_502_912 + 2 * 26_560,
        "macs": 4_089_184_256,
        "pooling_macs": 100_352,
    }


def test_the_rows_agree_with_networks_in_memory():
    for row in describe_models():
        if row["weights"] > 300_000:
            continue
        model = build_model(row["name"], {"classes": row["classes"]})
        sites = find_sites(model)
        macs = count_macs(model, sites, torch.zeros(2, *row["image_shape"]))
        assert row["weights"] == sum(site.size for site in sites)
        assert row["parameters"] == sum(p.numel() for p in model.parameters())
        assert (row["macs"], row["pooling_macs"]) == (macs.dense, macs.pooling)


def test_the_list_can_be_written_as_json():
    rows = describe_models()
    assert json.loads(json.dumps(rows)) == rows
