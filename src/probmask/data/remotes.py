"""Where the data sets are released, and the digest and size of each file."""

from probmask.data.download import Remote

_TORONTO = "https://www.cs.toronto.edu/~kriz"
# PyTorch's copy: the original server often turns downloads away.
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
# The address that the authors give, without TLS; the digests make up for it.
_FASHION_MNIST = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"

REMOTES: dict[str, tuple[Remote, ...]] = {
    "cifar10": (
        Remote(
            f"{_TORONTO}/cifar-10-binary.tar.gz",
            "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            170_052_171,
        ),
    ),
    "cifar100": (
        Remote(
            f"{_TORONTO}/cifar-100-binary.tar.gz",
            "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            168_513_733,
        ),
    ),
    "mnist": (
        Remote(
            f"{_MNIST}/train-images-idx3-ubyte.gz",
            "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            9_912_422,
        ),
        Remote(
            f"{_MNIST}/train-labels-idx1-ubyte.gz",
            "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            28_881,
        ),
        Remote(
            f"{_MNIST}/t10k-images-idx3-ubyte.gz",
            "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            1_648_877,
        ),
        Remote(
            f"{_MNIST}/t10k-labels-idx1-ubyte.gz",
            "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            4_542,
        ),
    ),
    "fashion-mnist": (
        Remote(
            f"{_FASHION_MNIST}/train-images-idx3-ubyte.gz",
            "sha256:3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            26_421_880,
        ),
        Remote(
            f"{_FASHION_MNIST}/train-labels-idx1-ubyte.gz",
            "sha256:a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            29_515,
        ),
        Remote(
            f"{_FASHION_MNIST}/t10k-images-idx3-ubyte.gz",
            "sha256:346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            4_422_102,
        ),
        Remote(
            f"{_FASHION_MNIST}/t10k-labels-idx1-ubyte.gz",
            "sha256:67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            5_148,
        ),
    ),
}
