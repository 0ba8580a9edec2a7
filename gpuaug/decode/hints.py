"""Warnings about two mistakes: masks that are decoded to colours, and images that are turned upright without their targets.

*Targets* are annotations in a batch that belong to pixels of the images: masks, boxes and keypoints. The decoder *turns* images
as their EXIF orientation requires. A *member* is an entry of a batch.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.encoded import ClipHeaders, Headers
from gpuaug.core.errors import SelectionError, warn
from gpuaug.core.targets import type_name
from gpuaug.decode.layout import Options
from gpuaug.stages.hints import TargetSearch
from gpuaug.stages.selection import Selection

_match_mask_name = re.compile("mask|label|segm|annot", re.IGNORECASE).search
"""Function of the path of a member: a match if the path is a typical one of masks, else ``None``."""


class DecodedMember(NamedTuple):
    """Encoded member of a batch that a ``DecodeStage`` decodes."""

    value: Any
    """The ``Encoded`` in the batch, or the placeholder that is in the batch while the ``Encoded`` is being decoded."""
    headers: Headers
    """Header fields of the member."""
    options: Options
    """Options of the stage."""

    @property
    def orientations(self) -> NDArray[np.uint8]:
        """(B,) EXIF orientations that the decoder corrects; 1 for images that it does not turn."""
        orientations: NDArray[np.uint8] = np.maximum(self.headers.table["orientation"], 1)  # a file that cannot be read has 0
        return orientations if self.options.exif else np.ones_like(orientations)

    @property
    def is_square(self) -> NDArray[np.bool_]:
        """(B,) mask of the images whose sides are equal."""
        equal: NDArray[np.bool_] = self.headers.table["height"] == self.headers.table["width"]
        return equal

    def is_mask(self, batch: Batch, selections: Iterable[Selection]) -> bool:
        """Return whether the member holds masks: by its decoding, by its name, or by the data keys of the stages.

        Args:
            batch: Batch that contains the member.
            selections: ``on`` and ``into`` of the loader's other stages.
        """
        if self.options.channels == "labels" or _match_mask_name(self.headers.member):
            return True
        for selection in selections:
            keys = selection.normalized_keys
            with suppress(SelectionError):  # the stage may read a member that an earlier stage adds
                values = selection.read(batch) if "mask" in keys else ()
                if any(key == "mask" and value is self.value for key, value in zip(keys, values, strict=False)):
                    return True
        return False


class Hints:
    """Warnings of one ``DecodeStage``, each raised at most once."""

    def __init__(self) -> None:
        # Whether the warning was not raised yet: about masks that are decoded to colours; about mask files whose orientation
        # differs from the orientation of the images; about other targets.
        self._checks_mask_values = self._checks_mask_orientations = self._checks_other_targets = True

    def check(
        self, batch: Batch, decoded: Sequence[DecodedMember], earlier: Sequence[DecodedMember], selections: Sequence[Selection]
    ) -> None:
        """Check a batch before it is decoded.

        Args:
            batch: Host batch.
            decoded: Members that the stage decodes.
            earlier: Members that earlier stages decode.
            selections: ``on`` and ``into`` of the loader's other stages.

        Warns:
            GpuAugWarning: If a member of masks has palette images, or grey images of less than 8 bits, that are decoded to
                colours or shades of grey. If images are turned, and masks, boxes or keypoints of the batch are not.
        """
        for member in decoded if self._checks_mask_values else ():
            self._check_values(member, batch, selections)
        if self._checks_mask_orientations or self._checks_other_targets:
            turned = [member for member in [*earlier, *decoded] if (member.orientations != 1).any()]
            if turned:
                self._check_turned(turned, [*earlier, *decoded], batch, selections)

    def _check_values(self, member: DecodedMember, batch: Batch, selections: Sequence[Selection]) -> None:
        """Warn if a member of masks has class indices that the decoder converts to colours or shades of grey."""
        are_images = member.options.channels != "labels" and not isinstance(member.headers, ClipHeaders)
        if not (are_images and member.is_mask(batch, selections)):  # first, because most members are no masks
            return
        table = member.headers.table
        is_converted = (table["label_max"] < 255) | (table["channels"] != table["stored_channels"])
        converted = np.flatnonzero((table["label_max"] > 0) & is_converted)
        if not len(converted):
            return
        self._checks_mask_values = False
        path = member.headers.member
        on = path[1:-1] if path.count("[") == 1 else "…"  # ``'image'`` for the path ``['image']``
        warn(
            f"Class indices are lost in {path or 'the batch'}, because channels={member.options.channels} converts palettes and"
            f" grey of less than 8 bits to colours or shades of grey, such as {_sample(member, int(converted[0]))}. Decode "
            f"masks in a stage before the other DecodeStage: gpuaug.DecodeStage(on={on}, channels='labels')."
        )

    def _check_turned(
        self, turned: list[DecodedMember], members: list[DecodedMember], batch: Batch, selections: Sequence[Selection]
    ) -> None:
        """Warn of images that are turned while their targets are not. ``turned``: the ``members`` with turned images."""
        masks = [member for member in members if self._checks_mask_orientations and member.is_mask(batch, selections)]
        for mask, image in itertools.product(masks, members):
            if len(image.orientations) != len(mask.orientations):
                continue
            problems = image.headers.problems.keys() | mask.headers.problems.keys()
            # If turning swaps height and width of only the image or only the mask, the mismatch shows in their sizes, and is an
            # error elsewhere. Square images keep their size.
            keeps_size = ((image.orientations > 4) == (mask.orientations > 4)) | image.is_square
            is_different = (image.orientations != mask.orientations) & keeps_size
            index = next((index for index in np.flatnonzero(is_different).tolist() if index not in problems), None)
            if index is not None:
                self._checks_mask_orientations = False
                turned_member, other = (image, mask) if image.orientations[index] != 1 else (mask, image)
                _warn_of_turn(turned_member, index, other.headers.member or "the other file")
                return
        images = [member for member in turned if member not in masks]
        if not self._checks_other_targets or not images or not batches.is_container(batch):
            return
        self._checks_other_targets = False
        image = images[0]
        sizes = np.stack([image.headers.table["height"], image.headers.table["width"]], 1)
        search = TargetSearch(len(sizes), {*map(tuple, sizes.tolist()), *map(tuple, sizes[:, ::-1].tolist())})
        # Masks, and boxes with a canvas size, must have the size of the upright image. Where turning swaps unequal sides, a
        # mismatch of the sizes is an error elsewhere, so the warning about such targets is only for the other images.
        keeps_size = (image.orientations != 1) & ((image.orientations <= 4) | image.is_square)
        target_names = {  # a dict in place of a set, to keep the order
            target.label: None
            for name in batches.member_names(batch)
            for target in search.targets(batches.member(batch, name), name)
            if keeps_size.any() or not (type_name(target.value) or target.label.startswith("mask"))
        }
        if target_names:
            indices = np.flatnonzero(keeps_size if keeps_size.any() else image.orientations != 1)
            _warn_of_turn(image, int(indices[0]), ", ".join(target_names))


def _warn_of_turn(image: DecodedMember, index: int, targets: str) -> None:
    """Warn that image ``index`` of a member is turned upright, and its targets are not. ``targets``: names of the targets."""
    warn(
        f"{targets} may not match the images, because EXIF turns {_sample(image, index)} upright (orientation "
        f"{image.orientations[index]}), and does not turn {targets}. If they were annotated on images as stored, pass "
        "exif=False to the DecodeStage. If they were annotated on upright images, they match: disable this warning with "
        "warnings.filterwarnings('ignore', '.*may not match the images')."
    )


def _sample(member: DecodedMember, index: int) -> str:
    """Return the index and, if it is known, the file of a sample as text."""
    name = member.headers.names[index]
    return f"sample {index} ({name})" if name else f"sample {index}"
