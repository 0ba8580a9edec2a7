"""Boxes, masks and keypoints over pictures: where they are, of which colour, and what is written at them."""

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kornia.constants import DataKey
from matplotlib.colors import to_hex, to_rgb
from PIL import Image
from support.profiler.viewer import above, of, rectangles
from torchvision import tv_tensors

import gpuaug
from gpuaug import TransformStage
from gpuaug.fusion.options import Options
from gpuaug.viewer.draw_annotations import COLOURS

HEIGHT, WIDTH = 20, 30
IMAGES = torch.rand(2, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0))


def same(*values, data_keys):
    return list(values) if len(values) > 1 else values[0]


def keyed(transform=same, **members):
    """The figure of a batch whose members a stage names: ``boxes=("bbox_xyxy", value)``."""
    batch = {"image": IMAGES, **{name: value for name, (_, value) in members.items()}}
    on = {"image": "input", **{name: key for name, (key, _) in members.items()}}
    return gpuaug.show(of(batch, TransformStage(transform, on=on)))


def targets(dicts, stage=None):
    return gpuaug.show(of((IMAGES, dicts), *([stage] if stage else [])))


def colours(axes):
    return [to_hex(patch.get_edgecolor()) for patch in axes.patches]


def written(axes):
    return [text.get_text() for text in axes.texts]


def points(axes):
    """(x, y) of keypoints, a list for each of their colours."""
    return [line.get_xydata().tolist() for line in axes.lines]


def covered(axes):
    """Which pixels have which colour over them: {colour: (H, W) bool}."""
    if len(axes.images) == 1:
        return {}
    layer = np.asarray(axes.images[1].get_array())
    found = {to_hex(pixel[:3]) for pixel in layer.reshape(-1, 4) if pixel[3]}
    return {colour: (layer[..., :3] == to_rgb(colour)).all(-1) & (layer[..., 3] > 0) for colour in found}


WHOLE = st.integers(0, 12)


@given(st.lists(st.tuples(WHOLE, WHOLE, WHOLE, WHOLE), min_size=1, max_size=len(COLOURS)))
@settings(max_examples=4)
def test_kornia_boxes_include_their_last_pixel(corners):
    boxes = torch.tensor(corners).float()
    boxes[:, 2:] += boxes[:, :2]
    sides = torch.cat((boxes[:, :2], boxes[:, 2:] - boxes[:, :2] + 1), 1)
    both = torch.stack((boxes, boxes + 1))
    for key, values in {"bbox_xyxy": both, "bbox_xywh": torch.stack((sides, sides + torch.tensor([1, 1, 0, 0])))}.items():
        figure = keyed(boxes=(key, values))
        for axes, moved in zip(figure.axes, (0, 1, 0, 1), strict=True):
            assert rectangles(axes) == [(x + moved, y + moved, w, h) for x, y, w, h in sides.tolist()]
            assert colours(axes) == list(COLOURS[: len(boxes)])


def test_rotated_boxes_of_four_corners():
    upright = torch.tensor([[[4.0, 5.0], [9.0, 5.0], [9.0, 7.0], [4.0, 7.0]]])
    turned = torch.tensor([[[10.0, 2.0], [18.0, 10.0], [10.0, 18.0], [2.0, 10.0]]])
    figure = keyed(boxes=("bbox", torch.stack((upright, turned))))
    assert rectangles(figure.axes[0]) == [(4.0, 5.0, 6.0, 3.0)]
    (patch,) = figure.axes[1].patches
    assert patch.get_xy()[:4].tolist() == [[10.5, 2.0], [19.0, 10.5], [10.5, 19.0], [2.0, 10.5]]


def test_annotations_after_a_fused_pipeline():
    augment = gpuaug.fuse(
        K.AugmentationSequential(
            K.RandomCrop((12, 16)), K.RandomHorizontalFlip(), data_keys=["input", "bbox_xyxy", "keypoints"]
        )
    )
    # One pixel is white, and in its own box, mask and keypoint.
    images = torch.zeros(6, 1, 14, 18, dtype=torch.uint8)
    images[:, :, 6, 9] = 255
    batch = [images, torch.tensor([[[9.0, 6.0, 9.0, 6.0]]] * 6), torch.tensor([[[9.0, 6.0]]] * 6), (images > 0).long()]
    stage = TransformStage(augment, on={0: DataKey.IMAGE, 1: "BBOX_XYXY", 2: DataKey.KEYPOINTS, 3: "mask"})
    figure = gpuaug.show(of(batch, stage))
    seen = set()
    for axes in figure.axes[6:]:
        ((y, x),) = np.argwhere(np.asarray(axes.images[0].get_array()) > 0.5).tolist()
        seen.add((x, y))
        assert rectangles(axes) == [(x, y, 1.0, 1.0)]
        assert points(axes) == [[[x + 0.5, y + 0.5]]]
        ((_, mask),) = covered(axes).items()
        assert np.argwhere(mask).tolist() == [[y, x]]
    assert len(seen) > 2


