"""Choices: modules that pick other modules for every batch, and the few ops that stand for all their picks.

A choice is drawn like an op, and is then replaced by the ops that were picked. Picks of one kind share one op (``OneOf`` for
pointwise ops, ``AnyAffine`` for affine warps), so that the number of compiled kernels does not grow with the combinations.
"""

import copy
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from kornia.augmentation.container.params import ParamItem
from torch import nn

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops.base import Array, Op, OpDraws, PointOp, Size
from gpuaug.fusion.ops.fallback import EagerKornia, EagerOp
from gpuaug.fusion.ops.geometry import IndexMap, IndexOp, WarpOp
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.policies.one_of import AnyAffine, OneOf

Pick = Literal["batch", "sample"]


@dataclass(frozen=True, slots=True)
class Member:
    """A module that may be picked. ``operation``: Kornia's wrapper with its magnitude, or ``None``."""

    name: str
    op: Op | EagerOp
    operation: Any = None


@dataclass(frozen=True, slots=True)
class Child:
    """The unit that is picked: one module, or several that run one after the other."""

    name: str
    members: tuple[Member, ...]
    is_container: bool


class Entry(NamedTuple):
    """The draws of one picked member, for the samples in ``where``, (B,) bool; ``None``: all."""

    child: int
    position: int
    drawn: OpDraws
    size: Size
    where: Array | None

    @property
    def apply_mask(self) -> Array:
        """Mask of the samples that it runs for, bool, (B,)."""
        apply_mask: Array = self.drawn["apply_mask"]
        return apply_mask if self.where is None else apply_mask & self.where


class Step(NamedTuple):
    """An op that runs for a batch.

    One that ``begins`` starts a plan, so that its kernel does not depend on the ops before it: there is one kernel for each
    kind of op, not for each order. A ``OneOf`` joins the pass before it.
    """

    op: Op | EagerOp
    drawn: OpDraws
    begins: bool


class Nothing(IndexOp):
    """The op that runs if no other was picked: the identity."""

    words = "nothing"

    def map(self, drawn: OpDraws, size: Size) -> IndexMap:
        """The identity."""
        return IndexMap()


class Picking(Op):
    """A module that picks among its children. What it draws has ``"layers"``, tuples of entries, run one after the other."""

    children: tuple[Child, ...]


