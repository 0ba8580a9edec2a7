"""``show``: draws samples of a loader before and after its stages."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpuaug.core.errors import whole_number
from gpuaug.core.plotting import INK, drawing, shortened, text_width_in
from gpuaug.loader.inspection import checked_loader
from gpuaug.loader.streamed_loader import StreamedLoader
from gpuaug.viewer.cells import Cell, Line, lines_of
from gpuaug.viewer.draw_annotations import draw_annotations
from gpuaug.viewer.follow import FollowedImages, count_of, follow
from gpuaug.viewer.trace import Trace, trace_batch

if TYPE_CHECKING:
    from gpuaug.core.figure import Figure

_MAX_COLUMNS = 8  # further samples are drawn in another block, below
_CELL_IN = {1: 3.6, 2: 3.0, 3: 2.6, 4: 2.3, 5: 2.0, 6: 1.9}  # number of columns -> width of a cell
_MIN_CELL_IN = 1.75  # width of a cell with more columns
_MAX_ASPECT = 1.5  # largest ratio of the height of a picture to the width of a cell
_MIN_HEIGHT_IN = 0.6  # the name of a line fits into this height
_GAP_IN = 0.12  # gap between pictures
_BLOCK_GAP_IN = 0.22  # additional gap between blocks
_MARGIN_IN = 0.12
_TITLE_PT, _LABEL_PT, _TEXT_PT = 9.5, 8.0, 6.8
_LINE = 1.32  # distance between lines of text, in font sizes
_SPACE = 0.32  # width of a space, in font sizes
_MAX_LINES = 8  # maximum number of lines of text about the draws of a sample
_GREY = "#6b7280"  # colour of notes


def show(loader: StreamedLoader, n: int = 8) -> "Figure":
    """Draw samples of a loader before and after its stages, with their annotations and random draws.

    A column shows one sample. The first picture is the sample from the wrapped loader. The pictures below it are the images
    that the training loop will get, one line per view and per member of the batch to which stages write images. Labels, boxes,
    masks and keypoints are drawn over the pictures if a stage has them in ``on`` with Kornia's data keys, or if they are in
    lists of target dicts. Below each picture are the random draws of ``gpuaug.fuse``. The batch is the first batch of the next
    iterator. Afterwards the loader is restored, as by ``gpuaug.profile``.

    A ``Normalize`` in a fused or Kornia pipeline is undone. Other images with values outside [0, 1] are rescaled, so that
    their 0.5 and 99.5 percentiles become 0 and 1, and get a note. Feature stages, and stages after them, do not run.

    Args:
        loader: The loader that the training loop iterates over.
        n: Number of samples to show, up to eight per row. A smaller batch is shown as a whole.

    Returns:
        A figure that is not registered with pyplot: a notebook displays it, and ``savefig`` writes it.

    Raises:
        ArgumentError, ArgumentTypeError: If ``loader`` or ``n`` cannot work, if the loader has no batch, or a batch without
            images, if the number of images after a stage is no multiple of the batch size, or if matplotlib is missing.
        Exception: Any error of the wrapped loader or a stage.

    Cost:
        Loads one batch, and copies it to the host after each stage, synchronously.

    Examples:
        >>> loader = StreamedLoader([torch.rand(4, 3, 8, 8)], [lambda images: images.flip(-1)], device="cpu")
        >>> len(show(loader, n=2).axes)
        4
    """
    loader = checked_loader(loader, "shown", "The argument is the loader that the training loop iterates over.")
    count = whole_number("n", n, "Leave it out for eight samples.", least=1)
    with drawing("samples"):
        trace = trace_batch(loader)
        followed = follow(trace)
        lines = lines_of(trace, followed, count, _classes(loader))
        return _figure(lines, _title(trace, followed, len(lines[0].cells)))


def _classes(loader: StreamedLoader) -> Any:
    """Return the names of the dataset's classes, or ``None``."""
    dataset: Any = getattr(loader.loader, "dataset", None)
    while not hasattr(dataset, "classes") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return getattr(dataset, "classes", None)