def test_padding_is_hidden_by_valid():
    boxes = torch.tensor([[[1.0, 2.0, 5.0, 6.0], [0.0, 0.0, 0.0, 0.0], [7.0, 7.0, 9.0, 9.0]]] * 2)
    valid = torch.tensor([[True, False, True], [False, False, True]])
    labels = torch.tensor([[3, 0, 5], [1, 1, 2]])
    figure = keyed(boxes=("bbox_xyxy", boxes), there=("valid", valid), labels=("class", labels))
    assert [rectangles(axes) for axes in figure.axes[:2]] == [[(1, 2, 5, 5), (7, 7, 3, 3)], [(7, 7, 3, 3)]]
    assert [colours(axes) for axes in figure.axes[:2]] == [[COLOURS[0], COLOURS[2]], [COLOURS[2]]]
    assert [written(axes) for axes in figure.axes[:2]] == [["3", "5"], ["2"]]
    assert above(figure) == ["0", "1"], "classes of boxes are not those of the sample"
    assert len(keyed(boxes=("bbox_xyxy", boxes)).axes[0].patches) == 3


FORMS = {
    "xyxy": [2.0, 3.0, 10.0, 8.0],
    "xywh": [2.0, 3.0, 8.0, 5.0],
    "cxcywh": [6.0, 5.5, 8.0, 5.0],
    "cxcywh_share": [6 / WIDTH, 5.5 / HEIGHT, 8 / WIDTH, 5 / HEIGHT],
}


class Kept(gpuaug.Fused):
    """Says what boxes are, and leaves them as they are."""

    def forward(self, *inputs, data_keys=None):
        return list(inputs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["option", "torchvision"])
def test_boxes_of_target_dicts_in_every_box_format(form, kind):
    boxes = torch.tensor([FORMS[form]])
    stage = None
    if kind == "torchvision":
        if form == "cxcywh_share":
            return
        boxes = tv_tensors.BoundingBoxes(boxes, format=form.upper(), canvas_size=(HEIGHT, WIDTH))
    else:
        stage = TransformStage(Kept(K.RandomInvert(p=0.0), Options(boxes=form)), on={0: "input", 1: "targets"})
    records = [{"boxes": boxes, "labels": torch.tensor([7])}, {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0)}]
    figure = targets(records, stage)
    for axes in figure.axes[::2]:
        np.testing.assert_allclose(rectangles(axes), [(2, 3, 8, 5)], atol=1e-5)
        assert written(axes) == ["7"]
    assert all(not axes.patches for axes in figure.axes[1::2])


def test_target_dicts():
    masks = torch.zeros(2, HEIGHT, WIDTH, dtype=torch.bool)
    masks[0, 2:5, 3:7] = masks[1, 10:, 20:] = True
    first = {
        "bbox": torch.tensor([[3.0, 2.0, 4.0, 3.0], [20.0, 10.0, 10.0, 10.0]]),
        "class_labels": torch.tensor([1, 0]),
        "masks": masks,
        "keypoints": torch.tensor([[[4.0, 3.0, 1.0], [5.0, 4.0, 0.0]], [[21.0, 11.0, 2.0], [22.0, 12.0, 1.0]]]),
        "valid": torch.tensor([True, False]),
    }
    second = {
        "boxes": torch.zeros(0, 4),
        "masks": tv_tensors.Mask(masks[1].to(torch.uint8)),
        "keypoints": torch.tensor([[1.0, 2.0]]),
    }
    one, two = targets((first, second)).axes
    assert rectangles(one) == [(3, 2, 4, 3)], "as in COCO, and the one that is not valid is left out"
    assert written(one) == ["1"]
    assert points(one) == [[[4.0, 3.0]], [[21.0, 11.0], [22.0, 12.0]]]
    assert {colour: mask.tolist() for colour, mask in covered(one).items()} == {COLOURS[0]: masks[0].tolist()}
    assert points(two) == [[[1.0, 2.0]]]
    assert {colour: mask.tolist() for colour, mask in covered(two).items()} == {COLOURS[0]: masks[1].tolist()}


