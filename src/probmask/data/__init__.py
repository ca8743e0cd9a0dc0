"""Data sets, loaded by name (`load_data`).

`DATA` lists the data sets by the names that the command line uses.
"""

from probmask.data.datasets import (
    DATA,
    DataSet,
    check_settings,
    describe_data,
    download_data,
    is_downloaded,
    load_data,
    with_absolute_paths,
)
from probmask.data.image_files import default_workers
from probmask.data.settings import Photographs, Sentences, Settings, SmallImages
from probmask.data.source import Batch, DataSource, Inputs, Shard

__all__ = [
    "DATA",
    "Batch",
    "DataSet",
    "DataSource",
    "Inputs",
    "Photographs",
    "Sentences",
    "Settings",
    "Shard",
    "SmallImages",
    "check_settings",
    "default_workers",
    "describe_data",
    "download_data",
    "is_downloaded",
    "load_data",
    "with_absolute_paths",
]
