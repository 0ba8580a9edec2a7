"""What can be read off a figure of ``show``."""

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from support.comparison.values import assert_values
from torch.utils.data import DataLoader, Dataset

from gpuaug import StreamedLoader

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


class Squares(Dataset):
    """Images that differ in every pixel, with their index as the label."""

    def __init__(self, count=12, side=12, classes=None):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)
        if classes:
            self.classes = classes

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], index


def loader(stages=(), count=12, batch=4, classes=None, seed=3, device="cpu", **settings):
    return StreamedLoader(DataLoader(Squares(count, classes=classes), batch, **settings), stages, seed=seed, device=device)


def of(batch, *stages, **settings):
    """A loader of one batch."""
    return StreamedLoader([batch], stages, device="cpu", seed=3, **settings)


def pixels(figure):
    """The pictures from left to right and from top to bottom, each (C, H, W) or (H, W)."""
    found = [np.asarray(axes.images[0].get_array()) for axes in figure.axes]
    return [torch.from_numpy(np.ascontiguousarray(each)) for each in found]


def channels_first(picture):
    return picture.permute(2, 0, 1) if picture.ndim == 3 else picture[None]


def texts(figure):
    """All that is written beside pictures, the title first."""
    return [text.get_text() for text in figure.texts]


def beside(figure):
    """What is written at the left of the lines, bold: their names."""
    return [text.get_text() for text in figure.texts if text.get_rotation() == 90 and text.get_weight() == "bold"]


def beneath(figure):
    """What is written beneath the pictures in ink."""
    return [text.get_text() for text in figure.texts[1:] if text.get_va() == "top" and text.get_color() != "#6b7280"]


def notes(figure):
    """What is written in grey."""
    return [text.get_text() for text in figure.texts if text.get_color() == "#6b7280"]


def above(figure):
    return [text.get_text() for text in figure.texts if text.get_va() == "baseline"]


def rectangles(axes):
    """(x, y, width, height) of upright boxes."""
    corners = [patch.get_xy()[:4] for patch in axes.patches]
    assert all((box == [box[0], (box[2, 0], box[0, 1]), box[2], (box[0, 0], box[2, 1])]).all() for box in corners)
    return [(*box[0].tolist(), *(box[2] - box[0]).tolist()) for box in corners]


def extents(figure):
    """Where texts and pictures are, in pixels of the figure: [(x0, y0, x1, y1)] each."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    written = [text.get_window_extent(renderer).extents for text in figure.texts if text.get_text()]
    return written, [axes.get_window_extent(renderer).extents for axes in figure.axes]


def shown(images, mean=0.0, std=1.0):
    """Images as they should be drawn."""
    mean, std = (torch.as_tensor(value).reshape(-1, 1, 1) for value in (mean, std))
    return (images.cpu().float() * std + mean).clamp(0, 1)


def check(figure, *lines):
    """The pictures are those of ``lines``, bit for bit."""
    expected = [picture for line in lines for picture in line]
    assert len(figure.axes) == len(expected)
    for got, wanted in zip(pixels(figure), expected, strict=True):
        assert_values(channels_first(got), wanted)
