"""``FeatureCache``: the object that the user creates for a folder of features, and that reports the folder's content."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from gpuaug.cache.dataset import CachedDataset, CachedIterable, view_folder
from gpuaug.cache.index import Index, shard_paths
from gpuaug.cache.key import keys_in
from gpuaug.core.errors import ArgumentTypeError, shown, whole_number

MAX_VIEWS = 4096
"""Maximum number of views. A view is the features of one epoch."""


class FeatureCache:
    """Features of a frozen encoder, recorded in the first epochs and read in all later epochs.

    Epochs 0 … ``views`` - 1 are ordinary epochs: images are decoded, augmented and encoded. The results of the stages up to
    the encoder are also copied to the host, and a thread writes them to files: one row per sample. From epoch ``views`` on, the
    workers read the rows of view ``epoch % views``, and these stages do not run: no image file is opened, and nothing is
    decoded, drawn or encoded. Members that only these stages read, such as the images, are then absent from the batches.

    The data set runs in every epoch: order, labels and captions are as without the cache. A row is found by the path of its
    image, or by a hash of the image's bytes, and is read only if size and time of the file are unchanged. A sample without a
    row is encoded in its batch and recorded. If a sample occurs twice in an epoch, its first occurrence is recorded.

    The folder of the rows is named by a key: a hash of the weights of the encoder, arguments and code of the stages, decoders,
    seed, and versions. With another key, rows are recorded in another folder in the folder of the cache, and a warning names
    the difference.

    Args:
        folder: Folder of the cache. It is created if it does not exist.
        views: Number of epochs to record, each with other random numbers.

    Raises:
        ArgumentError, ArgumentTypeError: If an argument is not valid.

    Cost:
        Per recorded row: one copy to the host, in a separate lane, and the write of a file by a thread. At most 1 GiB of
        rows waits to be written; the rows of further batches are not recorded, and ``stats().rows_dropped`` counts these rows.
        Per row that is read: one look-up and one copy in a worker, about 20 µs plus the time of a ``memcpy``.

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
        self.folder = Path(os.fsdecode(folder))
        self.views = whole_number("views", views, "Pass the number of epochs to record.", least=1, most=MAX_VIEWS)
        self.key = ""
        """Key of the stages, 16 hexadecimal digits; empty before the first epoch."""

    def wrap(self, dataset: Any, *, key: str | int | None = None) -> CachedDataset | CachedIterable:
        """Return a data set with rows of the cache in place of images that were encoded before.

        Pass the result to the ``DataLoader``, with ``collate_fn=gpuaug.collate_encoded``. Images of the samples must be of a
        type that ``collate_encoded`` takes. The file of ``read_encoded(path)`` is not opened if its row is in the cache. Bytes
        are read by the data set in any case.

        Args:
            dataset: Map-style or iterable data set with encoded images.
            key: Member of a sample that names the sample, such as ``"id"``. Default: the path of its image, or the hash of the
                bytes.

        Returns:
            The data set. Its attribute ``dataset`` is the argument.

        Raises:
            ArgumentTypeError: If ``dataset`` is not a data set, or ``key`` cannot be a key.

        Examples:
            >>> FeatureCache("latents").wrap([{"image": "a.jpg", "id": 7}], key="id").dataset
            [{'image': 'a.jpg', 'id': 7}]
        """
        if not isinstance(key, str | int | None) or isinstance(key, bool):
            raise ArgumentTypeError(
                f"key must be the name of a member, a str or an int, got {shown(key)}. Leave it out to use paths."
            )
        if isinstance(dataset, IterableDataset) or (not hasattr(dataset, "__getitem__") and hasattr(dataset, "__iter__")):
            return CachedIterable(dataset, self.folder, key)
        if not hasattr(dataset, "__getitem__") or isinstance(dataset, str | bytes | type | Tensor | np.generic | np.ndarray):
            raise ArgumentTypeError(
                f"dataset must be a data set or an iterable, got {shown(dataset)}. Pass the data set, not its loader."
            )
        return CachedDataset(dataset, self.folder, key)

    def __str__(self) -> str:
        lines = [f"{self!r}, key {self.key or 'not known before the first epoch'}"]
        for key in keys_in(self.folder):
            lines.append(key if key == self.key or not self.key else f"{key}, of other stages")
            for view in range(self.views):
                shards = shard_paths(view_folder(self.folder, key, view))
                if shards:
                    rows = len(Index(view_folder(self.folder, key, view), shards[-1][0]))
                    size = sum(path.stat().st_size for _, path in shards)
                    lines.append(f"  view {view}: {rows:,} rows, {size / 1e6:,.1f} MB")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"FeatureCache({str(self.folder)!r}, views={self.views})"
