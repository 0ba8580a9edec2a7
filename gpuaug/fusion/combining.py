"""Transforms that combine several images of a sample into one: the first transforms of a pipeline for ``gpuaug.fuse``.

A *target dict* holds the annotations of one image, such as ``{"boxes": …, "labels": …}``. The images that become one are a
*group*. The *canvas* is the resulting image.
"""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar

from torch import Tensor
from torchvision.transforms import v2

from gpuaug.core.errors import ArgumentError, ArgumentTypeError, shown, whole_number
from gpuaug.core.rng import next_seed
from gpuaug.fusion.combine_ops import CombineOp, CopyPasteOp, MixUpOp, MosaicOp
from gpuaug.fusion.forms.combine import Combination
from gpuaug.fusion.ops.sampler import Sampler


class _Combine(v2.Transform):  # type: ignore[misc]
    """Base class of the transforms, which runs them on a single sample, as in a dataset. ``fuse`` runs ``op_class`` instead."""

    op_class: ClassVar[type[CombineOp]]
    """Op that ``gpuaug.fuse`` runs for the transform."""

    def __init__(self, p: float, fill: float = 114) -> None:
        super().__init__()
        self.p = _number("p", p, 0, 1, "Pass the probability of the transform.")
        self.fill = _number("fill", fill, 0, 255, "Pass a grey value of bytes.")

    def forward(
        self,
        images: Sequence[Tensor],
        targets: Sequence[Mapping[str, Any]] | None = None,
        *,
        draws: Mapping[str, Mapping[str, float]] | None = None,
    ) -> Any:
        """Combine the images of one sample.

        Args:
            images: Images of the sample: as many as the transform combines into one, or a multiple for several results, which
                the next transform combines.
            targets: Target dicts, one per image, with boxes in XYXY.
            draws: Random parameters: the result of ``Draws.of`` for a fused pipeline that contains the transform. Default: new
                random parameters.

        Shape:
            - images: (C, H, W) each
            - returns: (C, H', W'); with ``targets`` (image, target dict); for several results, a list in place of each

        Raises:
            ArgumentTypeError: If ``images`` or ``targets`` are not sequences of tensors and dicts, or ``draws`` is not a dict.
            ArgumentError: If the number of images is not a multiple, or the numbers of images and target dicts differ.
        """
        name, count = type(self).__name__, self.op_class.count
        if not isinstance(images, list | tuple) or not images or len(images) % count:
            got = len(images) if isinstance(images, list | tuple) else shown(images)
            raise ArgumentError(
                f"images must be a list of {count} images, or a multiple, for {name}, got {got}. Pass all images of a sample."
            )
        for index, image in enumerate(images):
            if not isinstance(image, Tensor) or image.ndim != 3 or not image.numel():
                raise ArgumentTypeError(
                    f"images must be tensors (C, H, W) with pixels for {name}, got {shown(image)} at index {index}. "
                    "Convert other images: v2.functional.to_image(image)."
                )
        op = self.op_class(name, self)
        op.groups = len(images) // count
        # A batch of one sample: its images as batches of one image, and a list with its list of target dicts.
        inputs = [[image[None] for image in images], *([] if targets is None else [[targets]])]
        combination = Combination([op], inputs, None, "xyxy")
        if draws is None:
            op_draws = op.draw(Sampler((next_seed(),), 1, separate_generators=True), combination.size)
        else:
            op_draws = op.draws_of_numbers(_own_parameters(draws, name, op.groups))
        results = combination.run([op_draws])
        # List of images, and list of target dicts, one per group; for one group, the image and the target dict.
        lists = [[*results[0]], *(result.unpacked() for result in results[1:])]
        if op.groups == 1:
            lists = [values[0] for values in lists]
        return lists[0] if targets is None else tuple(lists)


class Mosaic(_Combine):
    """Put four images of a sample around a random centre, with their boxes, masks, keypoints and labels.

    Each image is resized to a longer side of ``size // 2``, with its aspect ratio, and touches the centre with a corner. The
    images are, in order: above left, above right, below left, below right. The centre is uniform in the middle half of each
    side of the canvas. Parts of images outside of the canvas are cut off. If the mosaic is not applied to a sample, its first
    image is resized to a longer side of ``size`` and centred, with its targets.

    The transform stands first in a ``Compose`` for ``gpuaug.fuse``, and also runs in a dataset. A sample holds a list of four
    images, and a list of four target dicts. A box with less than a tenth of its area on the canvas is not ``valid`` in the
    target dict.

    Args:
        size: Height and width of the result in pixels.
        fill: Value of pixels outside of all images, in [0, 255] for images of any dtype.
        p: Probability of the mosaic.

    Shape:
        - images: four images (C, H, W)
        - returns: (C, size, size), and the target dict

    Raises:
        ArgumentTypeError: If an argument is not a number.
        ArgumentError: If ``size`` is less than 4, or ``fill`` or ``p`` is out of range.

    Cost:
        Fused, one launch for the images of a batch, one for all masks, and two small ones for boxes.

    Source:
        The mosaics of YOLOX and Ultralytics, whose canvas is twice as high and wide as the training images.

    Examples:
        >>> images = [torch.zeros(3, 30, 40, dtype=torch.uint8) for _ in range(4)]
        >>> targets = [{"boxes": torch.tensor([[0.0, 0.0, 40.0, 30.0]]), "labels": torch.tensor([n])} for n in range(4)]
        >>> image, target = Mosaic(64)(images, targets)
        >>> image.shape, target["labels"].tolist()
        (torch.Size([3, 64, 64]), [0, 1, 2, 3])
    """

    op_class = MosaicOp

    def __init__(self, size: int, fill: float = 114, p: float = 1.0) -> None:
        super().__init__(p, fill)
        self.size = whole_number("size", size, "Pass the side of the canvas in pixels.", least=4, most=2**15)