class Choice(Picking):
    """A module whose picks decide anew for every batch what runs."""

    needs_own_batch = True

    def __init__(self, name: str, module: nn.Module, children: Sequence[Child], pick: Pick) -> None:
        super().__init__(name, module)
        self.children = tuple(children)
        self.pick = pick
        self._members = [member for child in children for member in child.members]
        self._points = [member.op for member in self._members if isinstance(member.op, PointOp) and OneOf.takes(member.op)]
        self._made: dict[Any, Op] = {}
        self._eager: dict[tuple[int, int], EagerKornia] = {}

    @property
    def ops(self) -> tuple[Op | EagerOp, ...]:
        """All ops that it may pick."""
        return tuple(member.op for member in self._members)

    @property
    def keepdim(self) -> bool:
        """True if a single image, (C, H, W), comes out as one for every pick, as in Kornia."""
        return all(getattr(member.op.module, "keepdim", False) for member in self._members)

    def number(self, sampler: Sampler) -> float:
        """One uniform number in [0, 1) for the batch, which may be empty."""
        return sampler.integer(0, 2**53) / 2**53

    @abstractmethod
    def picks(self, sampler: Sampler) -> list[int]:
        """Indices of the children that run for the batch, in order."""

    def picks_of_samples(self, sampler: Sampler) -> Array:
        """Indices of the children that run for each sample, in order: (picks, B)."""
        raise NotImplementedError

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Pick children and draw for them: ``"layers"``, tuples of entries, run one after the other."""
        if self.pick == "sample":
            return {"layers": tuple(self._layers(sampler, size)), "end": size}
        layers, picked = [], self.picks(sampler)
        for child in picked:
            for position in range(len(self.children[child].members)):
                entry = Entry(child, position, self.draw_member(child, position, sampler, size), size, None)
                size = self._after(entry)
                layers.append((entry,))
        return {"layers": tuple(layers), "picks": tuple(picked), "end": size}

    def _layers(self, sampler: Sampler, size: Size) -> Iterator[tuple[Entry, ...]]:
        for row in self.picks_of_samples(sampler):
            children = np.unique(row).tolist()
            for position in range(max((len(self.children[child].members) for child in children), default=0)):
                there = [child for child in children if position < len(self.children[child].members)]
                yield tuple(
                    Entry(child, position, self.draw_member(child, position, sampler, size), size, row == child)
                    for child in there
                )

    def draw_member(self, child: int, position: int, sampler: Sampler, size: Size) -> OpDraws:
        """The draws of one member for the batch."""
        op = self.children[child].members[position].op
        if isinstance(op, EagerOp) or op.unsupported_size(size) is not None:
            return self._left(child, position, size).draw(sampler, size)
        return op.draw(sampler, size)

    def _after(self, entry: Entry) -> Size:
        if "params" in entry.drawn:
            return self._left(entry.child, entry.position, entry.size).out_drawn(entry.drawn, entry.size)
        return self._op(entry).out(entry.size)

    def out_drawn(self, drawn: OpDraws, size: Size) -> Size:
        """The output size for these draws."""
        end: Size = drawn["end"]
        return end

    def steps(self, drawn: OpDraws) -> list[Step]:
        """The ops that run for a batch, in order."""
        made: list[Step] = []
        seen: Counter[Any] = Counter()
        for layer in drawn["layers"]:
            kinds: dict[tuple[Any, ...], list[Entry]] = {}
            for entry in layer:
                kinds.setdefault(self._kind(entry), []).append(entry)
            # A sample runs one op of a layer, so their order is free: pointwise ones join the pass of what ran before.
            for kind, entries in sorted(kinds.items(), key=lambda item: item[0] != POINT):
                step = self._left_step(entries[0]) if kind[0] == "kornia" else self._step(kind, entries, seen[kind])
                if step is not None:
                    made.append(step)
                    seen[kind] += 1
        return made

    def _kind(self, entry: Entry) -> tuple[Any, ...]:
        member = self.children[entry.child].members[entry.position]
        op = member.op
        if isinstance(op, EagerOp) or op.unsupported_size(entry.size) is not None:
            return "kornia", entry.child, entry.position
        if member.operation is not None or (isinstance(op, PointOp) and OneOf.takes(op)):
            return kind_of(op)
        return "own", entry.child, entry.position

    def _step(self, kind: tuple[Any, ...], entries: Sequence[Entry], occurrence: int) -> Step | None:
        op, size = self._op(entries[0]), entries[0].size
        apply_mask = any_applies(entries)
        if not apply_mask.any() and op.out(size) == size:
            return None
        made = self._made.get((*kind, occurrence))
        if made is None:
            if kind == POINT:
                made = OneOf(self.name, self._points)
            elif kind[0] == "affine":
                assert isinstance(op, WarpOp)
                made = AnyAffine(self.name, op)
            else:
                # An op may run twice, and a plan tells ops apart.
                made = copy.copy(op)
                if kind[0] != "own":
                    # It stands for all ops of its kind. With p below 1 its apply mask is read.
                    made.p = 0.5
            self._made[*kind, occurrence] = made
        drawn: OpDraws
        if isinstance(made, OneOf | AnyAffine):
            drawn = {"apply_mask": apply_mask, "parts": [(self._op(entry), entry.drawn, entry.where) for entry in entries]}
        else:
            drawn = dict(entries[0].drawn)
            for entry in entries[1:]:
                assert entry.where is not None, "several entries only where samples pick for themselves"
                drawn = {name: np.where(entry.where, entry.drawn[name], values) for name, values in drawn.items()}
            drawn["apply_mask"] = apply_mask
        return Step(made, drawn, kind != POINT or occurrence % _TOGETHER == 0 < occurrence)

    def _left_step(self, entry: Entry) -> Step | None:
        eager, drawn = self._left(entry.child, entry.position, entry.size), entry.drawn
        if "params" not in drawn:
            if not entry.apply_mask.any():
                return None
            data = self._op(entry).params({**drawn, "apply_mask": entry.apply_mask}, entry.size)
            drawn = {"params": [ParamItem(eager.child_name, data)], "key": 0}
        return Step(eager, drawn, begins=True)

    def _op(self, entry: Entry) -> Op:
        op = self.children[entry.child].members[entry.position].op
        assert isinstance(op, Op)
        return op

    def _left(self, child: int, position: int, size: Size) -> EagerKornia:
        member = self.children[child].members[position]
        op = member.op
        if isinstance(op, EagerKornia):
            return op
        assert isinstance(op, Op)
        found = self._eager.get((child, position))
        if found is None:
            module = op.module
            if member.operation is not None:
                # With p = 1 the apply mask would not be read, and it holds the pick here.
                module = copy.copy(module)
                module.p = 0.5  # type: ignore[assignment]
            found = self._eager[child, position] = EagerKornia(op.name, module, op.unsupported_size(size) or "", op)
        return found

    def params(self, drawn: OpDraws, size: Size) -> Any:
        """The draws in the form that Kornia's module takes as ``params=``.

        Raises:
            ArgumentError: If each sample picked its own.
        """
        if self.pick == "sample":
            raise no_form_in_kornia(self.name)
        layers = iter(drawn["layers"])

        def form(child: Child) -> ParamItem:
            made = [ParamItem(member.name, self._data(next(layers)[0])) for member in child.members]
            return ParamItem(child.name, made if child.is_container else made[0].data)

        return [form(self.children[index]) for index in drawn["picks"]]

    def _data(self, entry: Entry) -> Any:
        return entry.drawn["params"][0].data if "params" in entry.drawn else self._op(entry).params(entry.drawn, entry.size)

    @property
    @abstractmethod
    def most(self) -> int:
        """Largest number of members that run for a batch."""

    @property
    @abstractmethod
    def how_many(self) -> str:
        """Number of children that run, in words."""

    def describe(self) -> str:
        """A few words for ``explain()``: the number of picks, and all ops that may be picked."""
        words = dict.fromkeys(_words(member.op) for member in self._members)
        return f"for each {self.pick} {self.how_many} of {', '.join(words)}"

    def left(self, size: Size) -> list[str]:
        """Descriptions of the members that Kornia runs for images of this size."""
        ops = [member.op for member in self._members]
        return list(dict.fromkeys(_words(op) for op in ops if isinstance(op, EagerOp) or op.unsupported_size(size) is not None))

    def always_left(self) -> tuple[EagerOp, ...]:
        """The ops that Kornia runs for images of any size."""
        return tuple(op for op in self.ops if isinstance(op, EagerOp))

    def most_launches(self, size: Size) -> int | None:
        """Largest number of kernels launched; ``None`` if Kornia may run a member."""
        if self.left(size):
            return None
        each: dict[Any, int] = {}
        for member in self._members:
            assert isinstance(member.op, Op)
            kind = kind_of(member.op)
            each[kind] = max(each.get(kind, 0), member.op.launches)
        return self.most * (max(each.values(), default=0) if self.pick == "batch" else sum(each.values()))


def no_form_in_kornia(name: str) -> ArgumentError:
    """The error if Kornia's form is asked of draws that were picked for each sample."""
    return ArgumentError(
        f"pick must be 'batch' for draws to have Kornia's form, got 'sample': {name} of Kornia picks once for all "
        "samples. Fuse with pick='batch' to compare the two."
    )


POINT = ("point",)
_TOGETHER = 4
"""Largest number of ``OneOf`` ops in one kernel. Each adds the code of all its ops."""


def kind_of(op: Op) -> tuple[Any, ...]:
    """What is the same for ops that one op can stand for."""
    if isinstance(op, PointOp) and OneOf.takes(op):
        return POINT
    return ("affine", op.edge, op.nearest) if isinstance(op, WarpOp) and op.kind == "affine" else (type(op),)


def _words(op: Op | EagerOp) -> str:
    return op.name if isinstance(op, EagerOp) else op.describe()


def any_applies(entries: Sequence[Entry]) -> Array:
    """Mask of the samples that any of the entries runs for, bool, (B,)."""
    apply_mask = entries[0].apply_mask
    for entry in entries[1:]:
        apply_mask = apply_mask | entry.apply_mask
    return apply_mask
