"""``FeatureCache``: the user's object, which names the folder, and reports its content."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from gpuaug.cache.dataset import CachedDataset, CachedIterable, view_folder
from gpuaug.cache.index import Index, shard_numbers
from gpuaug.cache.key import keys_in
from gpuaug.core.errors import ArgumentTypeError, shown, whole_number

MAX_VIEWS = 4096
"""Maximum number of views. A view is an epoch of features."""


class FeatureCache:
    """Features of a frozen encoder, recorded in the first epochs and read in all later epochs.

    Epochs 0 … ``views`` - 1 are ordinary epochs: images are decoded, augmented and encoded. What the stages up to the encoder
    have written is also copied to the host and written to files, by a thread. From epoch ``views`` on, the workers read the
    rows of view ``epoch % views``, and these stages do not run: no image file is opened, and nothing is decoded, drawn or
    encoded. Members that only these stages read, such as the images, are absent then.

    The data set runs in every epoch: order, labels and captions are those of the epoch. A row is named by the path of its
    image, or by the hash of its bytes, and is read only if size and time of the file are unchanged. A sample without a row is
    encoded in its batch and recorded. Of a sample that occurs twice in an epoch the first occurrence is recorded.

    Rows are filed under a key: weights of the encoder, arguments and code of the stages, decoders, seed, and versions. With
    another key the cache begins anew in another folder beside, and a warning names the difference.

    Args:
        folder: Folder of the cache. It is created if it does not exist.
        views: Number of epochs to record, each with other random numbers.

    Raises:
        ArgumentError, ArgumentTypeError: If an argument is not valid.

    Cost:
        A recorded row: one copy to the host, in a separate lane, and the write of a file by a thread. At most 1 GiB of
        rows waits to be written; the rows of further batches are not recorded, and ``stats().rows_dropped`` counts them. A
        row that is read: one look-up and one copy in a worker, about 20 µs and the time of a ``memcpy``.

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

        Pass it to the ``DataLoader``, with ``collate_fn=gpuaug.collate_encoded``. An image is what ``collate_encoded`` takes:
        ``read_encoded(path)`` is not opened if the row is in the cache; bytes are read, and dropped.

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
        lines = [
            f"FeatureCache({str(self.folder)!r}, views={self.views}), key {self.key or 'not known before the first epoch'}"
        ]
        for key in keys_in(self.folder):
            mark = "" if key == self.key or not self.key else ", of other stages"
            lines.append(f"{key}{mark}")
            for view in range(self.views):
                shards = shard_numbers(view_folder(self.folder, key, view))
                if shards:
                    rows = len(Index(view_folder(self.folder, key, view), shards[-1][0]))
                    size = sum(path.stat().st_size for _, path in shards)
                    lines.append(f"  view {view}: {rows:,} rows, {size / 1e6:,.1f} MB")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"FeatureCache({str(self.folder)!r}, views={self.views})"
