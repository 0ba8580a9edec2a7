"""``FeatureCache``: the user's object for a folder of features. It wraps data sets, and reports the folder's content."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from gpuaug.cache.dataset import CachedDataset, CachedIterable, view_folder
from gpuaug.cache.index import Index, shard_files
from gpuaug.cache.key import keys_in
from gpuaug.core.errors import ArgumentTypeError, shown, whole_number

MAX_VIEWS = 4096
"""Maximum number of views. A view is the features that were recorded in one epoch."""


class FeatureCache:
    """Features of a frozen encoder, recorded to files in the first epochs and read in all later epochs.

    The *cached stages* are the loader's stages up to and including the encoder: the ``FeatureStage`` with ``cache=``. A *row*
    is the results of the cached stages for one sample. A *member* is an entry of a sample or batch: the value of a key of a
    dict, an item of a tuple, or a field.

    Epochs 0 … ``views`` - 1 are ordinary epochs: images are decoded, augmented and encoded. In addition, the rows are copied to
    the host, and a thread writes them to files. From epoch ``views`` on, the workers of the ``DataLoader`` read the rows of
    *view* ``epoch % views``, the rows that were recorded in that epoch, and the cached stages do not run: no image file is
    opened, nothing is decoded or encoded, and no random numbers are drawn. If all rows of a batch were read, the images are
    absent from the batch.

    The data set runs in every epoch: order, labels and captions are as without the cache. A row is found by the path of the
    sample's image, or by a hash of the image's bytes. It is read only if the size and the modification time of the file have
    not changed, nor the sample's values of members that the cached stages write, such as boxes that move with the image. If a
    sample has no row, the cached stages run on its whole batch, and the row of the sample is recorded in the view of the epoch,
    ``epoch % views``. If a sample occurs twice in a recorded epoch, later epochs read the row of its first occurrence.

    The rows are in a subfolder of ``folder``, which is named by the key of the cached stages: a hash of the weights of the
    encoder, arguments and code of the stages, decoders, seed, and versions of libraries. If any of these changes, rows are
    recorded in another subfolder, and a warning names the difference. The argument ``key`` of ``wrap`` has no relation to this
    key: it names samples.

    Args:
        folder: Folder of the cache. It is created if it does not exist.
        views: Number of epochs to record, each with other random numbers.

    Raises:
        ArgumentError, ArgumentTypeError: If an argument is not valid.

    Cost:
        Per recorded row: one copy to the host, on a separate CUDA stream, and the write to a file by a thread. At most about
        1 GiB of rows waits to be written. The rows of further batches are not recorded; ``rows_dropped`` of
        ``StreamedLoader.stats()`` counts them.
        Per row that is read: one look-up and one copy in a worker, about 20 µs plus the time to copy its bytes.

    Examples:
        >>> import tempfile
        >>> cache = FeatureCache(tempfile.mkdtemp(), views=2)
        >>> dataset = cache.wrap([("a.jpg", 0), ("b.jpg", 1)])
        >>> len(dataset)
        2
    """

    def __init__(self, folder: str | os.PathLike[str], *, views: int = 1) -> None:
        if not isinstance(folder, str | os.PathLike):
            raise ArgumentTypeError(
                f"folder must be a path, got {shown(folder)}. Pass the name of a folder, such as 'latents'."
            )
        self.folder = Path(os.path.abspath(os.fsdecode(folder)))
        self.views = whole_number("views", views, "Pass the number of epochs to record.", least=1, most=MAX_VIEWS)
        self.key = ""
        """Key of the cached stages, 16 hexadecimal digits; empty before the first epoch."""

    def wrap(self, dataset: Any, *, key: str | int | None = None) -> CachedDataset | CachedIterable:
        """Return a data set whose samples have their row of the cache, if there is one, in place of their images.

        Pass the result to the ``DataLoader``, with ``collate_fn=gpuaug.collate_encoded``. Images of the samples must be of a
        type that ``collate_encoded`` takes. For ``read_encoded(path)``, the file is not opened if the cache has the row of the
        sample. A data set that returns images as bytes reads them in every epoch.

        Args:
            dataset: Map-style or iterable data set that returns images as encoded files, such as JPEGs.
            key: Name of the member that identifies a sample: a key or field such as ``"id"``, or the index in a tuple. Default:
                the sample is identified by the path of its image, or a hash of the image's bytes.

        Returns:
            The data set. Its attribute ``dataset`` is the argument.

        Raises:
            ArgumentTypeError: If ``dataset`` is not a data set, or ``key`` is neither a str nor an int.

        Examples:
            >>> FeatureCache("latents").wrap([{"image": "a.jpg", "id": 7}], key="id").dataset
            [{'image': 'a.jpg', 'id': 7}]
        """
        if not isinstance(key, str | int | None) or isinstance(key, bool):
            raise ArgumentTypeError(
                f"key must be a member's name or index, a str or an int, got {shown(key)}. Leave it out to find rows by images."
            )
        is_loader = hasattr(dataset, "batch_sampler")
        is_iterable = not hasattr(dataset, "__getitem__") and hasattr(dataset, "__iter__") and not is_loader
        if isinstance(dataset, IterableDataset) or is_iterable:
            return CachedIterable(dataset, self.folder, key)
        if not hasattr(dataset, "__getitem__") or isinstance(dataset, str | bytes | type | Tensor | np.generic | np.ndarray):
            raise ArgumentTypeError(
                f"dataset must be a data set or an iterable, got {shown(dataset)}. Pass the data set, not its loader."
            )
        return CachedDataset(dataset, self.folder, key)

    def __str__(self) -> str:
        lines = [f"{self!r}, key {self.key or 'not known before the first epoch'}"]
        for key in keys_in(self.folder):
            lines.append(key if key == self.key or not self.key else f"{key} (recorded with other stages or settings)")
            for view in range(self.views):
                folder = view_folder(self.folder, key, view)
                shards = shard_files(folder)
                if shards:
                    rows = len(Index(folder, shards[-1].number))
                    size = sum(shard.size for shard in shards)
                    lines.append(f"  view {view}: {rows:,} rows, {size / 1e6:,.1f} MB")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"FeatureCache({str(self.folder)!r}, views={self.views})"