class MixUpBoxes(_Combine):
    """Blend two images of a sample, and keep the boxes of both, with weights.

    The second image is resized to fit into the size of the first, with its aspect ratio, and centred on ``fill``. The weight of
    the first image is drawn from Beta(alpha, alpha); the second image has 1 minus this weight. The target dict gets a
    ``weight`` per box, the weight of its image; existing weights are multiplied by it. If MixUp is not applied to a sample, the
    result is the first image with its targets, with weights of 1.

    The transform stands first in a ``Compose`` for ``gpuaug.fuse``, or after a ``Mosaic`` or ``CopyPaste``, and also runs in a
    dataset. With a ``Mosaic`` before it, samples have eight images.

    Args:
        p: Probability of MixUp.
        alpha: Parameter of the beta distribution.
        fill: Value of pixels outside of the second image, in [0, 255] for images of any dtype.

    Shape:
        - images: two images (C, H, W)
        - returns: (C, H, W) of the first image, and the target dict

    Raises:
        ArgumentTypeError: If an argument is not a number.
        ArgumentError: If an argument is out of range.

    Cost:
        Fused, two launches for the images of a batch, one for all masks, and two small ones for boxes.

    Source:
        The MixUp of Ultralytics for detection, with alpha = 32.

    Examples:
        >>> images = [torch.full((3, 30, 40), 100.0), torch.full((3, 30, 40), 200.0)]
        >>> targets = [{"boxes": torch.zeros(n, 4)} for n in (1, 2)]
        >>> image, target = MixUpBoxes()(images, targets, draws={"MixUpBoxes": {"applies": 1.0, "weight": 0.75}})
        >>> image.mean().item(), target["weight"].tolist()
        (125.0, [0.75, 0.25, 0.25])
    """

    op_class = MixUpOp

    def __init__(self, p: float = 1.0, alpha: float = 32.0, fill: float = 114) -> None:
        super().__init__(p, fill)
        self.alpha = _number("alpha", alpha, 1e-3, 1e6, "Pass the parameter of the beta distribution.")


class CopyPaste(_Combine):
    """Paste objects of a second image on the first, by their masks.

    The second image is resized to fit into the size of the first, with its aspect ratio, and centred. Each of its objects is
    pasted with probability one half, with hard edges. Masks of the first image lose the pixels under pasted objects, and boxes
    become the rectangles around the masks. The target dict has the objects of both images. In its mask ``valid``, objects that
    are not pasted, and objects that lose more than nine tenths of their pixels, are False.

    The transform stands first in a ``Compose`` for ``gpuaug.fuse``, or after a ``Mosaic`` or ``MixUpBoxes``, and also runs in a
    dataset. With a ``Mosaic`` before it, samples have eight images.

    Args:
        p: Probability of pasting.

    Shape:
        - images: two images (C, H, W), with target dicts that have ``masks``, (n, H, W)
        - returns: (C, H, W) of the first image, and the target dict

    Raises:
        ArgumentTypeError: If ``p`` is not a number.
        ArgumentError: If ``p`` is not in [0, 1].

    Cost:
        Fused, two launches for the images of a batch, three for all masks, and about 20 small ones for boxes.

    Source:
        ``SimpleCopyPaste`` of torchvision's scripts, references/detection, without its blur and its random scale.

    Examples:
        >>> images = [torch.zeros(3, 4, 4), torch.ones(3, 4, 4)]
        >>> masks = torch.tensor([[[1, 1, 1, 1]] * 4, [[0, 0, 0, 1]] * 4], dtype=torch.bool)
        >>> targets = [{"masks": masks[:1], "boxes": torch.zeros(1, 4)}, {"masks": masks[1:], "boxes": torch.zeros(1, 4)}]
        >>> image, target = CopyPaste()(images, targets, draws={"CopyPaste": {"applies": 1.0, "seed": 3.0}})
        >>> image[0, 0].tolist(), target["boxes"].tolist()
        ([0.0, 0.0, 0.0, 1.0], [[0.0, 0.0, 3.0, 4.0], [3.0, 0.0, 4.0, 4.0]])
    """

    op_class = CopyPasteOp

    def __init__(self, p: float = 1.0) -> None:
        super().__init__(p)


def _number(name: str, value: object, least: float, most: float, advice: str) -> float:
    """Return the argument ``name`` as a float. ``advice``: last sentence of the error messages.

    Raises:
        ArgumentTypeError: If ``value`` is not a number.
        ArgumentError: If ``value`` is not in [least, most].
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be a number, got {shown(value)}. {advice}")
    if not least <= float(value) <= most:
        raise ArgumentError(f"{name} must be in [{least:g}, {most:g}], got {shown(value)}. {advice}")
    return float(value)


def _own_parameters(draws: Any, name: str, groups: int) -> dict[str, float]:
    """Return the random parameters of the module of class ``name`` with ``groups`` groups; an empty dict if it is not applied.

    ``draws`` has the parameters by name of the module, such as ``Mosaic`` or ``augment/Mosaic_0``. If a pipeline has several
    modules of the class, each has another number of groups.
    """
    if not isinstance(draws, Mapping) or not all(isinstance(numbers, Mapping) for numbers in draws.values()):
        raise ArgumentTypeError(f"draws must be the result of Draws.of, got {shown(draws)}. Pass draws.of(sample).")
    for key, numbers in draws.items():
        is_own = name in (key, key.rpartition("/")[2].rpartition("_")[0])
        if is_own and sum(number.startswith("applies") for number in numbers) == groups:
            return dict(numbers)
    return {}
