"""``read_clip``: selection of frames of a video for a batch.

A *clip* is a number of selected frames of a video. A *sample* is an element of the dataset, and a *member* a value within it.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.encoded import Undecoded, refuse_transforms
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, fraction, one_of, shown, whole_number
from gpuaug.decode.clips.limits import MAX_PACKETS
from gpuaug.decode.file_bytes import bytes_view, is_bytes

T = TypeVar("T")

Short = Literal["error", "loop", "pad"]
"""Treatment of a video that ends before the clip. See ``read_clip``."""

TOLERANCE_S = 1e-4
"""Seconds by which a requested time may precede its frame's time stamp, because of rounding.

A time that was rounded to float32 may precede the time stamp also by the spacing of float32: 0.2 ms after an hour.
"""


@dataclass(slots=True, repr=False, eq=False)
class Clip(Undecoded):
    """Selection of frames of a video that is not read yet. Returned by ``read_clip``."""

    source: str | bytes | memoryview
    """Path of the video, or its bytes."""
    offsets: Sequence[int]
    """(T,) frame numbers, relative to the frame that ``at`` or ``times_s`` selects; without these, relative to frame 0."""
    at: float | None
    """Position of the clip in the video, from 0 to 1."""
    times_s: Sequence[float] | None
    """(1,) or (T,) times in seconds."""
    short: Short

    def __reduce__(self) -> tuple[Any, ...]:
        source = self.source if isinstance(self.source, str) else bytes(self.source)  # a memoryview cannot be pickled
        return Clip, (source, self.offsets, self.at, self.times_s, self.short)

    def __repr__(self) -> str:
        source = repr(self.source) if isinstance(self.source, str) else f"<{len(self.source)} bytes>"
        return f"Clip({source}, {self.frames} frames)"

    @property
    def frames(self) -> int:
        """Number of frames, T."""
        return len(self.offsets)

    def numbers_in(self, count: int, times: tuple[NDArray[np.float64], float] | None) -> NDArray[np.int64] | str:
        """Return the (T,) frame numbers of the clip in its video, or the reason why the video does not contain the clip.

        Args:
            count: Number of frames of the video, N.
            times: (N,) time of each frame in seconds, ascending, and the end of the last frame in seconds; its time if its
                duration is not known. ``None`` if the clip is not chosen by times.
        """
        numbers = np.array(self.offsets, np.int64)
        if times is not None:
            requested_s = np.array(self.times_s)
            displayed = _displayed_at(*times, requested_s)
            if displayed.min() < 0 and self.short == "error":
                return (
                    f"its first frame is displayed at {times[0][0]:.6g} s, and the clip needs the frame at "
                    f"{requested_s.min():.6g} s: pass later times, or short='pad' to read_clip"
                )
            numbers += displayed
        elif self.at is not None:
            start_count = max(count - int(numbers[-1]), 1)  # number of possible first frames; ``numbers`` ascend with ``at``
            numbers += min(int(self.at * start_count), start_count - 1)
        if numbers.min() >= 0 and numbers.max() < count:
            return numbers
        if self.short == "error":
            return f"it has {count} frames, and the clip needs frame {numbers.max()}: pass short='loop' or 'pad' to read_clip"
        return numbers % count if self.short == "loop" else np.clip(numbers, 0, count - 1)


def _displayed_at(times_s: NDArray[np.float64], end_s: float, at_s: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the (n,) number of the frame that is displayed at each time.

    Before the beginning and after the end of the video, numbers continue as if the video had more frames at the same rate. The
    last frame lasts for its stored duration, or for the mean duration of the other frames if the mean is longer.

    Args:
        times_s: (N,) time of each frame of the video in seconds, ascending.
        end_s: End of the last frame in seconds; its time if its duration is not known.
        at_s: (n,) requested times in seconds.
    """
    with np.errstate(all="ignore"):  # times beyond the range of float32
        in_float32 = np.abs(at_s).astype(np.float32)
        at_s = at_s + TOLERANCE_S + np.where(in_float32 == np.abs(at_s), np.spacing(in_float32), 0)
    frame_numbers: NDArray[np.int64] = np.searchsorted(times_s, at_s, side="right") - 1
    count = len(times_s)
    frame_s = (times_s[-1] - times_s[0]) / (count - 1) if count > 1 else end_s - times_s[0]
    if frame_s <= 0:  # neither the rate nor the end of the video is known
        return frame_numbers
    before_start = np.floor((at_s - times_s[0]) / frame_s) + 1
    beyond_end = np.floor((at_s - max(end_s, times_s[-1] + frame_s)) / frame_s) + 1
    frame_numbers += np.clip(before_start, -(2**53), 0).astype(np.int64) + np.clip(beyond_end, 0, 2**53).astype(np.int64)
    return frame_numbers


refuse_transforms(Clip)


