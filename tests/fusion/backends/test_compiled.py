"""Every kernel compiles for a GPU, on a machine that has none: what the interpreter forgives, the compiler does not."""

import itertools
import re

import kornia.augmentation as K
import pytest
import torch
from kornia.augmentation import auto

pytest.importorskip("triton")

from support import internals
from support.batches import clips
from support.batches.ragged import images_of, pack
from support.batches.samples import batch_of
from support.comparison import device_crops, readers
from support.comparison.box_windows import inputs_of, op_of
from support.comparison.executors import through_both
from support.comparison.replay import photographs
from support.gpu.compiled import CompileOnly
from support.ops import pipelines
from support.ops.op_cases import CASES
from support.processors.stand_ins import read_stand_in
from support.targets.mask_lists import PIPELINES, rows_of
from torchvision.transforms import v2

import gpuaug
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.readers import MaskLayout
from gpuaug.fusion.backends.triton import backend, box_windows, boxes, crops, mix, patches, tiles
from gpuaug.fusion.backends.triton.filters import blur, frame, levels
from gpuaug.fusion.lower.kornia import LOWERED
from gpuaug.fusion.ops.base import PointOp, Size
from gpuaug.fusion.ops.boxes import KORNIA_FORMATS, TARGET_DICT_FORMATS, BoxMapping
from gpuaug.fusion.ops.mix import SoftLabels
from gpuaug.fusion.policies.one_of import OneOf

KERNELS = {
    "gather_kernel": backend,
    "mask_kernel": backend,
    "contrast_kernel": backend,
    "channels_kernel": mix,
    "mix_kernel": mix,
    "blur_columns_kernel": blur,
    "blur_strips_kernel": blur,
    "filter_kernel": frame,
    "table_kernel": levels,
}
CHOSEN = [
    *("photometric", "apply masks", "equalize, torchvision's", "autocontrast, torchvision's", "either mix"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            *(
                "colour",
                "drawn size, padded crop",
                "padded, rotation, flip",
                "perspective",
                "jitters around a contrast",
                "noise of torchvision",
                "erased with noise",
                "one channel, then three",
            ),
            *("one of colours", "one of torchvision's", "shears, shifts", "mixup", "cutmix", "self-supervised"),
            "filters, each for some",
        )
    ),
]
POINTWISE = [
    *(case.first() for case in CASES.values() if case.pointwise),
    auto.TrivialAugment([[("posterize", 0.0, 8.0)], [("invert", 0, 1)]]),
]
"""Every op code once."""
RAGGED = ["crop, narrow", "crop, views", "padded grey", "drawn size", "smooth, cubic", "smooth, jittered"]
SLOW_RAGGED = ["jittered", "smooth"]
BOX_FORMS = {**KORNIA_FORMATS, **TARGET_DICT_FORMATS}
BOX_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]
BOX_CASES = {("bbox", torch.float32), ("xyxy", torch.float64), ("keypoints", torch.int64), ("cxcywh_share", torch.bfloat16)}
"""Layouts of boxes in the default run: vertices, corners, points, and centres as shares of the image."""


def by_turns(names, others):
    """Each name with one of the others; the rest of the product is slow, since a new machine compiles all."""
    return [
        pytest.param(name, other, id=f"{name}-{other}", marks=() if number % len(others) == index else pytest.mark.slow)
        for number, name in enumerate(names)
        for index, other in enumerate(others)
    ]


@pytest.fixture
def launched(monkeypatch):
    """Constants of the launches of the gather kernel, by name. Nothing is compiled."""
    launches = {}
    monkeypatch.setattr(backend, "gather_kernel", CompileOnly(backend.gather_kernel, launches, compiler=lambda *_, **__: None))
    monkeypatch.setattr(backend, "mask_kernel", CompileOnly(backend.mask_kernel, {}, compiler=lambda *_, **__: None))

    def constants():
        ((_, _, values, _),) = launches
        return {backend.gather_kernel.arg_names[position]: value for (position,), value in values}

    return constants


@pytest.fixture
def made(monkeypatch):
    """What launches have been compiled to."""
    found = {}
    for kernel, module in KERNELS.items():
        monkeypatch.setattr(module, kernel, CompileOnly(getattr(module, kernel), found))
    yield found
    assert found
    assert all(compiled.asm["cubin"] for compiled in found.values())


