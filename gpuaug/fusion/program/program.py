"""``Program``: a pipeline lowered for images of one type, with its ops, plans and output type.

To *lower* a module is to translate it to ops. A *sample* is an image or a clip. A *plan* groups ops into *passes*, each one
reading and one writing of all images, for images of one size. *Ragged* images differ in size. *Views* are several random
augmentations of the same images. The *window* of an image is the part that the pipeline reads, to which decoding can be
restricted. An op may *combine* several images of a sample, such as the four of a mosaic.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpuaug.core.errors import ArgumentError, GpuAugError
from gpuaug.core.ragged import Windows
from gpuaug.core.rng import seeds_of_views
from gpuaug.fusion.combine_ops import combined_size, combined_windows, combining_ops
from gpuaug.fusion.draws import Draws
from gpuaug.fusion.lower.image_types import ImageTypes
from gpuaug.fusion.lower.pipeline import lower
from gpuaug.fusion.lower.tree import leaves, target_conversions_of
from gpuaug.fusion.ops.base import Op, Size
from gpuaug.fusion.ops.channel import Denormalize, Normalize
from gpuaug.fusion.ops.geometry import BoxCropOp, GatherOp, IdentityOp, moves_pixels
from gpuaug.fusion.ops.mix import MixOp
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision.target_conversions import NO_CONVERSIONS
from gpuaug.fusion.options import Options
from gpuaug.fusion.program.plan import DrawnOp, Plan, draw_in_order
from gpuaug.fusion.program.segments import Segments
from gpuaug.fusion.program.sizes import check_sizes, check_views, number_of_views, sizing_ops

ImageKey = tuple[torch.Size, torch.device, bool, bool]
"""Key of a cached plan: (shape of the images, device, whether there are masks, whether there are boxes or keypoints)."""

MOST_CACHED = 64
"""Maximum number of cached plans. Most programs need two: for full batches, and for the last batch of an epoch."""


class CachedPlan(NamedTuple):
    """Plan that runs the whole pipeline, and the image size that it is for, which ``Program.check_sizes`` has accepted."""

    plan: Plan
    size: Size


def image_key(images: Any) -> ImageKey | None:
    """Return the key of a call with images alone in ``Program.cached``.

    ``None`` for anything but a plain tensor of a batch of images or clips that needs no gradient.
    """
    if type(images) is not Tensor or images.ndim not in (4, 5) or images.requires_grad:
        return None
    return images.shape, images.device, False, False


class Program:
    """Ops of a pipeline for images of one type.

    torchvision's transforms treat uint8 and floats differently, so the ops depend on the type. A *fallback module* is not
    lowered, but run by its library.

    Args:
        pipeline: Pipeline of the user.
        options: Arguments of ``fuse``.
        types: Type of the input images, and types that fallback modules are assumed to return. Lowering updates it.

    Raises:
        ArgumentError, ArgumentTypeError: If the pipeline cannot run.
    """

    def __init__(self, pipeline: Any, options: Options, types: ImageTypes) -> None:
        self.returned_types = types.returned_types
        source_dtype = types.dtype  # after ``lower``, ``types.dtype`` is the output type of the pipeline
        self.tree = lower(pipeline, types, options.pick, antialias=options.antialias)
        self.dtype = types.dtype if options.dtype is None else options.dtype
        """Type of the output images."""
        self.ops = tuple(leaf.op for leaf in leaves(self.tree))
        self.lowered_ops = tuple(op for op in self.ops if isinstance(op, Op))
        self.mixes = tuple(op for op in self.ops if isinstance(op, MixOp))
        self.limited_ops = tuple(op for op in self.lowered_ops if op.supported_keys)
        """Ops that accept only some types of inputs, ``Op.supported_keys``."""
        self.combining = combining_ops(self.ops)
        """Ops that combine the images of a sample, before all passes."""
        is_unchanged = self.dtype == source_dtype and options.memory_format == torch.contiguous_format
        only_copies = all(isinstance(op, IdentityOp) for op in self.ops) and target_conversions_of(self.tree) == NO_CONVERSIONS
        self.ends_with_combining = is_unchanged and only_copies
        """Whether no pass is needed after the ops in ``combining``: nothing else changes images or targets."""
        self._last_draws: dict[tuple[int, int], Draws] = {}
        """Draws of the last call of ``windows_of_image`` with ops in ``combining``, by (seed, batch size).

        Each sample has several images, and ``windows_of_image`` is called once per image, with the same draws.
        """
        if self.combining and options.views > 1:
            raise ArgumentError(
                f"views must be 1 for {self.combining[0].name}, got {options.views}. Leave it out, or combine images in the "
                "data set."
            )
        self.box_crop = next((op for op in self.ops if isinstance(op, BoxCropOp)), None)
        self.segments = Segments(self.ops)
        self.cached: dict[ImageKey, CachedPlan] = {}
        """Plans of the whole pipeline. A call with images alone looks up its plan by ``image_key``, and runs the plan.

        Without its launches, a call takes 13 µs of host time with a cached plan, and 33 µs otherwise (benchmark loop, one core,
        2026-11-26). In a training loop both times are several times longer, because other code evicts the processor's caches.
        """
        self._ops_to_one_size = sizing_ops(self.ops, ragged=options.ragged)
        """Ops up to the first op whose output images have one size; empty unless ``fuse`` got ``ragged=True``."""
        # ``types.refusal``: error for input images of this type; ``None`` if the user's library accepts them.
        self._refusal, self._ragged = types.refusal, options.ragged
        self.views = number_of_views(self.ops, options.views)
        """Number of views per image."""
        if self.views > 1:
            check_views(self.ops)
        normalizations = [op for op in self.ops if isinstance(op, Normalize)]
        last_op = normalizations[-1] if normalizations else None
        # Kornia's ``Denormalize`` inverts a normalization. torchvision's op of this class multiplies by the largest integer.
        if options.dtype == torch.uint8 and last_op and not (isinstance(last_op, Denormalize) and last_op.package == "Kornia"):
            raise ArgumentError(
                f"dtype must be floating for images that {last_op.name} takes out of [0, 1], got torch.uint8. Leave it out for "
                "torch.float32."
            )

    @property
    def geometric_modules(self) -> tuple[Any, ...]:
        """Modules whose ops may move pixels within an image."""
        moving = (op.module for op in self.lowered_ops if any(map(moves_pixels, op.ops)))
        return (*(op.module for op in self.combining), *moving)

    def cache(self, key: ImageKey, plan: Plan, size: Size) -> None:
        """Add a plan of the whole pipeline to ``cached``."""
        if len(self.cached) >= MOST_CACHED:
            self.cached.clear()
        self.cached[key] = CachedPlan(plan, size)

    @property
    def refuses_type(self) -> bool:
        """Whether images of this type raise an error before any fallback module runs."""
        return self._refusal is not None and self._refusal.before_any_fallback

    def check_type(self, *, has_run: bool) -> None:
        """Raise an error for images of a type that the user's library does not accept.

        Args:
            has_run: Whether the pipeline has run, and every fallback module has returned the type that it was assumed to
                return. Only then an error about the type after a fallback module is certain.

        Raises:
            ArgumentError, ArgumentTypeError: If the library does not accept the type.
        """
        if self._refusal is not None and (has_run or self._refusal.before_any_fallback):
            raise type(self._refusal.error)(*self._refusal.error.args)

    def check_sizes(self, size: Size) -> None:
        """Raise an error for images that the pipeline cannot transform to one size.

        Raises:
            ArgumentError: If an image does not fit an op, or a ragged batch is passed without ``ragged=True``.
        """
        if size.ragged and not self._ragged:
            unpacking = ", or unpack the only image before: images[0][None]" if size.images == 1 else ""
            raise ArgumentError(
                f"images must have one size, got a ragged batch. Fuse the pipeline with gpuaug.fuse(…, ragged=True){unpacking}."
            )
        if size.ragged:
            check_sizes(self._ops_to_one_size, size)

    def draw(self, size: Size, seed: int) -> Draws:
        """Draw the random parameters of one batch, for all views.

        ``size``: size of the images; if samples have several images, of the first image of each sample.

        Raises:
            ArgumentError: If the pipeline does not accept images of this size.
        """
        size = combined_size(self.combining, size)
        self.check_sizes(size)
        if self.views > 1:
            check_views(self.ops, size)
        seeds = seeds_of_views(seed, self.views)
        first_draws, *other_draws = (self._draw_view(size, view_seed, view) for view, view_seed in enumerate(seeds))
        return replace(first_draws, _more=tuple(other_draws))

    def windows(self, size: Size, seed: int) -> Windows | None:
        """Return the smallest window per ragged image that contains all pixels that a call reads for all views.

        Args:
            size: Size of the images.
            seed: Seed of the call.

        Returns:
            Windows per image; for clips, per frame. ``None`` if all images are read whole, if the seed and the sizes do not
            determine the windows, or if the call will raise an error for the images.
        """
        try:
            self.check_sizes(size)
            plan = self.segments.at(0, size, masks=False).plan
        except GpuAugError:
            return None
        if plan is None or plan.box_crop is not None:
            return None
        first_op = next(op for op in self._ops_to_one_size if not isinstance(op, IdentityOp))
        if not isinstance(first_op, GatherOp) or first_op.draws_size:
            return None
        size_of_views = size.repeat(self.views)
        sampler = Sampler(seeds_of_views(seed, self.views), size.batch, plan.uniform_count, range(self.views))
        windows = first_op.window(first_op.draw(sampler, size_of_views), size_of_views)
        if windows is None:
            return None
        # From rows (top, left, height, width), (V · B, 4), to (top, left) and (height, width), (V, B, 2) each, for V views.
        starts, sides = windows.reshape(self.views, size.batch, 2, 2).transpose(2, 0, 1, 3)
        start = starts.min(0)
        end = (starts + sides).max(0)
        if not start.any() and np.all(end[:, 0] == size.height) and np.all(end[:, 1] == size.width):
            return None
        out = first_op.out(size)
        table = np.concatenate((start, end - start), 1).repeat(size.images_per_sample, 0)
        return Windows(table, (out.height, out.width), may_downsample=self.views == 1)

    def windows_of_image(self, size: Size, seed: int, image: int) -> Windows | None:
        """Return the smallest windows that a call reads of image ``image`` of each sample; ``None`` if it reads them whole.

        Args:
            size: Sizes of these images.
            seed: Seed of the call.
            image: Index of the image in its sample. Without ops that combine images, only image 0 is used.
        """
        if not self.combining and image == 0:
            return self.windows(size, seed)
        whole = np.stack(np.broadcast_arrays(0, 0, size.height, size.width), 1)
        table = np.zeros_like(whole)
        if self.combining:
            if image >= self.combining[0].groups * self.combining[0].count:  # the call raises an error that has both numbers
                return None
            key = seed, size.batch
            try:
                draws = self._last_draws[key] if key in self._last_draws else self.draw(size, seed)
            except GpuAugError:
                return None
            self._last_draws = {key: draws}
            table = combined_windows(self.combining, draws._drawn, whole[:, 2:], image)
        # An image that is not used has an empty window. It is enlarged, because decoding needs at least one pixel. The output
        # size (1, 1) is not used without downsampling.
        table[:, 2:] = np.maximum(table[:, 2:], 1)
        return None if np.array_equal(table, whole) else Windows(table, (1, 1), may_downsample=False)

    @property
    def window_crop(self) -> str:
        """Name of the crop whose windows can be computed before ragged images are decoded; empty if there is none."""
        example_size = Size(1, 3, np.array([480]), np.array([640]))
        crop = next((op for op in self._ops_to_one_size if not isinstance(op, IdentityOp)), None)
        return crop.name if crop is not None and self.windows(example_size, 0) is not None else ""

    def _draw_view(self, size: Size, seed: int, view: int = 0) -> Draws:
        """Draw the random parameters of the view with index ``view``, with the seed ``seed`` of the view."""
        plan = self.segments.at(0, size, masks=False).plan
        # As many uniform numbers per call of NumPy as ``TablePrefetch``, which computes tables ahead, so that draws are equal.
        uniform_count = plan.uniform_count if plan is not None else 8
        sampler = Sampler((seed,), size.batch, uniform_count, (view,))
        drawn_ops: list[DrawnOp] = []
        current_size = size
        while len(drawn_ops) < len(self.ops):
            drawn_ops += draw_in_order(
                self.segments.at(len(drawn_ops), current_size, masks=False).all_ops, sampler, current_size
            )
            current_size = drawn_ops[-1].out
        return Draws(size.shape, self.tree, tuple(entry.draws for entry in drawn_ops), tuple(entry.size for entry in drawn_ops))
