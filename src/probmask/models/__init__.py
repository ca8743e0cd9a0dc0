"""Networks, built by name (`build_model`) or by their own functions (`resnet32()`).

`MODELS` lists the networks by the names that the command line uses.
"""

from probmask.models.bert import bert
from probmask.models.convnet import conv4, lenet5, mobilenetv1, smallconv, vgg19
from probmask.models.mlp import lenet300
from probmask.models.networks import (
    MODELS,
    Network,
    build_model,
    check_model_settings,
    describe_models,
    model_settings,
)
from probmask.models.resnet import resnet14, resnet20, resnet32, resnet50
from probmask.models.text_encoder import text_encoder
from probmask.models.vision_transformer import vit

__all__ = [
    "MODELS",
    "Network",
    "bert",
    "build_model",
    "check_model_settings",
    "conv4",
    "describe_models",
    "lenet5",
    "lenet300",
    "mobilenetv1",
    "model_settings",
    "resnet14",
    "resnet20",
    "resnet32",
    "resnet50",
    "smallconv",
    "text_encoder",
    "vgg19",
    "vit",
]
