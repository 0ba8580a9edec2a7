"""Random parameters of one batch, to read, replay and convert for Kornia and torchvision.

A *draw* is a random number or set of random parameters. An *op* replaces one module of the pipeline. ``OpDraws`` are the draws
of one op for all samples, by name. A *fallback module* has no op: its library runs it, with generators that are seeded by the
draw ``"key"``. A *sample* is an image or a clip. *Views* are several random augmentations of the same images. A *policy*, such
as RandAugment, picks other ops at random, per sample or once for all samples. A *mix* blends images of a batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from kornia.augmentation.container.params import ParamItem
from torch import Tensor

from gpuaug.core.errors import ArgumentError, ArgumentTypeError, shown, whole_number
from gpuaug.fusion.lower.tree import ImplicitTransform, Leaf, Tree, leaves, nodes_in_order
from gpuaug.fusion.ops.base import Op, OpDraws, Size
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.ops.mix import MixOp
from gpuaug.fusion.policies.picking import Picking


@dataclass(frozen=True)
class Draws:
    """Random parameters of one batch, returned by ``gpuaug.Fused.draw``. They can be pickled and replayed.

    Examples:
        >>> import kornia.augmentation as K
        >>> pipeline = K.AugmentationSequential(K.RandomHorizontalFlip(), K.RandomInvert())
        >>> augment, images = fuse(pipeline), torch.rand(2, 3, 4, 4)
        >>> draws = augment.draw(images.shape)
        >>> torch.equal(augment(images, draws=draws), pipeline(images, params=draws.as_kornia()))
        True
    """

    shape: tuple[int | None, ...]
    """(B, C, H, W) of the images, or (B, T, C, H, W) of clips; ``None`` for the sides of images that differ in size."""

    _tree: Tree
    """Tree of the pipeline's containers, with its ops and fallback modules as leaves."""
    _drawn: tuple[OpDraws, ...]
    """Draws of each op and fallback module, in order."""
    _sizes: tuple[Size, ...]
    """Size of the input images of each op and fallback module."""
    _more: tuple["Draws", ...] = ()
    """Draws of the second and later views."""

    def __repr__(self) -> str:
        views = f", views={len(self.views)}" if self._more else ""
        return f"Draws(shape={self.shape}, modules={len(self._drawn)}{views})"

    @property
    def views(self) -> tuple["Draws", ...]:
        """Draws per view. The draws of a view can be replayed by the same pipeline fused with ``views=1``."""
        return (replace(self, _more=()), *self._more)

    def __len__(self) -> int:
        """Number of samples, counted once per view."""
        return len(self.views) * self._sizes[0].batch

    def of(self, sample: int) -> dict[str, dict[str, float]]:
        """Return the random parameters of one sample, by module, in order of execution.

        Modules that are not applied to the sample are omitted. A module that draws only whether it is applied has an empty
        dict. The names of the containers and policies around a module precede its name, separated by ``/``.

        Args:
            sample: Index of the sample, from 0. With several views, sample ``b`` of view ``v`` has index ``v · B + b``.

        Returns:
            Parameter values by name, per module.

        Raises:
            ArgumentError, ArgumentTypeError: If ``sample`` is not a valid index.

        Examples:
            >>> import kornia.augmentation as K
            >>> draws = fuse([K.RandomRotation(30.0, p=1.0), K.RandomInvert(p=0.0)]).draw((2, 3, 8, 8), seed=0)
            >>> {name: list(numbers) for name, numbers in draws.of(1).items()}
            {'RandomRotation_0': ['degrees']}
        """
        sample = whole_number("sample", sample, "Count samples from 0.", least=None)
        if not 0 <= sample < len(self):
            raise ArgumentError(f"sample must be the index of a drawn sample, got {sample} of {len(self)}. Count them from 0.")
        if self._more:
            view, index = divmod(sample, self._sizes[0].batch)
            return self.views[view].of(index)
        draws = iter(self._drawn)

        def entries(tree: Tree, path: str) -> Iterator[tuple[str, dict[str, float]]]:
            """Yield (name with the path of its containers, parameters) of each module."""
            name = f"{path}/{tree.name}" if path and tree.name else path or tree.name
            if isinstance(tree, Leaf):
                yield from _parameters(name, tree.op, next(draws), sample)
            elif not isinstance(tree, ImplicitTransform):
                for item in tree.items:
                    yield from entries(item, name)

        result: dict[str, dict[str, float]] = {}
        for name, numbers in entries(self._tree, ""):
            # A policy may pick a module twice. The second entry gets the suffix " (2)".
            count = sum(earlier_name.split(" ")[0] == name for earlier_name in result)
            result[f"{name} ({count + 1})" if count else name] = numbers
        return result

    def as_kornia(self) -> Any:
        """Convert the draws to the argument ``params`` of the unfused Kornia pipeline.

        Returns:
            A list of ``ParamItem`` for a container, a dict for a single augmentation, a list of these for a plain sequence.

        Cost:
            Too slow for a training loop: noise is computed for all pixels, on the host.

        Raises:
            ArgumentError: For several views, for modules of torchvision, for images that differ in size, or for policies that
                pick per sample. Kornia supports neither of the last two.
        """
        if self._more:
            raise ArgumentError(
                f"draws must be of one view, got {len(self.views)} views. Take one: draws.views[0].as_kornia()."
            )
        if self._sizes and self._sizes[0].ragged:
            raise ArgumentError(
                "draws must be for images of one size in Kornia, got draws for a ragged batch. Use draws.of(sample) instead."
            )
        other_module = next((leaf.name for leaf in leaves(self._tree) if leaf.op.package != "Kornia"), None)
        if other_module is not None:
            raise ArgumentError(
                f"draws must be of Kornia's modules only for as_kornia(), got {other_module} of torchvision. "
                "Use draws.of(sample) instead."
            )
        drawn_sizes = iter(zip(self._drawn, self._sizes, strict=True))

        def kornia_form(tree: Tree) -> Any:
            """Return the draws of a module, or a list with the draws per item of a container or sequence, in Kornia's format.

            Raises:
                ArgumentError: For a policy that picks per sample.
            """
            assert not isinstance(tree, ImplicitTransform)
            if isinstance(tree, Leaf):
                op_draws, size = next(drawn_sizes)
                # A fallback module: the draws were drawn by Kornia, in its format.
                if "params" in op_draws:
                    return op_draws["params"][0].data
                assert not isinstance(tree.op, EagerOp)
                if isinstance(tree.op, Picking) and tree.op.pick == "sample":
                    raise ArgumentError(
                        f"pick must be 'batch' for as_kornia(), got 'sample': Kornia's {tree.op.name} picks once for all "
                        "samples. Fuse with pick='batch' to compare the results."
                    )
                return _for_frames(tree.op.params(op_draws, size), size)
            if tree.is_container:
                return [ParamItem(item.name, kornia_form(item)) for item in tree.items]
            return [kornia_form(item) for item in tree.items]

        return kornia_form(self._tree)

    def as_torchvision(self) -> list[list[tuple[str, dict[str, Any]]]]:
        """Convert the draws to calls of ``torchvision.transforms.v2.functional``.

        Returns:
            Per sample, a list of (function name, keyword arguments) in order. The first argument, the image, is not included.
            ``Mosaic``, ``MixUpBoxes`` and ``CopyPaste`` have no calls. To get their result, call the module itself, with
            ``draws=draws.of(sample)``. ``AugMix`` has one entry, ``"augmix"``, which is not a function of torchvision. Its
            argument ``chains`` holds the calls of each chain; ``weights`` holds the weight of the input image, then the weight
            of the result of each chain. The result of AugMix is the weighted sum of these images, truncated to uint8.

        Raises:
            ArgumentError: For several views, for modules of Kornia, for mixes, and for fallback modules.

        Examples:
            >>> from torchvision.transforms import v2
            >>> from torchvision.transforms.v2 import functional
            >>> augment, images = fuse(v2.Compose([v2.RandomHorizontalFlip(), v2.RandomInvert()])), torch.rand(2, 3, 4, 4)
            >>> draws = augment.draw(images.shape)
            >>> expected = list(images)
            >>> for index, calls in enumerate(draws.as_torchvision()):
            ...     for name, arguments in calls:
            ...         expected[index] = getattr(functional, name)(expected[index], **arguments)
            >>> torch.equal(augment(images, draws=draws), torch.stack(expected))
            True
        """
        if self._more:
            raise ArgumentError(
                f"draws must be of one view, got {len(self.views)} views. Take one: draws.views[0].as_torchvision()."
            )
        drawn_sizes = tuple(zip(self._drawn, self._sizes, strict=True))
        return [list(_calls(self._tree, drawn_sizes, sample)) for sample in range(len(self))]