@pytest.fixture(params=["small", pytest.param("full", marks=pytest.mark.slow)])
def blocks(request, monkeypatch):
    """Pixels per thread: a few, with which the compiler raises the same errors in less time, or as many as in a launch."""
    if request.param == "full":
        return
    monkeypatch.setattr(backend, "TILES", dict.fromkeys(backend.TILES, (2, 64)))
    monkeypatch.setattr(backend, "MEAN_TILE", (4, 32))
    monkeypatch.setattr(backend, "ANTIALIASED_TILE", (2, 64))
    monkeypatch.setattr(backend, "CONTRAST_BLOCK", 128)
    monkeypatch.setattr(frame, "TILE_ALONG", 4)
    monkeypatch.setattr(levels, "BLOCK", 256)
    monkeypatch.setattr(levels, "TILE_BLOCK", 128)


@pytest.mark.parametrize("name", CHOSEN)
def test_kernels_compile_for_a_gpu(name, made, blocks):
    modules = next(group[name] for group in (pipelines.EXACT, pipelines.CLOSE, pipelines.RGB_CLOSE) if name in group)
    through_both(modules(), photographs(2), torch.bfloat16, torch.channels_last)


CLIPS = [
    *("noise", "torchvision's mixes"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("filters, each for some", "photometric", "equalize", "blur of two passes", "CLAHE")
    ),
]


@pytest.mark.parametrize("name", CLIPS)
def test_kernels_for_clips_compile_for_a_gpu(name, made, blocks):
    through_both(clips.all_pipelines()[name](), photographs(4), torch.bfloat16, torch.channels_last, frames=2)


@pytest.mark.parametrize(
    ("dtype", "blurs"), [(torch.uint16, 1), (torch.int16, 0), pytest.param(torch.int16, 1, marks=pytest.mark.slow)], ids=str
)
def test_images_of_16_bits_compile_for_a_gpu(dtype, blurs, made, blocks):
    modules = [v2.RandomRotation(30, fill=None), *[v2.GaussianBlur((3, 3))] * blurs, v2.RandomGrayscale()]
    through_both(modules, photographs(2, dtype=dtype), dtype, torch.channels_last)


def test_ops_on_other_channels_than_three_compile_for_a_gpu(made, blocks):
    through_both(pipelines.CLOSE["channels"](), photographs(2, 5), torch.bfloat16, torch.channels_last)
    assert "channels_kernel" in {name for name, *_ in made}


def test_every_pointwise_op_compiles_for_a_gpu(made, blocks):
    through_both(POINTWISE, photographs(2), torch.bfloat16, torch.channels_last)
    place = (backend.gather_kernel.arg_names.index("PROGRAM"),)
    programs = [dict(constants)[place] for name, _, constants, _ in made if name == "gather_kernel"]
    codes = {kind.code for kind in LOWERED.values() if issubclass(kind, PointOp)}
    assert {code for program in programs for code, *_ in program} == codes | {OneOf.code}


@pytest.mark.slow
@pytest.mark.parametrize("side", [7, 23])
def test_blurs_read_several_lines_with_one_load(side, made):
    """The compiler's time for a load grows with the square of the kernel, and of 22 lines 7 x 7 taps are 154 pixels."""
    blurs = [K.RandomGaussianBlur((side, side), (0.1, 2.0))]
    through_both(blurs, photographs(2), torch.float32, torch.contiguous_format)
    for compiled in made.values():
        assert compiled.asm["ttir"].count("tt.load") < 30
        # A line is taken out of them within a thread.
        assert "shfl" not in compiled.asm["ptx"]


def test_wide_blurs_of_floats_compile_for_a_gpu(made, blocks):
    blurs = [K.RandomGaussianBlur((3, 11), (0.3, 2.0))]
    through_both(blurs, photographs(2, dtype=torch.float32), torch.float32, torch.contiguous_format)
    assert {"blur_columns_kernel", "blur_rows"} <= {compiled.metadata.name for compiled in made.values()}