def test_mask_colours():
    values = torch.zeros(2, 1, HEIGHT, WIDTH, dtype=torch.int64)
    values[0, 0, :5], values[0, 0, 5:8], values[0, 0, -2:] = 1, 3, 255
    for masks, key in ((values, "mask"), (values[:, 0], "mask"), (values.float(), "MASK")):
        figure = keyed(masks=(key, masks))
        found = covered(figure.axes[0])
        grey = (set(found) - set(COLOURS)).pop()
        assert {name: mask.tolist() for name, mask in found.items()} == {
            COLOURS[0]: (values[0, 0] == 1).tolist(),
            COLOURS[2]: (values[0, 0] == 3).tolist(),
            grey: (values[0, 0] == 255).tolist(),
        }
        assert covered(figure.axes[1]) == {}
    several = torch.cat((values == 1, values == 3), 1)
    figure = keyed(masks=("mask", several))
    found = covered(figure.axes[0])
    assert {name: mask.tolist() for name, mask in found.items()} == {COLOURS[k]: several[0, k].tolist() for k in (0, 1)}
    figure = keyed(masks=("mask", [several[0], several[1, :1]]))
    assert set(covered(figure.axes[0])) == set(COLOURS[:2])


def test_mask_outlines():
    mask = torch.zeros(2, HEIGHT, WIDTH, dtype=torch.int64)
    mask[:, 4:9, :6] = 2
    axes = keyed(masks=("mask", mask)).axes[0]
    (contour,) = axes.collections
    assert to_hex(contour.get_edgecolor()[0]) == COLOURS[1]
    corners = np.concatenate([path.vertices for path in contour.get_paths()])
    assert (corners.min(0).tolist(), corners.max(0).tolist()) == ([0.0, 4.0], [6.0, 9.0])
    assert contour.get_path_effects()


def test_keypoints_are_at_pixel_centres():
    figure = keyed(points=("keypoints", torch.tensor([[[0.0, 0.0], [7.0, 3.0]], [[2.0, 2.0], [50.0, 3.0]]])))
    assert points(figure.axes[0]) == [[[0.5, 0.5]], [[7.5, 3.5]]]
    assert [to_hex(line.get_color()) for line in figure.axes[0].lines] == list(COLOURS[:2])
    for axes in figure.axes:
        assert axes.get_xlim() == (0, WIDTH), "what is outside changes nothing"
        assert axes.get_ylim() == (HEIGHT, 0)


def test_label_names_do_not_overlap():
    boxes = torch.tensor([[[1.0, 1.0, 25.0, 12.0]] * 2 + [[28.0, 15.0, 29.0, 19.0]], [[-9.0, -9.0, -3.0, -3.0]] * 3])
    labels = torch.tensor([[0, 1, 2], [0, 0, 0]])

    class Named(list):
        classes = ["a name that has no end at all", "two", "three in a corner"]  # noqa: RUF012
        dataset = property(lambda self: self)

    stage = TransformStage(same, on={0: "input", 1: "bbox_xyxy", 2: "class"})
    figure = gpuaug.show(gpuaug.StreamedLoader(Named([(IMAGES, boxes, labels)]), [stage], device="cpu"))
    figure.draw_without_rendering()
    one, two = figure.axes[:2]
    assert written(one) == ["a name th…d at all", "two", "three in a corner"]
    assert written(two) == [], "there is nothing to be seen of it"
    frame = one.get_window_extent()
    extents = [text.get_window_extent() for text in one.texts]
    for extent in extents:
        assert frame.x0 - 1 <= extent.x0
        assert extent.x1 <= frame.x1 + 1
        assert frame.y0 - 1 <= extent.y0
        assert extent.y1 <= frame.y1 + 1
    assert not any(a.overlaps(b) for index, a in enumerate(extents) for b in extents[:index])


