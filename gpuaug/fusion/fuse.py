"""``fuse`` and the module that it returns, which runs a batch through a fused pipeline.

A ``Program`` is the pipeline *lowered*, that is, translated to ops, for images of one dtype. For images of one size, a program
consists of *segments*: ops that share a plan, or one *fallback module*, which its library runs. A *plan* runs its ops in few
*passes*, each one reading and writing of all images. Its *parameter table* has one row per *sample*, an image or a clip, with
the random parameters (*draws*) of all ops. *Views* are several random augmentations of an image. A *mix*, such as MixUp, blends
images. *Targets* are annotations: masks, boxes, keypoints, labels. A ``Record`` holds the images and targets of a call.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from gpuaug.core.devices import plain_torch_reason
from gpuaug.core.errors import ArgumentTypeError, GpuAugError, one_of, whole_number
from gpuaug.core.packed_targets import unpack_targets
from gpuaug.core.ragged import Ragged, Shapes, Windows
from gpuaug.core.rng import next_seed
from gpuaug.core.settings import autocasts, without_autocast
from gpuaug.core.targets import holds_targets
from gpuaug.fusion import explain
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.readers import size_of_shape, size_of_shapes
from gpuaug.fusion.clips import clip_layout_of
from gpuaug.fusion.draws import Draws, check_draws
from gpuaug.fusion.forms.combine import Combination, first_images
from gpuaug.fusion.forms.record import Record
from gpuaug.fusion.forms.views import concatenated_views, pure_tensors
from gpuaug.fusion.lower.image_types import ImageTypes
from gpuaug.fusion.lower.kornia import warn_once, warn_when_fused
from gpuaug.fusion.lower.snapshot import snapshot
from gpuaug.fusion.lower.tree import leaves, target_conversions_of
from gpuaug.fusion.ops.base import ANY_SIDES, Size
from gpuaug.fusion.ops.fallback import EagerOp, OutputDtypeChange
from gpuaug.fusion.ops.mix import CutMix, SoftLabels, merged_num_classes
from gpuaug.fusion.options import Options
from gpuaug.fusion.pixels import IMAGE_DTYPES
from gpuaug.fusion.processors.fused import fuse_processor
from gpuaug.fusion.processors.read import is_image_processor
from gpuaug.fusion.program.plan import Plan
from gpuaug.fusion.program.program import CachedPlan, ImageKey, Program, image_key
from gpuaug.fusion.table.ahead import TablePrefetch
from gpuaug.fusion.table.on_host import HostTables
from gpuaug.fusion.table.rows import draws_of_plan_ops, make_table


def fuse(
    pipeline: Any,
    *,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format = torch.contiguous_format,
    pick: Literal["batch", "sample"] = "batch",
    ragged: bool = False,
    antialias: bool = False,
    views: int = 1,
    boxes: Literal["xyxy", "xywh", "cxcywh", "cxcywh_share"] = "xyxy",
    num_classes: int | None = None,
    label_smoothing: float = 0.0,
) -> "Fused":
    """Compile a pipeline of Kornia or torchvision into as few kernel launches as possible.

    Args:
        pipeline: A ``kornia.augmentation.AugmentationSequential`` or ``ImageSequential``, a ``torchvision.transforms.v2``
            transform or ``Compose``, or a sequence of them. Or an image processor of transformers, with ``ragged=True`` and
            no other argument than ``dtype``. It is not modified or moved. Later changes of its settings have no effect.
            Random parameters are drawn independently per sample, which is an image or a clip.
        dtype: Type of the output images: float32, bfloat16 or float16 for values in [0, 1], or uint8 for values in [0, 255].
            By default float32 for Kornia, and the input type for torchvision, unless the pipeline converts it. The computation
            is in float32, except that blurs with a kernel of 5 to 33 pixels on the longer side may use float16 weights and
            pixels if the output is bfloat16.
        memory_format: Memory format of the output images.
        pick: Whether Kornia's policies (such as ``RandAugment``), and its containers that pick one of several mixes (MixUp,
            CutMix), pick their transforms once per ``"batch"``, as in Kornia, or per ``"sample"``, as in the papers of the
            policies. torchvision's policies pick per image, and its ``RandomChoice`` of mixes per batch.
        ragged: Whether the images of a batch differ in size, as packed by ``gpuaug.collate_ragged``. The pipeline must then
            have a transform to one size, after transforms that only move pixels or change their colours.
        antialias: Whether Kornia's crops and resizes antialias when they downsample. By default they interpolate between the
            nearest four pixels. torchvision's transforms have their own ``antialias`` setting.
        views: Number of random views per image. The output is (views · B, C, H, W), view-major.
        boxes: Format of the boxes in target dicts. In pixels: ``"xyxy"``, corners; ``"xywh"``, top left corner, width and
            height; ``"cxcywh"``, centre, width and height. ``"cxcywh_share"``: the numbers of ``"cxcywh"``, with x and width
            divided by the width of the image, y and height by its height.
        num_classes: Number of classes. Labels (``"class"``) are then returned as class probabilities, (B, num_classes), mixed
            as the images are. Default: ``num_classes`` of a torchvision ``MixUp`` or ``CutMix`` in the pipeline. Without such a
            transform, labels are returned in Kornia's format: after a mix, label, partner's label and a weight per sample.
        label_smoothing: Label smoothing of the class probabilities, as in ``torch.nn.CrossEntropyLoss``. Requires
            the argument ``num_classes``, also if a transform of the pipeline has it.

    Returns:
        A module to call on images, or to put into ``stages`` of a ``gpuaug.StreamedLoader``. For an image processor it is a
        ``FusedProcessor``.

    Raises:
        ArgumentTypeError: If ``pipeline`` is not a module or a transform, or contains a transform that cannot run on a batch,
            or is an image processor of another type than ``FusedProcessor`` supports.
        ArgumentError: If the pipeline is empty or has nothing to compute, or an argument has an invalid value or is
            incompatible with the pipeline.

    Warns:
        GpuAugWarning: Once per module that its library runs: in ``fuse`` if the module is not lowered, otherwise in the first
            call with an image size that the module's op does not support.

    Cost:
        Host time only, no launch. The first batch on a GPU waits until the kernels are compiled.

    Examples:
        >>> import kornia.augmentation as K
        >>> augment = fuse(K.AugmentationSequential(K.RandomResizedCrop((8, 8)), K.RandomHorizontalFlip()))
        >>> augment(torch.zeros(4, 3, 16, 16, dtype=torch.uint8)).shape
        torch.Size([4, 3, 8, 8])
    """
    options = Options(
        dtype=dtype,
        memory_format=memory_format,
        pick=pick,
        ragged=ragged,
        antialias=antialias,
        views=views,
        boxes=boxes,
        num_classes=num_classes,
        label_smoothing=label_smoothing,
    )
    if is_image_processor(pipeline):
        # ``Fused`` only for type checkers: with a union or an overload they would not know the type for a pipeline of type Any.
        return cast("Fused", fuse_processor(pipeline, options))
    fused = Fused(pipeline, options)
    warn_when_fused(fused._program().ops, fused._warned)
    return fused


class Fused(nn.Module):
    """A fused pipeline, returned by ``fuse``.

    Every call draws new random parameters. The seed of a call is one number from torch's global generator; within a stage of a
    ``gpuaug.StreamedLoader``, it depends only on the position of the batch. The module has no parameters and an empty
    ``state_dict``, and ``eval()`` has no effect, as in Kornia.
    """

    takes_tv_tensors = True
    """Whether a stage of a loader also passes the members of a batch that contain torchvision's tensors to this module."""
    takes_packed = True
    """Whether a stage of a loader passes target dicts to this module as ``PackedTargets``."""

    def __init__(self, pipeline: Any, options: Options) -> None:
        super().__init__()
        self.memory_format = options.memory_format
        pipeline = snapshot(pipeline)
        # In a tuple, because a child module would be moved with this module, and would add its buffers to the state_dict.
        self.pipeline = (pipeline,)
        self._programs: dict[torch.dtype | tuple[torch.dtype, bool], Program] = {}
        """Program per dtype of the input images, and per (dtype, True) of a batch of torchvision's type ``Video``."""
        uint8_program = Program(pipeline, options, ImageTypes(torch.uint8))
        keys = getattr(pipeline, "data_keys", None)
        self._data_keys = tuple(key.name.lower() for key in keys) if keys else ("input",)
        """Default data keys, the types of the inputs of a call, such as ``"input"`` for images or ``"mask"``."""
        self._keepdim = all(leaf.op.keepdim for leaf in leaves(uint8_program.tree))
        """Whether the result for a single image, (C, H, W), has no batch axis either."""
        num_classes = merged_num_classes(options.num_classes, uint8_program.mixes)
        self.options = replace(options, num_classes=num_classes, views=uint8_program.views)
        self._target_conversions = target_conversions_of(uint8_program.tree)
        """Conversions of targets by transforms of the pipeline. They are applied at its end."""
        self.definition = (pipeline, replace(options, dtype=uint8_program.dtype))
        """(pipeline, options), which determine the output for a seed and a batch. Saved states of loaders contain their text.

        The options hold the output dtype for uint8 images.
        """
        self._soft_labels = None if num_classes is None else SoftLabels(num_classes, options.label_smoothing)
        """Conversion of labels to class probabilities; ``None`` without ``num_classes``."""
        self._programs[torch.uint8] = uint8_program
        self.geometric_modules = uint8_program.geometric_modules
        """Modules of the pipeline whose ops may move pixels within an image."""
        self._prefetch = TablePrefetch()  # draws parameter tables for this call and for later ones
        self.clip_layout = clip_layout_of(pipeline)
        """Layout of clips that the pipeline accepts."""
        # Images of the last call; empty before the first call. A list, because nn.Module.__setattr__ is slow.
        self._last_call: list[tuple[Size, torch.device, torch.dtype]] = []
        self._warned: set[str] = set()
        """Names of the fallback modules about which no more warnings are issued."""
        with suppress(GpuAugError):  # the pipeline does not accept floats; a call with floats will raise the error
            self._program(torch.float32)
        self.draws_only_from_seed = not any(
            isinstance(op, EagerOp) for program in self._programs.values() for op in program.ops
        )
        """True if all random numbers of a call follow from its seed.

        A fallback module draws from the global generators of torch, NumPy or Python, which are seeded while it runs.
        """

    def _program(self, dtype: torch.dtype = torch.uint8, *, is_video: bool = False) -> Program:
        """Return the program for images of ``dtype``, created at its first use. ``is_video``: for torchvision's ``Video``."""
        key = (dtype, True) if is_video else dtype
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = Program(self.pipeline[0], self.options, ImageTypes(dtype, is_video=is_video))
        return program

    def _dtype_of_images(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return ``dtype`` after a check. Default: uint8, or float32 if the pipeline does not accept uint8."""
        if dtype is not None:
            return one_of("dtype", dtype, tuple(IMAGE_DTYPES), "Pass images.dtype of a batch.")
        return torch.float32 if self._program().refuses_type else torch.uint8

    def extra_repr(self) -> str:
        """Names of all modules, names of the modules that are not fused, and the backend of the last call."""
        ops = self._program().ops
        descriptions = [", ".join(op.name for op in ops)]
        for package in ("Kornia", "torchvision"):
            names = [op.name for op in ops if isinstance(op, EagerOp) and op.package == package]
            descriptions += [f"left to {package}: {', '.join(names)}"] if names else []
        backend = self._backend()
        return "; ".join([*descriptions, f"run by {backend}"] if backend else descriptions)

    def __reduce__(self) -> tuple[Any, ...]:
        return Fused, (self.pipeline[0], self.options), {"training": self.training, "warned": self._warned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.training = state["training"]
        self._warned = set(state["warned"])

    def draw(self, shape: Sequence[int] | Ragged, seed: int | None = None, *, dtype: torch.dtype | None = None) -> Draws:
        """Draw the random parameters of one batch, without images.

        Args:
            shape: (B, C, H, W) of the images, (B, T, C, H, W) of clips, or a ragged batch; of the first images of the samples,
                if samples have several. In a ``VideoSequential`` with ``data_format="BCTHW"``, (B, C, T, H, W) of clips.
            seed: Seed of the draws. Default: one number from torch's global generator.
            dtype: Type of the images. Default: uint8, or float32 if the pipeline does not accept uint8.

        Returns:
            Draws for the argument ``draws`` of a call with images of this shape.

        Raises:
            ArgumentError, ArgumentTypeError: If ``shape`` is not the shape of a batch of images, or the pipeline does not
                support this size, or ``seed`` is not in [0, 2⁶⁴).

        Cost:
            Host time only, no launch.
        """
        size = size_of_shape(shape, self.clip_layout)
        if seed is not None:
            seed = whole_number("seed", seed, "Leave seed out to draw it from torch's generator.", most=2**64 - 1)
        return self._program(self._dtype_of_images(dtype)).draw(size, next_seed() if seed is None else seed)

    def windows_read(self, shapes: Shapes, image: int = 0) -> Windows | None:
        """Return the window of each image that a call with the same seed reads, for a stage that decodes only the windows.

        Within a stage of a loader, this method and the call on the batch have the same seed, which follows from the position of
        the batch. Outside of a stage, both draw a seed from torch's global generator: restore the generator's state in between.

        Args:
            shapes: Sizes of the images of a ragged batch in pixels, after any rotation by their EXIF orientation.
            image: Index of the images in their samples, if samples have several.

        Returns:
            The smallest window of each image that contains all pixels read by any view. ``None`` if whole images are read, if
            the windows depend on the pixels, or if an image has no pixels.

        Cost:
            Host time only: the draws of the first op. No launch.
        """
        seed = next_seed()
        if shapes.shortest_side < 1:
            return None
        return self._program().windows_of_image(size_of_shapes(shapes), seed, image)

    def forward(self, *inputs: Any, data_keys: Sequence[Any] | None = None, draws: Draws | None = None) -> Any:
        """Augment a batch.

        Args:
            inputs: Images, then their targets: masks, boxes, keypoints, labels, target dicts.
            data_keys: Type of each input: one of Kornia's data keys, ``"targets"`` for a list of target dicts,
                ``"tv_tensors"`` for containers of torchvision's tensors, or ``"valid"`` for a bool tensor (B, N) that is True
                for boxes that are not padding. Default: the data keys of the pipeline, ``["input"]`` if it has none; further
                inputs that contain torchvision's tensors are ``"tv_tensors"``.
            draws: Draws to replay. Default: new draws.

        Shape:
            - images: (B, C, H, W) uint8, uint16, int16 or floating; clips (B, T, C, H, W) of these; or a ragged batch of B.
              The largest value of an integer type represents 1; floating images have values in [0, 1].
            - returns: (V · B, C, H', W') for V views, or (V · B, T, C, H', W'); with several inputs, a list of this tensor and
              the targets

        Raises:
            ArgumentTypeError: If an input does not have the type that its data key names.
            ArgumentError: If inputs differ in batch size or image size, if ``draws`` are for other sizes, if images exceed the
                size limit of an op, or if views may differ in size.
            DeviceError: If Triton cannot run on a GPU, and the environment variable ``GPUAUG_REQUIRE_TRITON`` is 1.

        Warns:
            GpuAugWarning: Once per GPU on which Triton cannot run, so that plain torch runs, about 50 times slower. Once per
                module whose op does not support the image size, so that its library runs it.

        Cost:
            The launches that ``explain`` lists, and one asynchronous copy of the parameter table from pinned memory. For 1024
            samples or more, also one launch that transposes the table. No synchronization.
        """
        run = self._combined if self._program().combining else self._augmented
        if autocasts():
            # Under autocast, matrices are multiplied in 16 bits, and torch.cat rejects tensors of another 16-bit type.
            with without_autocast():
                return run(inputs, data_keys, draws)
        return run(inputs, data_keys, draws)

    def _combined(self, inputs: Sequence[Any], data_keys: Any, draws: Draws | None) -> Any:
        """Run ``forward`` for a pipeline that begins with ops that combine several images of a sample, such as ``Mosaic``."""
        combination = Combination(self._program().combining, inputs, data_keys, self.options.boxes)
        program = self._program(combination.dtype)
        size, key, views = combination.size, combination.plan_key, self.options.views
        seed = next_seed() if draws is None else 0  # 0 is not used: ``draws`` replace new draws
        plan = None if key is None else self._plan_of(program, key, size, masks=key[2], points=key[3])  # see ImageKey
        if draws is None and plan is not None and key is not None and key in program.cached:
            tables, index = self._prefetch.tables(plan, size, combination.device, has_points=key[3], views=views, seed=seed)
            assert isinstance(tables, HostTables)  # the combined images have one size
            op_draws = tables.draws(index, program.combining)
        else:
            if draws is None:
                draws = program.draw(size, seed)
            check_draws(draws, size, program.ops, views)
            op_draws = draws._drawn
        results = combination.run(op_draws)
        if plan is not None and program.ends_with_combining:
            self._last_call[:] = ((size, combination.device, combination.dtype),)
            return combination.restored(results if len(results) > 1 else results[0])
        return combination.restored(self._augmented(results, combination.result_keys, draws, seed))

    def _plan_of(self, program: Program, key: ImageKey | None, size: Size, *, masks: bool, points: bool) -> Plan | None:
        """Return the plan of the whole pipeline, or ``None``. Images are checked, unless the plan is cached for ``key``."""
        if key in program.cached:
            return program.cached[key].plan
        program.check_type(has_run=False)
        program.check_sizes(size)
        plan = program.segments.whole_plan(size, masks=masks, views=self.options.views, points=points)
        if key is not None and plan is not None and not plan.draws_one_batch_at_a_time:
            program.cache(key, plan, size)
        return plan

    def _augmented(self, inputs: Sequence[Any], data_keys: Any, draws: Draws | None, seed: int | None = None) -> Any:
        """Run ``forward`` without ops that combine images. ``seed``: seed of the call; ``None`` if it is not drawn yet."""
        if any(isinstance(value, list | tuple) and value and isinstance(value[0], Tensor | Ragged) for value in inputs):
            inputs = first_images(inputs, data_keys)  # of samples with several images; no op uses the others
        images_only = data_keys is None and len(inputs) == 1
        key = image_key(inputs[0]) if images_only and draws is None else None
        if key is not None and (cached_program := self._programs.get(inputs[0].dtype)) is not None:
            cached_plan = cached_program.cached.get(key)
            if cached_plan is not None:
                return self._run_cached(cached_program, cached_plan, inputs[0], seed)
        inputs = inputs if images_only or self.options.views == 1 else tuple(map(unpack_targets, inputs))
        keys = ("input",) if images_only else self._keys_of(inputs) if data_keys is None else data_keys  # last: the user's
        record = self._record_of(inputs, keys)
        size, views, is_video = record.call.size, self.options.views, record.call.is_video
        program = self._program(record.call.dtype, is_video=is_video)
        plan = self._plan_of(program, record.plan_key, size, masks=record.has_masks, points=record.has_points)
        for op in program.limited_ops:
            record.check_keys(op)
        if program.box_crop is not None:
            record.boxes_for_crop(program.box_crop)  # only to raise an error without boxes
        self._last_call[:] = ((size, record.call.device, record.call.dtype),)
        # All views run in the same passes if one plan runs the whole pipeline and the only input is images.
        views_together = views == 1 or (len(inputs) == 1 and plan is not None)
        # Whether ``TablePrefetch`` can draw for several calls at once, which it does in ``_run`` unless ``draws`` are passed.
        draws_ahead = views_together and plan is not None and not plan.draws_one_batch_at_a_time
        if draws is None and not draws_ahead and seed is None:
            seed = next_seed()
        # At each attempt, one fallback module may return another dtype than the pipeline was lowered for. The pipeline is then
        # lowered again for the returned dtype, and the call repeated.
        for _ in range(len(program.ops) + 1):
            if draws is not None:
                check_draws(draws, size, program.ops, views)
            all_draws = draws if draws is not None or draws_ahead or seed is None else program.draw(size, seed)
            try:
                if views_together:
                    result = self._run(program, record, plan, all_draws, seed)
                else:
                    assert all_draws is not None
                    # Without soft labels, a CutMix returns Kornia's labels, which have an axis before the batch axis.
                    has_cut_mix = self._soft_labels is None and any(isinstance(op, CutMix) for op in program.mixes)
                    view_results = [
                        self._run(program, self._record_of(inputs, keys), plan, draws_of_view)
                        for draws_of_view in all_draws.views
                    ]
                    result = concatenated_views(view_results, record.keys, size.batch, is_cutmix=has_cut_mix)
                if plan is None:
                    program.check_type(has_run=True)
                return pure_tensors(result) if self._target_conversions.is_pure else result
            except OutputDtypeChange as change:
                returned_types = {**program.returned_types, change.index: change.dtype}
                dtype = record.call.dtype
                program = Program(self.pipeline[0], self.options, ImageTypes(dtype, returned_types, is_video))
                self._programs[(dtype, True) if is_video else dtype] = program
                record = self._record_of(inputs, keys)
        raise ArgumentTypeError(
            "functions in pipeline must return one dtype per input dtype, got a function whose output dtype changes from "
            "call to call. Convert the images in the function: image.float()."
        )

    def _run_cached(self, program: Program, cached_plan: CachedPlan, images: Tensor, seed: int | None) -> Tensor:
        """Run a call whose only input is images, with a plan that an earlier call cached. ``seed``: see ``_augmented``."""
        plan, size = cached_plan
        self._last_call[:] = ((size, images.device, images.dtype),)
        views = self.options.views
        tables, index = self._prefetch.tables(plan, size, images.device, has_points=False, views=views, seed=seed)
        table = tables.table(index, size, None)
        if images.ndim == 4:
            return dispatch.run(plan, images, table, program.dtype, self.memory_format)
        result = dispatch.run(plan, self.clip_layout.images(images), table, program.dtype, self.memory_format)
        return self.clip_layout.clips(result, plan.out.frames or images.shape[2 if self.clip_layout.channels_first else 1])

    def _keys_of(self, inputs: Sequence[Any]) -> tuple[str, ...]:
        """Return the default data keys: the pipeline's, then ``"tv_tensors"`` for further inputs with torchvision's tensors."""
        other_inputs = inputs[len(self._data_keys) :]
        return (*self._data_keys, *("tv_tensors" for value in other_inputs if holds_targets(value)))

    def _record_of(self, inputs: Sequence[Any], keys: Sequence[Any]) -> Record:
        """Create the ``Record`` of a call: its images and targets, which each segment replaces by its outputs."""
        return Record(inputs, keys, self.options.boxes, self._target_conversions, self.clip_layout)

    def explain(
        self, shape: Sequence[int] | Ragged | None = None, *, dtype: torch.dtype | None = None
    ) -> "explain.Explanation":
        """Describe the passes of the pipeline: modules, launches and bytes per batch, and why modules are not fused.

        Args:
            shape: (B, C, H, W) of the images, (B, T, C, H, W) of clips, or a ragged batch. Default: the shape of the last call,
                or (256, 3, 256, 256) before the first call, with any height and width if the pipeline is ragged.
            dtype: Type of the images. Default: the type of the last call; before the first call uint8, or float32 if the
                pipeline does not accept uint8.

        Returns:
            A table to print.

        Raises:
            ArgumentError, ArgumentTypeError: If ``shape`` is not the shape of a batch of images, or ``dtype`` is not supported.
        """
        default_size = Size(256, 3, *ANY_SIDES) if self.options.ragged else Size(256, 3, 256, 256)
        last_size = self._last_call[0][0] if self._last_call else default_size
        size = last_size if shape is None else size_of_shape(shape, self.clip_layout)
        dtype = self._dtype_of_images(self._last_call[0][2] if dtype is None and self._last_call else dtype)
        plain_torch = plain_torch_reason(self._last_call[0][1]) if self._last_call else None
        return explain.explanation(self._program(dtype), size, dtype, self._backend(), plain_torch)

    def _backend(self) -> str:
        """Name of the backend of the last call; empty before the first call."""
        return dispatch.backend_name(self._last_call[0][1]) if self._last_call else ""

    def _run(self, program: Program, record: Record, plan: Plan | None, draws: Draws | None, seed: int | None = None) -> Any:
        """Run the pipeline on the inputs of a call, for all views at once or for one view.

        Args:
            program: Pipeline, lowered for the type of the images.
            record: Inputs of the call.
            plan: Plan of the whole pipeline; ``None`` if there is none. Only used without ``draws``.
            draws: Draws of the views to run; ``None`` to let ``TablePrefetch`` draw.
            seed: Seed of the call for ``TablePrefetch``; see ``_augmented``.
        """
        views = self.options.views
        with torch.no_grad():
            if self._soft_labels is not None:
                record.convert_labels(self._soft_labels, program.mixes)
            if draws is not None:
                self._run_segments(program, record, draws)
            elif plan is not None:
                size, layouts = record.call.size, record.call.image_layouts
                tables, index = self._prefetch.tables(
                    plan, size, record.call.device, layouts, has_points=record.has_points, views=views, seed=seed
                )
                record.run_plan(plan, tables.table(index, size, layouts), (), program.dtype, self.memory_format)
            return record.results(keepdim=self._keepdim, views=views)

    def _run_segments(self, program: Program, record: Record, draws: Draws) -> None:
        """Run the segments of the pipeline in order. Plans run all views at once, fallback modules only one view."""
        size = record.call.size
        start = 0
        while start < len(program.ops):
            segment = program.segments.at(start, size, masks=record.has_masks, points=record.has_points)
            segment_draws = [view._drawn[start : segment.stop] for view in draws.views]
            start = segment.stop
            is_last = start == len(program.ops)
            # (dtype, memory format) of the result of the pipeline. Images between segments have the defaults.
            output_type = (program.dtype, self.memory_format) if is_last else ()
            if segment.fallback is not None:
                warn_once(segment.fallback, self._warned)
                ((fallback_draws,),) = segment_draws  # one view, one module
                record.run_eager(segment.fallback, fallback_draws, *output_type)
                size = segment.fallback.out_drawn(fallback_draws, size)
                if not is_last:
                    record.check_size(segment.fallback, size)
            elif segment.plan is not None:
                plan = segment.plan
                device = record.call.device
                has_points = record.has_points
                views = [draws_of_plan_ops(plan.ops, view) for view in segment_draws]
                tables = [make_table(plan, size, draws_by_op, device, has_points=has_points) for draws_by_op in views]
                table = torch.cat(tables) if len(tables) > 1 else tables[0]
                record.run_plan(plan, table, plan.canvases(size, views), *output_type)
                size = replace(plan.out, batch=size.batch)