def test_blurs_in_strips_read_several_pixels_at_once_and_keep_columns(made):
    blurs = [K.CenterCrop((32, 48)), K.RandomGaussianBlur((23, 23), (0.1, 2.0), p=0.5)]
    through_both(blurs, photographs(2), torch.bfloat16, torch.channels_last)
    (compiled,) = [compiled for (name, *_), compiled in made.items() if name == "blur_strips_kernel"]
    assert "ld.global.v4" in compiled.asm["ptx"]
    assert "mma.sync" in compiled.asm["ptx"]
    # Columns that the compiler took for those of the first step would be black.
    assert compiled.asm["ttgir"].count("tt.dot") >= 12
    assert "tt.dot %cst" not in compiled.asm["ttgir"]


ROWS = {
    "crop": [K.RandomResizedCrop((32, 32)), K.RandomHorizontalFlip(), K.Normalize(0.5, 0.25)],
    "jitter": [K.RandomCrop((32, 32), padding=4), K.ColorJitter(0.4, 0.4, 0.4, 0.1)],
    "rotation": [K.RandomRotation(30.0)],
    "levels": [K.RandomAutoContrast(p=0.5), K.RandomClahe(p=0.5)],
    "perspective": [K.RandomPerspective(p=1.0), K.RandomEqualize(p=0.5)],
    "median": [K.RandomMedianBlur(5, p=0.5)],
    "motion blur": [K.RandomMotionBlur(5, 180.0, 0.5, border_type="reflect", p=0.5)],
    "sharpness": [K.RandomSharpness(p=0.5)],
}


@pytest.mark.parametrize(("name", "memory_format"), by_turns(ROWS, [torch.channels_last, torch.contiguous_format]))
def test_warps_lie_along_rows_of_images(name, memory_format, made):
    """Where addresses follow one another along neither axis, compilers may take that of columns: 32 lines of memory a load."""
    through_both(ROWS[name], photographs(2).contiguous(memory_format=memory_format), torch.bfloat16, memory_format)
    for (kernel, *_), compiled in made.items():
        layouts = dict(re.findall(r"(#\w+) = #ttg.blocked<{.*threadsPerWarp = \[([\d, ]+)\]", compiled.asm["ttgir"]))
        used = re.findall(r"tt\.(?:load|store) .*tensor<[\dx]+x!tt\.ptr<\w+>, (#\w+)>", compiled.asm["ttgir"])
        assert used, kernel
        assert all(layouts[layout].split(", ")[0] == "32" for layout in used), (kernel, layouts)


# The compilations of these two tests are in Triton's cache, behind the test above.
def test_tables_of_clahe_round_the_product_before_the_sum(made):
    """The sum makes it a whole number: from a product that is not rounded, another one in some cases."""
    through_both(ROWS["levels"], photographs(2), torch.bfloat16, torch.contiguous_format)
    place = (levels.table_kernel.arg_names.index("GRID_H"),)
    texts = {dict(key[2])[place]: compiled.asm["ptx"] for key, compiled in made.items() if key[0] == "table_kernel"}
    assert "fma" not in texts[8]