def _title(trace: Trace, followed: FollowedImages, count: int) -> str:
    """Return the title: number of samples, position of the batch, and the stages that are shown and left out."""
    position = trace.position
    size = count_of(followed.before[0].images[0])
    title = f"{count} of {size} samples in batch {position.batch} of epoch {position.epoch}"
    not_shown = (*followed.stages_without_images, *trace.skipped_stages)
    shown_stages = [stage.name for stage in trace.stages if stage.name not in not_shown]
    title += f", through {', '.join(shown_stages)}" if shown_stages else ""
    return f"{title}; left out: {', '.join(not_shown)}" if not_shown else title


def _figure(lines: Sequence[Line], title: str) -> "Figure":
    """Create the figure. Positions are computed here, in inches, because text is wrapped to the width of a cell."""
    from gpuaug.core.figure import Figure

    count = len(lines[0].cells)
    blocks = -(-count // _MAX_COLUMNS)  # rounded up
    columns = -(-count // blocks)
    cell_in = _CELL_IN.get(columns, _MIN_CELL_IN)
    left_in = _MARGIN_IN + 2 * _LINE * _TEXT_PT / 72 + _GAP_IN
    width_in = left_in + columns * (cell_in + _GAP_IN) - _GAP_IN + _MARGIN_IN
    heading = wrapped(title, _TITLE_PT, width_in - 2 * _MARGIN_IN)
    above_in = _MARGIN_IN + len(heading) * _LINE * _TITLE_PT / 72
    rows = []
    top = above_in + _GAP_IN / 2
    for start in range(0, count, columns):
        for line in lines:
            row = _CellRow(line, range(start, min(start + columns, count)), cell_in)
            rows.append((row, top))
            top += row.height_in + _GAP_IN
        top += _BLOCK_GAP_IN
    height_in = top - _BLOCK_GAP_IN - _GAP_IN + _MARGIN_IN
    figure = Figure(figsize=(width_in, height_in))
    figure.text(_MARGIN_IN / width_in, 1 - _MARGIN_IN / height_in, "\n".join(heading), va="top", fontsize=_TITLE_PT, color=INK,
                linespacing=_LINE, parse_math=False)  # fmt: skip
    for row, top in rows:
        row.draw(figure, left_in, top)
    return figure


class _CellRow:
    """Cells of a line that are drawn side by side."""

    def __init__(self, line: Line, samples: range, cell_in: float) -> None:
        self._name = line.name
        self._cells = [line.cells[sample] for sample in samples]
        self._cell_in = cell_in
        # If the notes of all cells are equal, the note is written once.
        notes = {cell.note for cell in line.cells}
        self._note = notes.pop() if len(notes) == 1 else ""
        self._notes = [[] if self._note else wrapped(cell.note, _TEXT_PT, cell_in) for cell in self._cells]
        self._draws = [_wrapped_draws(cell.draws, cell_in) for cell in self._cells]
        self._labels = [_label_text(cell, cell_in) for cell in self._cells]
        self._label_height_in = _LINE * _LABEL_PT / 72 if any(self._labels) else 0.0
        self._sizes_in = [self._size_in(cell) for cell in self._cells]
        self._picture_height_in = max(_MIN_HEIGHT_IN, *(height for _, height in self._sizes_in))
        text_lines = (len(notes) + len(draws) for notes, draws in zip(self._notes, self._draws, strict=True))
        heights_with_text = (
            height + (count * _LINE + 0.4) * _TEXT_PT / 72
            for (_, height), count in zip(self._sizes_in, text_lines, strict=True)
        )
        self.height_in = self._label_height_in + max(self._picture_height_in, *heights_with_text)

    def _size_in(self, cell: Cell) -> tuple[float, float]:
        """Return (width, height) of a cell's picture in inches."""
        height, width = cell.pixels.shape[:2]
        scale = self._cell_in * min(1 / width, _MAX_ASPECT / height)
        return width * scale, height * scale

    def draw(self, figure: "Figure", left_in: float, top_in: float) -> None:
        """Draw the cells into ``figure`` with the top left corner at (``left_in``, ``top_in``)."""
        width_in, height_in = figure.get_size_inches()

        def write(x: float, y: float, text: str, size: float, **style: Any) -> None:
            """Write text at (x, y), in inches from the top left corner of the figure."""
            if text:
                figure.text(x / width_in, 1 - y / height_in, text, fontsize=size, linespacing=_LINE, parse_math=False,
                            **{"color": INK, "va": "top", **style})  # fmt: skip

        top_in += self._label_height_in
        middle_in = top_in + self._picture_height_in / 2
        line_in = _LINE * _TEXT_PT / 72
        centred: dict[str, Any] = {"rotation": 90, "ha": "center", "va": "center"}
        name = shortened_to(self._name, _TEXT_PT + 0.7, 0.9 * self._picture_height_in)  # bold is wider
        write(_MARGIN_IN + line_in / 2, middle_in, name, _TEXT_PT + 0.7, weight="bold", **centred)
        note = shortened_to(self._note, _TEXT_PT, self._picture_height_in)
        write(_MARGIN_IN + 1.6 * line_in, middle_in, note, _TEXT_PT, **{**centred, "color": _GREY})
        for number, (cell, (across_in, down_in)) in enumerate(zip(self._cells, self._sizes_in, strict=True)):
            x = left_in + number * (self._cell_in + _GAP_IN)
            bottom = top_in + down_in
            write(x, top_in - 0.35 * _LABEL_PT / 72, self._labels[number], _LABEL_PT, va="baseline")
            axes = figure.add_axes((x / width_in, 1 - bottom / height_in, across_in / width_in, down_in / height_in))
            height, width = cell.pixels.shape[:2]
            axes.imshow(cell.pixels, cmap="gray", vmin=0, vmax=1, extent=(0, width, height, 0), aspect="auto")
            draw_annotations(axes, cell.overlay, (height, width), across_in)
            axes.set(xlim=(0, width), ylim=(height, 0))
            axes.axis("off")
            y = bottom + 0.4 * _TEXT_PT / 72
            notes = self._notes[number]
            write(x, y, "\n".join(notes), _TEXT_PT, color=_GREY)
            write(x, y + len(notes) * line_in, "\n".join(self._draws[number]), _TEXT_PT)


def _label_text(cell: Cell, room_in: float) -> str:
    """Return the text above a cell: index and label of the sample. Class names are shortened to fit into ``room_in`` inches."""
    number = str(cell.number) if cell.number >= 0 else ""
    longest = max((len(name) for name, _ in cell.label), default=0)
    for max_length in range(max(longest, 3), 2, -1):
        label = ", ".join(f"{shortened(name, max_length)}{share}" for name, share in cell.label)
        text = ": ".join(filter(None, (number, label)))
        if text_width_in(text, _LABEL_PT) <= room_in:
            break
    return text


def _wrapped_draws(draws: Sequence[str], room_in: float) -> list[str]:
    """Wrap the text about a sample's draws into at most ``_MAX_LINES`` lines."""
    lines = [line for draw in draws for line in wrapped(draw, _TEXT_PT, room_in, indent=3)]
    return lines if len(lines) <= _MAX_LINES else [*lines[: _MAX_LINES - 1], "…"]


def wrapped(text: str, size: float, room_in: float, indent: int = 0) -> list[str]:
    """Wrap ``text`` into lines of at most ``room_in`` inches. Lines after the first begin with ``indent`` spaces."""
    lines: list[str] = []
    room = room_in
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width_in(longer.lstrip(), size) <= room:
            lines[-1] = longer
            continue
        room = room_in - indent * _SPACE * size / 72 if lines else room_in
        lines.append(" " * (indent if lines else 0) + shortened_to(word, size, room))
    return lines


def shortened_to(text: str, size: float, room_in: float) -> str:
    """Shorten ``text`` in the middle until it is at most ``room_in`` inches wide."""
    for length in range(len(text), 1, -1):
        shorter = shortened(text, length)
        if text_width_in(shorter, size) <= room_in:
            return shorter
    return text[:1]