def read_clip(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview | Tensor | NDArray[np.uint8],
    frames: int | Sequence[int] = 16,
    stride: int = 1,
    *,
    start: int | None = None,
    start_s: float | None = None,
    at: float | None = None,
    times_s: Sequence[float] | None = None,
    short: Literal["error", "loop", "pad"] = "error",
) -> Clip:
    """Select frames of a video for ``collate_encoded``, which packs them undecoded. A ``DecodeStage`` decodes them.

    Frames are counted from 0 in display order, as PyAV's ``container.decode(video=0)`` yields them. To load several clips of
    one video, or the clips of several cameras, return several clips per sample, as members or in a list.

    Args:
        source: Path of a video, or its bytes. The first video stream is read.
        frames: Number of frames, or a list of frame numbers, in any order.
        stride: Distance from one frame to the next. 4 takes every fourth frame.
        start: Number of the first frame.
        start_s: Time in seconds. The clip starts with the frame that is displayed at this time, by the time stamps in the file.
        at: Position of the clip in the video, from 0, the first possible clip, to 1, the last. ``random.random()`` gives all
            clips the same probability; ``k / (n - 1)`` spaces n clips evenly.
        times_s: Times in seconds, in place of ``frames`` and ``stride``: per time, the frame that is displayed at this time.
            A time may precede the time stamp of its frame by 0.1 ms, and by the rounding error of float32.
        short: Treatment of a video that ends before the clip, or begins after its first time: raise an ``"error"``, ``"loop"``
            the video, or ``"pad"`` it with its last and its first frame.

    Returns:
        The selection. All clips of one member of a batch must have the same number of frames.

    Raises:
        ArgumentError, ArgumentTypeError: If a value is invalid, or two of ``start``, ``start_s``, ``at``, ``times_s`` and a
            list of ``frames`` are passed. A missing or short video raises a ``DecodeError`` later, at its batch.

    Cost:
        No access to the file.

    Examples:
        >>> read_clip("videos/juggling.mp4", frames=16, stride=4, start_s=2.5)
        Clip('videos/juggling.mp4', 16 frames)
    """
    is_list = hasattr(frames, "__len__") and getattr(frames, "shape", (1,)) != ()  # a tensor without axes is a number
    choices = {"start": start, "start_s": start_s, "at": at, "times_s": times_s}
    # Names, for the message, of the arguments that choose the position of the clip.
    passed = ["a list of frames"] * is_list + [name for name, value in choices.items() if value is not None]
    if len(passed) > 1:
        raise ArgumentError(
            "A clip must be chosen by one of start, start_s, at, times_s and a list of frames, got "
            f"{' and '.join(passed)}. Pass only one."
        )
    stride = whole_number("stride", stride, "1 takes all frames.", least=1, most=MAX_PACKETS)
    offsets: Sequence[int]
    if is_list:
        offsets = _checked_list(
            "frames", frames, lambda number: whole_number("A frame", number, "Count frames from 0.", most=MAX_PACKETS)
        )
    elif times_s is not None:
        times_s = _checked_list("times_s", times_s, lambda time_s: _seconds("A time of times_s", time_s))
        offsets = (0,) * len(times_s)
    else:
        count = whole_number("frames", frames, "Pass the number of frames of the clip.", least=1, most=MAX_PACKETS)
        first = 0 if start is None else whole_number("start", start, "Count frames from 0.", most=MAX_PACKETS)
        offsets = range(first, first + count * stride, stride)
    if start_s is not None:
        times_s = (_seconds("start_s", start_s),)
    if at is not None:
        at = fraction("at", at, "Pass 0 for the first clip of the video, and 1 for the last.")
    short = one_of("short", short, ("error", "loop", "pad"), "Leave it out to raise an error for a short video.")
    if isinstance(source, str | os.PathLike):
        source = os.fsdecode(source)
    elif is_bytes(source):
        source = bytes_view(source)
    else:
        raise ArgumentTypeError(
            f"source must be the path of a video or its bytes, got {shown(source)}. Pass the file's bytes as they are."
        )
    return Clip(source, offsets, at, times_s, short)


def _checked_list(name: str, values: Any, check: Callable[[Any], T]) -> tuple[T, ...]:
    """Return the results of ``check`` for the elements of an argument.

    Raises:
        ArgumentError, ArgumentTypeError: If ``values`` is not a list, or is empty, or ``check`` raises an error.
    """
    if isinstance(values, Tensor):
        values = values.tolist()
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise ArgumentTypeError(f"{name} must be a list of numbers, got {shown(values)}. Pass [0, 4, 8].")
    result = tuple(check(value) for value in values)
    if not result:
        raise ArgumentError(f"{name} must name at least one frame, got an empty list. Leave the sample out of the dataset.")
    return result


def _seconds(name: str, value: Any) -> float:
    """Return a number of seconds, or another finite number, as a float.

    Raises:
        ArgumentTypeError: If ``value`` is not a number.
        ArgumentError: If ``value`` is not finite.
    """
    try:
        if isinstance(value, str | bytes | bool | np.bool_) or getattr(value, "dtype", None) is torch.bool:
            raise TypeError  # float() accepts values of these types
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several values
        raise ArgumentTypeError(f"{name} must be a number, got {shown(value)}. Pass a float.") from None
    if not math.isfinite(number):
        raise ArgumentError(f"{name} must be finite, got {number}. Leave it out to begin with the first frame.")
    return number