@pytest.mark.parametrize(
    ("name", "kernel", "dtype"),
    [
        pytest.param("median", "median_blur", torch.bfloat16),
        pytest.param("motion blur", "motion_blur", torch.bfloat16),
        pytest.param("sharpness", "sharpen", torch.bfloat16),
        pytest.param("levels", "map_levels", torch.bfloat16),
        pytest.param("sharpness", "sharpen", torch.float32, marks=pytest.mark.slow),
        pytest.param("levels", "map_levels", torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_filters_read_untouched_pixels_as_they_store_them(name, kernel, dtype, made):
    """Where the compiler does not see that they follow one another, a warp reads sixteen lines of memory at once."""
    through_both(ROWS[name], photographs(2), dtype, torch.contiguous_format)
    texts = [compiled.asm["ptx"] for compiled in made.values() if compiled.metadata.name == kernel]
    assert texts
    for ptx in texts:
        assert "shared" not in ptx
        assert "shfl" not in ptx


HALF = {"crop": ROWS["crop"], "crop, jitter": [K.RandomResizedCrop((32, 32)), K.ColorJitter(0.4, 0.4), K.Normalize(0.5, 0.25)]}


@pytest.mark.parametrize(("name", "antialias"), by_turns(HALF, [False, True]))
def test_gathers_into_half_precision_store_two_values_at_once(name, antialias, made):
    modules = HALF[name]
    readers.through_both(modules, photographs(2), torch.bfloat16, torch.channels_last, antialias=antialias)
    (ptx,) = [compiled.asm["ptx"] for (name, *_), compiled in made.items() if name == "gather_kernel"]
    assert set(re.findall(r"st\.global\.(?:v\d\.)?b(\d+)", ptx)) == {"32"}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *by_turns(RAGGED, ["chw", "hwc"]),
        *(pytest.param(name, layout, marks=pytest.mark.slow) for name in SLOW_RAGGED for layout in ("chw", "hwc")),
    ],
)
def test_kernels_for_ragged_batches_compile_for_a_gpu(name, layout, made, blocks):
    modules, sizes, options = readers.RAGGED[name]
    batch = pack(images_of(sizes), layout)
    readers.through_both(modules, batch, torch.bfloat16, torch.channels_last, **options)


CROPS = [
    *(("as they come", False), ("torchvision's, long", True)),
    *(pytest.param(name, follow, marks=pytest.mark.slow) for name in device_crops.CROPS for follow in (False, True)),
]


@pytest.mark.parametrize(("name", "follow"), CROPS)
def test_crops_kernel_compiles_for_a_gpu(name, follow, monkeypatch):
    made = {}
    monkeypatch.setattr(crops, "crops_kernel", CompileOnly(crops.crops_kernel, made))
    sizes = device_crops.some_sizes(8)
    device_crops.device_tables(device_crops.CROPS[name], sizes, torch.device("cpu"), points=follow, masks=follow)
    (compiled,) = made.values()
    assert compiled.asm["cubin"]
    assert "fma" not in compiled.asm["ptx"].replace("fma.rn.f64", ""), "a product of the windows was not rounded"


def test_box_windows_kernel_compiles_for_a_gpu(monkeypatch):
    made = {}
    monkeypatch.setattr(box_windows, "box_windows_kernel", CompileOnly(box_windows.box_windows_kernel, made))
    op = op_of(v2.RandomIoUCrop())
    box_windows.box_windows(op, *inputs_of(op, 5))
    (compiled,) = made.values()
    assert compiled.asm["cubin"]
    assert "fma" not in compiled.asm["ptx"], "a product of the windows was not rounded"


@pytest.mark.parametrize(
    ("dtype", "mixed"), by_turns([torch.int64, torch.uint8, torch.bool, torch.float16, torch.float64], [False, True])
)
def test_labels_kernel_compiles_for_a_gpu(dtype, mixed, monkeypatch):
    made = {}
    monkeypatch.setattr(mix, "labels_kernel", CompileOnly(mix.labels_kernel, made))
    rows = torch.zeros(4, 9) if mixed else None
    mix.soft_labels(SoftLabels(1000, 0.1), torch.zeros(4).to(dtype), rows)
    if dtype.is_floating_point:
        mix.soft_labels(SoftLabels(1000, 0.1), torch.zeros(4, 1000).to(dtype), rows)
    assert len(made) == 1 + dtype.is_floating_point
    assert all(compiled.asm["cubin"] for compiled in made.values())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(*case, marks=() if case in BOX_CASES else pytest.mark.slow)
        for case in itertools.product(BOX_FORMS, BOX_DTYPES)
    ],
)
def test_box_kernel_compiles_for_a_gpu(name, dtype, monkeypatch):
    form, made = BOX_FORMS[name], {}
    monkeypatch.setattr(boxes, "box_kernel", CompileOnly(boxes.box_kernel, made))
    places, points = torch.zeros(3, 3, dtype=torch.int64), form.layout == "points"
    matrix, leaves = torch.eye(3).repeat(3, 1, 1), dtype if dtype.is_floating_point else torch.float32
    for clip, owners in ((False, None), (not points, torch.zeros(3, dtype=torch.int64))):
        tail = {"vertices": (4, 2), "points": (3,) if owners is not None else (2,)}.get(form.layout, (4,))
        values = torch.zeros((3, *tail) if owners is not None else (3, 5, *tail), dtype=dtype)
        valid = torch.ones(3, dtype=torch.bool) if clip else None
        boxes.map_boxes(
            values, valid, BoxMapping(form, form, matrix, places if form.share else (1, 1), (8, 8), owners, clip), leaves
        )
    assert len(made) == 2