def test_views_share_annotations():
    boxes = torch.tensor([[[1.0, 1.0, 5.0, 5.0]], [[2.0, 2.0, 5.0, 5.0]]])
    stage = TransformStage(lambda images, boxes, data_keys: (images.repeat(2, 1, 1, 1), boxes), on={0: "input", 1: "bbox_xyxy"})
    figure = gpuaug.show(of((IMAGES, boxes), stage))
    assert [rectangles(axes)[0][0] for axes in figure.axes] == [1, 2] * 3
    stage = TransformStage(
        lambda images, boxes, data_keys: (images.repeat(2, 1, 1, 1), torch.cat((boxes, boxes + 9))),
        on={0: "input", 1: "bbox_xyxy"},
    )
    figure = gpuaug.show(of((IMAGES, boxes), stage))
    assert [rectangles(axes)[0][0] for axes in figure.axes] == [1, 2, 1, 2, 10, 11]


def test_annotations_after_later_stages():
    boxes = torch.tensor([[[1.0, 1.0, 5.0, 5.0]], [[2.0, 2.0, 5.0, 5.0]]])
    stages = [TransformStage(same, on={0: "input", 1: "bbox_xyxy"}), TransformStage(lambda boxes: boxes + 1, on=1)]
    figure = gpuaug.show(of((IMAGES, boxes), *stages))
    assert [rectangles(axes)[0][0] for axes in figure.axes] == [1, 2, 2, 3]
    into = TransformStage(lambda x, b, data_keys: (1 - x, b + 3), on={0: "input", 1: "bbox_xyxy"}, into=(2, 3))
    figure = gpuaug.show(of((IMAGES, boxes), into))
    assert [rectangles(axes)[0][0] for axes in figure.axes] == [1, 2, 4, 5]


TWO = torch.tensor([[1.0, 2.0, 5.0, 6.0], [8.0, 8.0, 16.0, 14.0]])


@pytest.mark.parametrize("named", [False, True])
def test_label_of_a_sample_is_not_the_label_of_the_batch(named):
    # As many boxes as the batch has samples.
    records = [{"boxes": TWO, "labels": torch.tensor([1, 2])}, {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0).long()}]
    stages = [TransformStage(gpuaug.fuse(K.RandomInvert(p=0.0)), on={0: "input", 1: "targets"})] if named else []
    figure = gpuaug.show(of((IMAGES, records), *stages))
    assert above(figure) == ["0", "1"]
    assert written(figure.axes[0]) == ["1", "2"]
    figure = gpuaug.show(of((IMAGES, records, torch.tensor([5, 6])), *stages))
    assert above(figure) == ["0: class 5", "1: class 6"], "what is beside them still is"
    sizes = [{"orig_size": torch.tensor([480, 640])}] * 2
    assert above(gpuaug.show(of({"pixel_values": IMAGES, "labels": sizes}))) == ["0", "1"]


def test_labels_in_a_tuple_of_dicts():
    labelled = {"image": IMAGES, "label": torch.tensor([5, 6])}
    assert above(gpuaug.show(of((labelled, {"image": IMAGES})))) == ["0: class 5", "1: class 6"]


def test_class_names_in_target_dicts():
    figure = keyed(boxes=("bbox_xyxy", TWO.expand(2, 2, 4)), labels=("class", ["cat", "dog"]))
    assert above(figure) == ["0: cat", "1: dog"]
    assert written(figure.axes[0]) == [], "they are not those of boxes"
    other = {"image": IMAGES, "label": ["cat", "dog"], "number": torch.tensor([5, 6])}
    stage = TransformStage(same, on={"image": "input", "label": "class"})
    assert above(gpuaug.show(of(other, stage))) == ["0: cat", "1: dog"]
    later = TransformStage(lambda x, y, data_keys: (torch.cat((x, x)), y[::-1]), on={"image": "input", "label": "class"})
    assert above(gpuaug.show(of(other, later))) == ["0: cat", "1: dog", "dog", "cat", "dog", "cat"]
    for unknown in (["cat"], [["cat"], ["dog"]], np.array([1, 2])):
        assert above(keyed(labels=("class", unknown))) == ["0", "1"]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["cat", "dog"], ["cat", "dog"]),
        (("cat", 3), ["cat", "3"]),
        (np.array(["cat", "dog"]), ["cat", "dog"]),
        (np.array([1, 2]), ["1", "2"]),
        ([1, 2], ["1", "2"]),
        (torch.tensor([float("nan"), 2.0]), ["nan", "2"]),
        ([], []),
        ("cat", []),
        (torch.tensor([[1, 2]]), []),
    ],
)
def test_labels_of_target_dicts_are_numbers_or_words(labels, said):
    records = [{"boxes": TWO, "labels": labels}, {"boxes": torch.zeros(0, 4), "labels": labels[:0]}]
    one, two = targets(records).axes
    assert written(one) == said
    assert written(two) == []


