"""The draws of one batch: kept, sent elsewhere, replayed, and told to Kornia."""

from dataclasses import dataclass, replace
from typing import Any

from kornia.augmentation.container.params import ParamItem

from gpuaug.errors import ArgumentError
from gpuaug.fuse.choices import Choice
from gpuaug.fuse.eager import EagerOp
from gpuaug.fuse.lower import Leaf, Tree, leaves
from gpuaug.fuse.mixes import MixOp
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

    shape: tuple[int, int, int | None, int | None]
    """(B, C, H, W) of the images drawn for; ``None`` for the sides of images that differ in size."""

    _tree: Tree
    _drawn: tuple[Drawn, ...]
    _sizes: tuple[Size, ...]
    _more: tuple["Draws", ...] = ()

    def __repr__(self) -> str:
        views = f", views={len(self.views)}" if self._more else ""
        return f"Draws(shape={self.shape}, modules={len(self._drawn)}{views})"

    @property
    def views(self) -> tuple["Draws", ...]:
        """The draws of each view, as a call for one view draws and replays them."""
        return (replace(self, _more=()), *self._more)

    def alone(self, index: int) -> "Draws":
        """The draws of one image, for a batch of that image alone.

        Raises:
            ArgumentError: If samples cannot be told apart: with several views, policies, mixes, or what Kornia draws.
        """
        if self._more:
            raise ArgumentError(f"draws must be those of one view, got {len(self.views)}. Take one: draws.views[0].")
        drawn = []
        for leaf, each in zip(leaves(self._tree), self._drawn, strict=True):
            if "params" in each or isinstance(leaf.op, Choice | MixOp):
                raise ArgumentError(
                    f"draws must be of modules that take every image by itself, got {leaf.op.name}. Replay the whole batch."
                )
            assert not isinstance(leaf.op, EagerOp)
            drawn.append(leaf.op.drawn_alone(each, index))
        sizes = tuple(size.of(index) for size in self._sizes)
        return Draws((1, sizes[0].channels, sizes[0].height, sizes[0].width), self._tree, tuple(drawn), sizes)

    def as_kornia(self) -> Any:
        """The same draws in Kornia's form: what the user's own pipeline takes as ``params=``.

        Returns:
            For a container a list of ``ParamItem``, for one augmentation a dict, for a sequence a list of dicts.

        Cost:
            Not for the training loop: noise fields are computed here, on the host, in full.

        Raises:
            ArgumentError: If they are of several views, or of images of different sizes, for which Kornia has no form.
        """
        if self._more:
            raise ArgumentError(
                f"draws must be those of one view, got {len(self.views)}. Take one: draws.views[0].as_kornia()."
            )
        if self._sizes and self._sizes[0].ragged:
            raise ArgumentError(
                "draws must be for images of one size in Kornia, got those of a ragged batch. "
                "Take one image: draws.alone(0).as_kornia()."
            )
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
