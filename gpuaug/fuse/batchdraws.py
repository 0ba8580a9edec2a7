"""The draws of one batch: kept, sent elsewhere, replayed, and told to Kornia."""

from dataclasses import dataclass
from typing import Any

from kornia.augmentation.container.params import ParamItem

from gpuaug.fuse.eager import EagerOp
from gpuaug.fuse.lower import Leaf, Tree
from gpuaug.fuse.ops import Drawn, Size


@dataclass(frozen=True)
class Draws:
    """What was drawn for one batch, by :meth:`gpuaug.fuse.Fused.draw`. It can be pickled and replayed.

    Examples:
        >>> import kornia.augmentation as K
        >>> pipeline = K.AugmentationSequential(K.RandomHorizontalFlip(), K.RandomInvert())
        >>> augment, images = fuse(pipeline), torch.rand(2, 3, 4, 4)
        >>> draws = augment.draw(images.shape)
        >>> torch.equal(augment(images, draws=draws), pipeline(images, params=draws.as_kornia()))
        True
    """

    shape: tuple[int, int, int, int]
    """(B, C, H, W) of the images drawn for."""

    _tree: Tree
    _drawn: tuple[Drawn, ...]
    _sizes: tuple[Size, ...]

    def __repr__(self) -> str:
        return f"Draws(shape={self.shape}, modules={len(self._drawn)})"

    def as_kornia(self) -> Any:
        """The same draws in Kornia's form: what the user's own pipeline takes as ``params=``.

        Returns:
            For a container a list of ``ParamItem``, for one augmentation a dict, for a sequence a list of dicts.

        Cost:
            Not for the training loop: noise fields are computed here, on the host, in full.
        """
        each = iter(zip(self._drawn, self._sizes, strict=True))

        def form(tree: Tree) -> Any:
            if isinstance(tree, Leaf):
                drawn, size = next(each)
                # An op that refused images of this size was drawn for by Kornia itself.
                if "params" in drawn:
                    return drawn["params"][0].data
                assert not isinstance(tree.op, EagerOp)
                return tree.op.params(drawn, size)
            if tree.is_container:
                return [ParamItem(item.name, form(item)) for item in tree.items]
            return [form(item) for item in tree.items]

        return form(self._tree)
