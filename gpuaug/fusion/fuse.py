"""``fuse``: the module that a user calls, and the driver that takes a batch through the passes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpuaug.core.devices import plain_torch_reason
from gpuaug.core.errors import ArgumentTypeError, GpuAugError, one_of, whole_number
from gpuaug.core.packed_targets import unpack_targets
from gpuaug.core.ragged import Ragged, Shapes, Windows
from gpuaug.core.rng import next_seed
from gpuaug.core.settings import autocasts, without_autocast
from gpuaug.core.torchvision_types import holds_targets
from gpuaug.fusion import explain
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.readers import size_of_shape
from gpuaug.fusion.clips import clip_form
from gpuaug.fusion.draws import Draws, check_draws
from gpuaug.fusion.lower.fallback_warnings import FallbackWarnings
from gpuaug.fusion.lower.tree import ending_of, leaves, transforms_done
from gpuaug.fusion.ops.base import ANY_SIDES, Op, OpDraws, Size
from gpuaug.fusion.ops.fallback import EagerOp, Retyped
from gpuaug.fusion.ops.mix import CutMix, SoftLabels, classes_of
from gpuaug.fusion.options import BoxForm, Options
from gpuaug.fusion.pixels import PIXELS
from gpuaug.fusion.policies.picking import Pick
from gpuaug.fusion.program.plan import Plan
from gpuaug.fusion.program.program import CachedPlan, Program, image_key
from gpuaug.fusion.table.ahead import TablePrefetch
from gpuaug.fusion.table.rows import make_table, of_all_parts
from gpuaug.fusion.targets.box_crop import records_of
from gpuaug.fusion.targets.data_keys import keys_given
from gpuaug.fusion.targets.targets import Targets, joined


def fuse(
    pipeline: Any,
    *,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format = torch.contiguous_format,
    pick: Pick = "batch",
    ragged: bool = False,
    antialias: bool = False,
    views: int = 1,
    boxes: BoxForm = "xyxy",
    num_classes: int | None = None,
    label_smoothing: float = 0.0,
) -> "Fused":
    """Run a pipeline of Kornia's or torchvision's in as few launches as possible.

    Args:
        pipeline: A ``kornia.augmentation.AugmentationSequential`` or ``ImageSequential``, a ``torchvision.transforms.v2``
            transform or ``Compose``, or a sequence of any. It is read, and never changed or moved. Each sample draws by itself,
            an image or a clip.
        dtype: Type of the images that come out: float32, bfloat16 or float16 for values in [0, 1], or uint8 for values in
            [0, 255]. Left out: the type that the pipeline itself returns, which for Kornia's is float32, and for torchvision's
            that of its input unless it converts. Computed in float32, except large blurs into bfloat16.
        memory_format: Of the images that come out.
        pick: Whether policies (``RandAugment`` and the like) and containers of mixes pick for the whole ``"batch"``, as in
            Kornia, or for each ``"sample"`` on its own, as in the policies' papers.
        ragged: Whether images come in sizes of their own, as ``gpuaug.collate_ragged`` packs them. The pipeline then has
            to begin with what gives them one size.
        antialias: Whether Kornia's crops and resizes that shrink weigh all pixels that fall on one. Without it they take the
            nearest four. torchvision's have an ``antialias`` of their own.
        views: How often each image is drawn for. Views of a batch lie behind one another: (views · B, C, H, W).
        boxes: What the boxes of target dicts are.
        num_classes: How many classes there are. Labels (``"class"``) that go along then come as shares of each, (B,
            num_classes), mixed where images are. Left out: as a mix of torchvision's says, or in Kornia's form.
        label_smoothing: How much of a label is then spread over all classes, as by torch's cross entropy.

    Returns:
        A module to be called on images, or to be put into ``stages`` of a ``gpuaug.StreamedLoader``.

    Raises:
        ArgumentTypeError: If ``pipeline`` has no augmentations in it, or a transform that cannot run on a batch.
        ArgumentError: If it is empty, or an argument is none of its values or does not go with the pipeline.

    Warns:
        GpuAugWarning: Once for each module that is left to its library: here, or at the first batch of a size for which it is.

    Cost:
        Host time alone; no launch. The first batch on a GPU waits for the kernels to be compiled.

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
    fused = Fused(pipeline, options)
    fused._warnings.when_fused()
    return fused