def test_labels_that_are_no_number():
    figure = keyed(labels=("class", torch.tensor([float("nan"), float("inf")])))
    assert above(figure) == ["0: class nan", "1: class inf"]


@pytest.mark.parametrize("name", ["label", "labels", "fine_label", "class", "class_id", "category_id", "target", "y"])
def test_numbers_under_the_name_of_a_label_are_classes(name):
    batch = {"id": torch.tensor([1, 2]), "image": IMAGES, name: torch.tensor([5, 6])}
    assert above(gpuaug.show(of(batch))) == ["0: class 5", "1: class 6"]


@pytest.mark.parametrize("name", ["id", "image_id", "index", "frame_index", "timestamp", "episode", "length", "year"])
def test_other_whole_numbers_are_no_classes(name):
    assert above(gpuaug.show(of({"image": IMAGES, name: torch.tensor([5, 6])}))) == ["0", "1"]
    times = torch.tensor([1_700_000_000, 1_700_000_001])
    assert above(gpuaug.show(of((IMAGES, times)))) == ["0", "1"]
    assert above(gpuaug.show(of((IMAGES, times, torch.tensor([5, 6]))))) == ["0: class 5", "1: class 6"]


MASK = torch.ones(HEIGHT, WIDTH)


@pytest.mark.parametrize("key", ["boxes", "bbox", "keypoints", "masks", "valid", "labels"])
@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(0),
        np.zeros((0, 4)),
        [],
        None,
        [{"size": [HEIGHT, WIDTH], "counts": b"0"}],
        [[1.0, 2.0, 3.0], [1.0, 2.0]],
    ],
    ids=["no axis of coordinates", "array", "list", "None", "run lengths", "polygons"],
)
def test_target_dicts_without_objects_or_numbers_are_shown(key, value):
    figure = targets([{key: value}, {"boxes": torch.tensor([[1.0, 2.0, 5.0, 6.0]]), key: value}])
    assert [rectangles(axes) for axes in figure.axes] == [[], [] if key == "boxes" else [(1, 2, 4, 4)]]
    assert not any(map(points, figure.axes))
    assert not any(map(covered, figure.axes))


@pytest.mark.parametrize(("key", "empty"), [("bbox_xyxy", (0,)), ("bbox_xyxy", (0, 4)), ("bbox", (0,)), ("bbox", (0, 4, 2))])
def test_samples_without_boxes_of_kornia_are_shown(key, empty):
    figure = keyed(boxes=(key, [torch.zeros(empty)] * 2))
    assert not any(map(rectangles, figure.axes))


@pytest.mark.parametrize(
    "masks", [[MASK], Image.new("L", (WIDTH, HEIGHT), 1), [MASK.numpy()]], ids=["tensors", "PIL", "arrays"]
)
def test_masks_of_every_form_are_drawn(masks):
    figure = targets([{"masks": masks}] * 2)
    for axes in figure.axes:
        assert covered(axes)[COLOURS[0]].all()


def test_masks_of_another_size_than_the_image_are_not_drawn():
    small = torch.ones(1, HEIGHT // 2, WIDTH // 2)
    assert not any(map(covered, targets([{"masks": small, "boxes": torch.zeros(0)}] * 2).axes))
    assert not any(map(covered, keyed(mask=("mask", torch.stack([small, small]))).axes))


def test_boxes_in_a_list_of_tensors_are_drawn():
    figure = targets([{"boxes": [torch.tensor([1.0, 2.0, 5.0, 6.0])], "labels": ["\u200b"]}] * 2)
    assert [rectangles(axes) for axes in figure.axes] == [[(1, 2, 4, 4)]] * 2


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, "nested"])
def test_sparse_and_nested_members_are_not_shown(layout):
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    member = nested if layout == "nested" else torch.eye(2).to_sparse(layout=layout)
    assert len(gpuaug.show(of({"image": IMAGES, "graph": member, "label": torch.tensor([1, 2])})).axes) == 2