PROCESSORS = ["Qwen2VLImageProcessor", "DINOv3ViTImageProcessor"]
"""A bicubic resize that is rounded to bytes, and a bilinear one that is not."""


@pytest.mark.parametrize(("name", "layout"), by_turns(PROCESSORS, ["hwc", "chw"]))
def test_patches_kernel_compiles_for_a_gpu(name, layout, monkeypatch):
    made = {}
    monkeypatch.setattr(patches, "patches_kernel", CompileOnly(patches.patches_kernel, made))
    family, resampling = read_stand_in(name)[1:]
    batch = pack(images_of([(40, 60), (60, 40)]), layout)
    for dtype in (torch.float32, torch.bfloat16):
        patches.write_patches(batch, family.arrangement(batch.shapes.sizes), resampling, dtype)
    assert len(made) == 2
    for compiled in made.values():
        assert compiled.asm["cubin"]
        # Within the loop over the pixels of a line, threads exchange nothing.
        inner_loop = compiled.asm["ttgir"].split("scf.while")[-1].partition("scf.yield")[0]
        assert inner_loop.count("tt.load") == 3
        assert "convert_layout" not in inner_loop


def test_kernels_that_combine_images_compile_for_a_gpu(monkeypatch):
    made = {}
    for name in ("tiles_kernel", "cover_kernel", "cut_kernel"):
        monkeypatch.setattr(tiles, name, CompileOnly(getattr(tiles, name), made))
    monkeypatch.setattr(dispatch, "_tiles_backend", lambda device: backend)
    augment = gpuaug.fuse([gpuaug.Mosaic(64), gpuaug.CopyPaste(), gpuaug.MixUpBoxes()])
    # Images of each type are written, pasted and blended. Masks of one type are written, and cut out of one another.
    for dtype, count in ((torch.uint8, 6), (torch.float16, 9)):
        members, targets = batch_of(0, 2, 16, "tensors", dtype)
        augment(members, targets, data_keys=["input", "targets"])
        assert len(made) == count
    assert all(compiled.asm["cubin"] for compiled in made.values())


@pytest.mark.parametrize("name", PIPELINES)
def test_mask_kernel_for_several_sizes_compiles_for_a_gpu(name, monkeypatch):
    made = {}
    monkeypatch.setattr(backend, "mask_kernel", CompileOnly(backend.mask_kernel, made))
    plan, tables = rows_of(PIPELINES[name])
    places = MaskLayout(torch.zeros(5, dtype=torch.int64), torch.zeros(5, 3, dtype=torch.int64))
    backend.run_mask(plan.passes[0], torch.zeros(100, dtype=torch.uint8), torch.cat(tables), places)
    assert len(made) == 1


def test_more_samples_than_a_launch_can_have_are_refused():
    augment, images = gpuaug.fuse(K.CenterCrop(1), views=2), torch.zeros(40_000, 1, 2, 2, dtype=torch.uint8)
    plan = internals.program(augment).segments.at(0, Size(*images.shape), masks=False).plan
    text = "A batch must have at most 65535 samples in all its views on a GPU, got 80000. Lower batch_size or views."
    with pytest.raises(gpuaug.ArgumentError, match=text):
        backend.run(plan, images, torch.zeros(80_000, plan.width), torch.float32, torch.contiguous_format)


@pytest.mark.parametrize(("sizes", "pairs"), [(readers.SIZES, True), (readers.NARROW, False)])
def test_gather_kernel_reads_pairs_only_of_images_at_least_two_pixels_wide_and_high(sizes, pairs, launched):
    """With one it would be what lies behind it in memory, and what lies behind the last of them may be nobody's."""
    readers.through_both([readers.crop()], pack(images_of(sizes)), torch.float32, torch.contiguous_format)
    assert launched()["ADJACENT_TAPS"] is pairs


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_gather_kernel_divides_bytes_exactly_only_for_crops_that_may_be_skipped(p, launched):
    """It takes two instructions more, which a pixel that is interpolated does not need."""
    module, images = K.RandomResizedCrop(device_crops.SIZE, p=p), photographs(2, 3, *device_crops.SIZE)
    device_crops.through_kernels(module, images, images[:, :1], antialias=False)
    assert launched()["EXACT_DIVISION"] is (p < 1)