def _calls(tree: Tree, drawn_sizes: Iterable[tuple[OpDraws, Size]], sample: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (function name, keyword arguments) of the calls for one sample, as in ``Draws.as_torchvision``.

    ``drawn_sizes``: (draws, size of the input images) of each leaf, in order.
    """
    remaining = iter(drawn_sizes)
    for item in nodes_in_order(tree):
        if isinstance(item, ImplicitTransform):
            yield from item.calls
            continue
        op_draws, size = next(remaining)
        calls = getattr(item.op, "calls", None)
        if calls is None or "key" in op_draws:
            detail = f"which {item.op.package} runs" if "key" in op_draws else f"a module of {item.op.package}"
            detail = "which mixes images" if isinstance(item.op, MixOp) else detail
            raise ArgumentError(
                f"draws must be of fused torchvision transforms for as_torchvision(), got {item.name}, {detail}. "
                "Use draws.of(sample) instead."
            )
        if op_draws["apply_mask"][sample]:
            yield from calls(op_draws, sample, size)


def check_draws(draws: Draws, size: Size, ops: Sequence[Op | EagerOp], views: int) -> None:
    """Raise an error for draws that a call cannot replay.

    Args:
        draws: Draws to replay.
        size: Size of the images of the call.
        ops: Ops of the pipeline, for images of the call's type.
        views: Number of views of the pipeline.

    Raises:
        ArgumentTypeError: If ``draws`` is not a ``Draws``.
        ArgumentError: If the draws are for other images, another pipeline or another number of views.
    """
    if not isinstance(draws, Draws):
        raise ArgumentTypeError(
            f"draws must be a result of draw() of this module, got {shown(draws)}. "
            "The result of as_kornia() is for Kornia's own pipeline: pipeline(images, params=…)."
        )
    if draws._sizes[0] != size:
        raise ArgumentError(
            f"draws must be for images of the same shape, got draws for {draws.shape} and images of "
            f"{size.shape}. Draw with the images' own shape."
        )
    if len(draws._drawn) != len(ops):
        raise ArgumentError(
            f"draws must come from the same pipeline, got draws of {len(draws._drawn)} modules for {len(ops)}. "
            "Draw with this module."
        )
    for leaf, op in zip(leaves(draws._tree), ops, strict=True):
        if type(leaf.op) is not type(op):
            raise ArgumentError(
                f"draws must come from the same pipeline, for images of the same type, got draws of another op for {op.name}. "
                "Draw with this module, for this type: draw(images.shape, dtype=images.dtype)."
            )
    if len(draws.views) != views:
        raise ArgumentError(
            f"draws must be for {views} views, got draws for {len(draws.views)}. Draw with this module, or replay one view "
            "with the pipeline fused with views=1."
        )


def _parameters(name: str, op: Op | EagerOp, op_draws: OpDraws, sample: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield (name, parameters) of the module ``name`` for one sample, or of the modules that were picked if it is a policy."""
    if isinstance(op, Picking) and "layers" in op_draws:
        if op_draws["apply_mask"][sample] and (numbers := op.numbers(op_draws, sample)):
            yield name, numbers
        # A layer holds the draws of the k-th op of each choice of the policy, by index of the choice.
        for layer_index, layer in enumerate(op_draws["layers"]):
            for index, picked_op in op.layer(layer_index).items():
                if index in layer and layer[index]["apply_mask"][sample]:
                    yield from _parameters(f"{name}/{picked_op.name}", picked_op, layer[index], sample)
    elif "params" in op_draws:
        # Drawn by Kornia, and repeated for the frames of a clip. The index is of the first frame.
        yield from _kornia_parameters(name, op_draws["params"][0].data, sample * max(op_draws["frames"], 1))
    elif op_draws["apply_mask"][sample]:
        yield name, op.numbers(op_draws, sample) if isinstance(op, Op) and "key" not in op_draws else {}


_OMITTED_PARAMETERS = ("batch_prob", "forward_input_shape", "order")
"""Parameters of Kornia that ``Draws.of`` omits."""


def _kornia_parameters(name: str, data: Any, sample: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield (name, parameters) of a fallback module of Kornia, or of each module in it, for one sample.

    Only parameters with one number per sample are included.

    Args:
        name: Name of the module.
        data: Kornia's parameters: a dict of a module; a list of ``ParamItem``, or ``None``, of a container.
        sample: Index along the first axis of the parameters.
    """
    if not isinstance(data, dict):
        for item in data or ():
            yield from _kornia_parameters(f"{name}/{item.name}", item.data, sample)
        return
    apply_mask = data["batch_prob"] > 0.5
    if bool(apply_mask[sample]):
        parameters = {key: value for key, value in data.items() if key not in _OMITTED_PARAMETERS and isinstance(value, Tensor)}
        yield name, {key: float(value[sample]) for key, value in parameters.items() if value.shape == apply_mask.shape}


_NOT_PER_FRAME = ("order", "forward_input_shape", "image_shape", "gaussian_noise", "mask_salt", "mask_pepper", "gradient")
"""Names of Kornia's parameters that are not repeated for the frames of a clip.

They have one value for all clips, or ``Op.params`` returns one value per frame already.
"""

_BATCH_INDICES = ("mixup_pairs", "mix_pairs", "batch_idx")
"""Names of Kornia's parameters that are indices of samples in the batch."""


def _for_frames(params: Any, size: Size) -> Any:
    """Return parameters in Kornia's format, repeated for the T frames of each clip, as ``VideoSequential`` expects them.

    Args:
        params: Parameters per clip, of a module (dict) or a container (list of ``ParamItem``).
        size: Size of the clips. For images, ``params`` is returned unchanged.
    """
    if not size.frames:
        return params
    if isinstance(params, list):
        return [ParamItem(item.name, _for_frames(item.data, size)) for item in params]
    if not isinstance(params, dict):
        return params
    result = {}
    for name, value in params.items():
        axis = 1 if name in ("crop_src", "mix_pairs") else 0  # axis of the clips
        repeated = value if name in _NOT_PER_FRAME else value.repeat_interleave(size.frames, axis)
        is_mosaic = name == "permutation" and "src" in params  # indices of samples; in a jigsaw, of tiles
        if name in _BATCH_INDICES or is_mosaic:
            # Index of a clip → index of its frame in the batch of all frames.
            frame = torch.arange(size.frames, device="cpu").repeat(size.batch)
            repeated = repeated * size.frames + (frame[:, None] if name in ("batch_idx", "permutation") else frame)
        result[name] = repeated
    return result
