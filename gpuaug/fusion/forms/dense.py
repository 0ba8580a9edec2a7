"""``Dense``: an input that is one tensor for the whole batch: images, masks (B, C, H, W), or padded boxes (B, N, 4).

Images may also be ragged. A clip has T frames. For the passes, the frames of clips are merged into one batch of images,
(B · T, C, H, W). ``valid`` is a (B, N) mask: in the input of the boxes that are not padding, in the result of those boxes that
are still inside the image.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpuaug.core.targets import DATA_KEYS, MASKS, type_name, with_class_of
from gpuaug.fusion.forms.call import Call
from gpuaug.fusion.forms.data_keys import check_fit, check_input, check_same_size
from gpuaug.fusion.forms.kinds import Masks, Points
from gpuaug.fusion.ops.boxes import KORNIA_FORMATS, axes_per_box


class Dense:
    """Adapter of images, masks, boxes, keypoints or ``valid`` in one tensor: holds the current values between the passes.

    Args:
        key: Data key, which says what ``value`` holds: ``"input"`` for images, ``"mask"``, ``"bbox_xyxy"``, ….
        value: The tensor, or ragged images.
        call: Images and settings of the call.

    Raises:
        ArgumentTypeError: If the input does not have the type that its key requires.
        ArgumentError: If its shape does not fit its key, or the images.
        DeviceError: If it is not on the device of the images.
    """

    def __init__(self, key: str, value: Any, call: Call) -> None:
        self.key, self._call, self._input = key, call, value
        if key != "input":
            check_input(key, value)
        elif value is not call.images:  # further images, of another input with the key ``input``
            check_same_size(call.size, Call(value, call.boxes, call.conversions, call.clip_layout).size)
        self.kind = DATA_KEYS.get(key)
        box_format = KORNIA_FORMATS.get(key)
        # ``kind`` is ``None`` for images. Number of axes with a batch axis: 4 for images and masks, 2 for ``valid``, and
        # 2 + the axes of a box or point for boxes and keypoints, (B, N, …).
        axes = 4 if self.kind in (None, MASKS) else 2 if box_format is None else 2 + axes_per_box(box_format)
        is_tensor = isinstance(value, Tensor)
        self._has_frames = bool(call.frames) and (self.kind in (None, MASKS) or value.ndim == axes + 1)
        value = self._frames_merged(value) if self._has_frames and is_tensor else value
        self._added_axis: int | None = None
        """Axis that ``value`` has and the input lacks: 0, the batch axis, or 1, the channel axis of masks; else ``None``."""
        if is_tensor and value.ndim == axes - 1:
            # As in Kornia, an image without a batch axis is a batch of one, and masks without a channel axis have one channel.
            if self.kind is MASKS or key == "input":
                self._added_axis = 0 if key == "input" or call.is_unbatched else 1
            elif call.size.batch == 1:
                self._added_axis = 0
        self.value: Any = value if self._added_axis is None else value.unsqueeze(self._added_axis)
        self.types = [type(self._input) if type_name(self._input) else Tensor] * call.size.batch if key == "input" else []
        """Class of each image or clip, such as ``tv_tensors.Image``, for modules of torchvision; empty for targets."""
        self.targets: Sequence[Points | Masks] = ()
        """Masks, boxes or keypoints, in the form that the passes transform; empty for images and ``valid``."""
        if key != "input":
            check_fit(key, self.value, value, call.size, call.device)
        if self.kind is MASKS:
            self.targets = [Masks(self.value)]
        elif box_format is not None:
            self.targets = [Points(self.value, box_format)]
        self.storage: tuple[Any, str] | None = (self.targets[0], "values") if self.targets else None
        """(object, name of an attribute) where the current values are; ``None`` if they are in ``value``.

        ``Record`` (``record.py``) sets it for ``valid``, whose values are in the ``Points`` of the boxes.
        """

    def _frames_merged(self, value: Tensor) -> Tensor:
        """Return the input with the frame axis merged with another axis.

        Images and masks (B, T, …) become (B · T, …). Boxes and keypoints (B, T, n, …) become (B, T · n, …); or, if parameters
        are drawn per frame and so each frame counts as a sample, (B · T, n, …).
        """
        clip_layout = self._call.clip_layout
        if self.key == "input":
            plain = value.as_subclass(Tensor)
            return clip_layout.images(plain[None] if self._call.is_single_clip else plain)
        if self.kind is MASKS:
            return clip_layout.images(value) if value.ndim == 5 else value.flatten(0, 1)
        return value.flatten(0, 1) if clip_layout.draws_per_frame else value.flatten(1, 2)

    def _frames_restored(self, result: Tensor) -> Any:
        """Invert ``_frames_merged``. ``result`` has the frames of the output, which may be fewer than T."""
        user_value = self._input
        frames = len(self._call.frame_indices)
        if self.key == "input" or (self.kind is MASKS and user_value.ndim == 5):
            return self._call.clip_layout.clips(result, frames)
        if self.kind is MASKS:
            return result.unflatten(0, (-1, frames))
        return result.reshape(len(user_value), -1, user_value.shape[2], *result.shape[2:])

    def select_frames(self, indices: Tensor, frames: int) -> None:
        """Select frames of masks, boxes, keypoints or ``valid``. Not of images, whose frames the kernels select.

        Args:
            indices: Indices of the selected frames, on the device.
            frames: Number of frames per clip before the selection.
        """
        if not self._has_frames or self.key == "input":
            return
        axis = 0 if self.kind is MASKS else 1  # pipelines that draw per frame, for which boxes are (B · T, n, …), select none
        values = self.current
        per_frame = values.unflatten(axis, (frames, -1) if axis else (-1, frames))
        self.current = torch.index_select(per_frame, 1, indices).flatten(axis, axis + 1)

    @property
    def current(self) -> Any:
        """Images or targets, as the passes that have run have left them."""
        return getattr(*(self.storage or (self, "value")))

    @current.setter
    def current(self, value: Any) -> None:
        holder, name = self.storage or (self, "value")
        setattr(holder, name, value)

    def output(self) -> Any:
        """Return the result in the form of the input."""
        call, user_value, result = self._call, self._input, self.current
        keepdim, views = call.keepdim, call.views
        # As in Kornia, the added axis of images and masks is removed with ``keepdim`` only, that of boxes and keypoints always.
        # Several views need the batch axis.
        removes_axis = keepdim or self.kind not in (None, MASKS)
        if self._added_axis is not None and (views == 1 or self._added_axis) and removes_axis:
            result = result.squeeze(self._added_axis)
        if self._has_frames:
            result = self._frames_restored(result)
        if self.key == "input" and call.is_single_clip and views == 1 and keepdim:
            result = result[0]
        is_typed = self.kind in (None, MASKS) and isinstance(user_value, Tensor)
        return with_class_of(result, user_value) if is_typed else result