class Fused(nn.Module):
    """A pipeline that runs in few launches; made by ``fuse``.

    Every call draws anew. Used by itself, a call takes one number from torch's global generator; in a stage of a
    ``gpuaug.StreamedLoader`` that generator depends on the batch's position alone. It has no parameters, adds nothing to
    a ``state_dict``, and ``eval()`` changes nothing, as in Kornia.
    """

    follows_types = True
    """A stage also hands over the members of a batch that hold torchvision's tensors."""
    takes_packed = True
    """A stage hands over target dicts as ``PackedTargets``."""

    def __init__(self, pipeline: Any, options: Options) -> None:
        super().__init__()
        self.memory_format = options.memory_format
        # In a tuple, so that it is no child: a child would be moved, and would have its buffers in the state_dict.
        self.pipeline = (pipeline,)
        self._programs: dict[torch.dtype, Program] = {}
        """The pipeline lowered for images of a type, by that type."""
        of_bytes = Program(pipeline, options)
        keys = getattr(pipeline, "data_keys", None)
        self._data_keys = tuple(key.name.lower() for key in keys) if keys else ("input",)
        self._extra_args = getattr(pipeline, "extra_args", None)
        self._keepdim = all(leaf.op.keepdim for leaf in leaves(of_bytes.tree))
        classes = classes_of(options.num_classes, of_bytes.mixes)
        self.options = replace(options, num_classes=classes)
        self._ending = ending_of(of_bytes.tree)
        self.definition = (pipeline, replace(options, dtype=of_bytes.dtype))
        """The pipeline and its options, which decide the batches besides the draws. States of loaders hold both as text."""
        self._soft = None if classes is None else SoftLabels(classes, options.label_smoothing)
        self._programs[torch.uint8] = of_bytes
        self._prefetch = TablePrefetch()
        self.clips = clip_form(pipeline)
        """How the pipeline takes clips."""
        # Of the last call. A list, because nn.Module.__setattr__ is slow.
        self._seen: list[tuple[Size, torch.device, torch.dtype]] = []
        self._warnings = FallbackWarnings(of_bytes.ops)
        # Another library's module may draw from any generator.
        self.draws_by_itself = not any(isinstance(op, EagerOp) for program in self._both_programs() for op in program.ops)

    def _both_programs(self) -> list[Program]:
        """Return the programs for bytes and for floats, without one that raises an error."""
        programs = [self._program()]
        try:
            programs.append(self._program(torch.float32))
        except GpuAugError:  # a batch of floats raises it
            return programs
        return programs

    def _program(self, dtype: torch.dtype = torch.uint8) -> Program:
        program = self._programs.get(dtype)
        if program is None:
            program = self._programs[dtype] = Program(self.pipeline[0], self.options, dtype)
        return program

    def _program_for(self, dtype: torch.dtype | None) -> Program:
        """Return the program for a dtype that the user passed; without one, for bytes, or for floats if bytes are refused."""
        if dtype is not None:
            dtype = one_of("dtype", dtype, tuple(PIXELS), "Pass images.dtype of a batch.")
        elif self._program().refuses:
            dtype = torch.float32
        return self._program(torch.uint8 if dtype is None else dtype)

    def extra_repr(self) -> str:
        """Describe the modules, and the modules that are left to their library."""
        ops = self._program().ops
        words = [", ".join(op.name for op in ops)]
        for package in ("Kornia", "torchvision"):
            names = [op.name for op in ops if isinstance(op, EagerOp) and op.package == package]
            words += [f"left to {package}: {', '.join(names)}"] if names else []
        ran = self._executor()
        return "; ".join([*words, f"run by {ran}"] if ran else words)

    def __reduce__(self) -> tuple[Any, ...]:
        return Fused, (self.pipeline[0], self.options), {"training": self.training, "warned": self._warnings.warned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.training = state["training"]
        self._warnings.warned = set(state["warned"])

    def draw(self, shape: Sequence[int] | Ragged, seed: int | None = None, *, dtype: torch.dtype | None = None) -> Draws:
        """Draw for one batch, without images.

        Args:
            shape: (B, C, H, W) of the images, (B, T, C, H, W) of clips, or a ragged batch.
            seed: Seed of the draws. Left out: one number from torch's global generator.
            dtype: Type of the images. Left out: uint8, or float32 where the pipeline refuses bytes.

        Returns:
            The draws, for ``draws=`` of a call with images of this shape.

        Raises:
            ArgumentError, ArgumentTypeError: If ``shape`` is not that of a batch of images, or of images that a call refuses
                for their size, or ``seed`` not in [0, 2⁶⁴).

        Cost:
            Host time alone; no launch.
        """
        size = size_of_shape(shape, self.clips)
        if seed is not None:
            seed = whole_number("seed", seed, "Leave it out for one from torch's generator.", most=2**64 - 1)
        return self._program_for(dtype).draw(size, next_seed() if seed is None else seed)

    def windows_read(self, shapes: Shapes) -> Windows | None:
        """Window of each image that the next call on a ragged batch reads, for a stage that makes the images.

        The seed is the one that a call would take: within a stage of a loader it follows from the position of the batch,
        elsewhere it is drawn from torch's global generator.

        Args:
            shapes: Sizes of the images, upright.

        Returns:
            The smallest window of each image that holds all pixels which any view reads. ``None``: the images are read whole,
            or the windows are not known before the pixels are.

        Cost:
            Host time alone: the draws of the first op. No launch.
        """
        seed = next_seed()
        if shapes.least < 1:
            return None
        heights, widths = shapes.sizes[:: shapes.frames or 1].T
        size = Size(len(heights), shapes.channels, heights, widths, shapes.frames)
        return self._program().windows(size, seed)

    def forward(self, *inputs: Any, data_keys: Sequence[Any] | None = None, draws: Draws | None = None) -> Any:
        """Augment a batch.

        Args:
            inputs: Images, and what follows them: masks, boxes, keypoints, labels, target dicts.
            data_keys: What each input is: Kornia's names, ``"targets"`` for a list of target dicts, ``"tv_tensors"`` for
                containers of torchvision's tensors, and ``"valid"`` for a mask of padded boxes. Left out: the pipeline's own,
                images alone by default, and ``"tv_tensors"`` for inputs behind these that hold any.
            draws: Draws to replay instead of drawing.

        Shape:
            - images: (B, C, H, W) uint8, uint16, int16 or floating; clips (B, T, C, H, W) of these; or a ragged batch of B
            - returns: (V · B, C, H', W') for V views, or (V · B, T, C, H', W'); it and the rest as a list where there is more
              than one input

        Raises:
            ArgumentTypeError: If an input is not what its key says.
            ArgumentError: If the inputs do not fit one another, or the draws; if images are larger than an op can count, or
                views may differ in size.
            DeviceError: If Triton cannot run on a GPU, and the environment variable ``GPUAUG_REQUIRE_TRITON`` is 1.

        Warns:
            GpuAugWarning: Once for each GPU on which Triton cannot run: plain torch does, about 50 times slower.

        Cost:
            The launches that ``explain`` lists and one pinned copy of some bytes a sample, with a launch where it is large; no
            synchronisation.
        """
        if autocasts():
            # It would multiply matrices in 16 bits, and refuses to join tensors of another 16-bit type.
            with without_autocast():
                return self._augmented(inputs, data_keys, draws)
        return self._augmented(inputs, data_keys, draws)

    def _augmented(self, inputs: tuple[Any, ...], data_keys: Sequence[Any] | None, draws: Draws | None) -> Any:
        alone = data_keys is None and len(inputs) == 1
        key = image_key(inputs[0]) if alone and draws is None else None
        inputs = inputs if alone or self.options.views == 1 else tuple(map(unpack_targets, inputs))
        if key is not None and (known_program := self._programs.get(inputs[0].dtype)) is not None:
            cached = known_program.cached.get(key)
            if cached is not None:
                return self._run_cached(known_program, cached, inputs[0])
        keys = ("input",) if alone else self._keys_of(inputs) if data_keys is None else keys_given(data_keys)
        targets = self._targets(inputs, keys)
        size, views = targets.size, self.options.views
        program = self._program(targets.dtype)
        program.check_type(ran=False)
        program.check_sizes(size)
        _check_targets(program, targets)
        self._seen[:] = ((size, targets.device, targets.dtype),)
        planned = program.segments.whole(size, masks=targets.has_masks, views=views)
        if key is not None and planned is not None and not planned.needs_own_batch:
            program.cache(key, planned, size)
        # Views share every pass where one plan runs all, and nothing but images is taken.
        together = views == 1 or (len(inputs) == 1 and planned is not None)
        draws_ahead = together and planned is not None and not planned.needs_own_batch
        seed = next_seed() if draws is None and not draws_ahead else None
        for _ in range(len(program.ops) + 1):
            if draws is not None:
                check_draws(draws, size, program.ops, views)
            view_draws = program.draw(size, seed) if seed is not None else draws
            try:
                if together:
                    result = self._run(program, targets, view_draws)
                else:
                    assert view_draws is not None
                    # Kornia's labels of a cut have an axis before that of the samples.
                    cut = self._soft is None and any(isinstance(op, CutMix) for op in program.mixes)
                    view_results = [self._run(program, self._targets(inputs, keys), view) for view in view_draws.views]
                    result = joined(view_results, targets.passed_keys, cut=cut)
                program.check_type(ran=True)
                return result
            except Retyped as retyped:
                returned = {**program.returned, retyped.number: retyped.dtype}
                program = Program(self.pipeline[0], self.options, targets.dtype, returned)
                self._programs[targets.dtype] = program
                targets = self._targets(inputs, keys)
        raise ArgumentTypeError(
            "pipeline must hold functions that give images of one type for images of one type, got one that changes it from "
            "call to call. Convert in it: image.float()."
        )

    def _run_cached(self, program: Program, cached: CachedPlan, images: Tensor) -> Tensor:
        plan, size = cached
        self._seen[:] = ((size, images.device, images.dtype),)
        views = self.options.views
        table = self._prefetch.table(plan, program.plain_ops, size, images.device, points=False, views=views)
        if images.ndim == 4:
            return dispatch.run(plan, images, table, program.dtype, self.memory_format)
        result = dispatch.run(plan, self.clips.images(images), table, program.dtype, self.memory_format)
        return self.clips.clips(result, plan.out.frames or images.shape[2 if self.clips.channels_first else 1])

    def _keys_of(self, inputs: tuple[Any, ...]) -> tuple[str, ...]:
        """Data keys of a call without any: the pipeline's own, and of torchvision's tensors behind those."""
        further = inputs[len(self._data_keys) :]
        return (*self._data_keys, *("tv_tensors" for value in further if holds_targets(value)))

    def _targets(self, inputs: Sequence[Any], keys: Sequence[Any]) -> Targets:
        return Targets(inputs, keys, self._extra_args, self.options.boxes, self._ending, self.clips)

    def explain(
        self, shape: Sequence[int] | Ragged | None = None, *, dtype: torch.dtype | None = None
    ) -> "explain.Explanation":
        """What became of each module: its pass, launches and bytes a batch, and why its library runs what it runs.

        Args:
            shape: (B, C, H, W) of the images, (B, T, C, H, W) of clips, or a ragged batch. Left out: that of the last call,
                else (256, 3, 256, 256).
            dtype: Type of the images. Left out: that of the last call, else uint8, or float32 where bytes are refused.

        Returns:
            A table to be printed.

        Raises:
            ArgumentError, ArgumentTypeError: If ``shape`` is not that of a batch of images, or ``dtype`` not a type of images.
        """
        known = Size(256, 3, *ANY_SIDES) if self.options.ragged else Size(256, 3, 256, 256)
        size = size_of_shape(shape, self.clips) if shape is not None else self._seen[0][0] if self._seen else known
        dtype = self._seen[0][2] if dtype is None and self._seen else dtype
        program = self._program_for(dtype)
        explanation = explain.explanation(
            program.segments,
            size,
            program.dtype,
            self._executor(),
            self.options.views,
            tuple(transforms_done(program.tree)),
            source_dtype=dtype or (torch.float32 if self._program().refuses else torch.uint8),
            plain_torch=plain_torch_reason(self._seen[0][1]) if self._seen else None,
        )
        crop = program.cropped_by
        note = f"{crop}: a DecodeStage in front decodes the window of each image that is read, and not the rest."
        return replace(explanation, notes=(*explanation.notes, note)) if crop else explanation

    def _executor(self) -> str:
        """What ran the last call; nothing before the first."""
        return dispatch.name(self._seen[0][1]) if self._seen else ""

    def _run(self, program: Program, targets: Targets, draws: Draws | None) -> Any:
        """Take everything through the pipeline, all views at once or one of them."""
        with torch.no_grad():
            if self._soft is not None:
                targets.soften(self._soft, program.mixes)
            planned = program.segments.whole(targets.size, masks=targets.has_masks, views=self.options.views)
            if planned is not None:
                views = None if draws is None else [of_all_parts(program.plain_ops, view._drawn) for view in draws.views]
                table = self._table(program, planned, targets, views)
                canvases = () if views is None else planned.canvases(targets.size, views)
                targets.run_plan(planned, table, canvases, program.dtype, self.memory_format)
            elif draws is not None:
                self._run_segments(program, targets, draws)
            return targets.results(keepdim=self._keepdim, views=self.options.views)

    def _table(self, program: Program, planned: Plan, targets: Targets, views: Sequence[dict[Op, OpDraws]] | None) -> Tensor:
        """The rows of all views for the plan that is the whole pipeline. ``views``: draws of each op, for each view."""
        ops, size, device, points = program.plain_ops, targets.size, targets.device, targets.has_points
        if views is None:
            return self._prefetch.table(planned, ops, size, device, targets.places, points=points, views=self.options.views)
        tables = [make_table(planned, size, drawn, device, points=points) for drawn in views]
        return torch.cat(tables) if len(tables) > 1 else tables[0]

    def _run_segments(self, program: Program, targets: Targets, draws: Draws) -> None:
        """Run one plan or module after the other."""
        size, points, segments = targets.size, targets.has_points, program.segments
        parts = segments.picked(draws._drawn)
        for number, (ops, all_drawn) in enumerate(parts):
            start = 0
            while start < len(ops):
                segment = segments.at(start, size, masks=targets.has_masks, ops=ops if segments.chooses else None)
                drawn = all_drawn[start : segment.stop]
                last = number == len(parts) - 1 and segment.stop == len(ops)
                form = (program.dtype, self.memory_format) if last else ()
                if segment.eager is not None:
                    assert isinstance(segment.eager, EagerOp)
                    self._warnings.when_run(segment.eager)
                    targets.run_eager(segment.eager, drawn[0], *form)
                    size = segment.eager.out_drawn(drawn[0], size)
                    if not last:
                        targets.check_size(segment.eager, size)
                elif segment.plan is not None:
                    of_parts = of_all_parts(segment.ops, drawn)
                    table = make_table(segment.plan, size, of_parts, targets.device, points=points)
                    targets.run_plan(segment.plan, table, segment.plan.canvases(size, [of_parts]), *form)
                    size = replace(size.to(segment.plan.out.height, segment.plan.out.width), frames=segment.plan.out.frames)
                start = segment.stop


def _check_targets(program: Program, targets: Targets) -> None:
    """Refuse targets that a mix or a crop by boxes cannot take along.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: If there are any.
    """
    for op in program.mixes:
        targets.check_mix(op)
    if program.box_crop is not None:
        records_of(program.box_crop, targets.values, targets.keys)
