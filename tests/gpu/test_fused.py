"""The kernels on a GPU: equal to the torch executor, without a synchronisation, in a loader, and for every size."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import kornia.augmentation as K
import pytest
import torch
import triton
import triton.language as tl
from support.batches import clips
from support.comparison.executors import composition_difference, disagreement
from support.comparison.replay import assert_replays, both, photographs
from support.comparison.values import assert_values
from support.gpu.launches import kernels_of, synchronisation_is_error
from support.ops import compositions, pipelines, skipped
from support.public.torch_settings import without_tf32
from torchvision.transforms import v2

import gpuaug
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.triton import backend
from gpuaug.fusion.backends.triton.launch import Launch, compile_in_parallel
from gpuaug.fusion.backends.triton.mix import soft_labels
from gpuaug.fusion.ops.mix import SoftLabels
from gpuaug.fusion.pixels import IMAGE_DTYPES, converted

pytestmark = pytest.mark.gpu

BATCHES = {
    "uint8": (lambda: photographs(7, 3, 37, 53), torch.float32, torch.contiguous_format),
    "one": (lambda: photographs(1, 3, 64, 48), torch.float32, torch.contiguous_format),
    "wide": (lambda: photographs(3, 3, 64, 256), torch.float32, torch.contiguous_format),
    "large, bfloat16, channels last": (lambda: photographs(3, 3, 230, 260), torch.bfloat16, torch.channels_last),
    "bytes": (lambda: photographs(4, 3, 40, 42), torch.uint8, torch.contiguous_format),
    "bytes, channels last": (lambda: photographs(3, 3, 37, 53), torch.uint8, torch.channels_last),
    "float, half": (lambda: photographs(4, 3, 40, 41, dtype=torch.float32), torch.float16, torch.contiguous_format),
    "channels last": (
        lambda: photographs(4, 3, 40, 41).to(memory_format=torch.channels_last),
        torch.float32,
        torch.channels_last,
    ),
    "half, strided": (lambda: photographs(4, 3, 40, 82, dtype=torch.float16)[..., ::2], torch.float32, torch.contiguous_format),
    "two channels": (lambda: photographs(4, 2, 40, 41), torch.float32, torch.contiguous_format),
}
GROUPS = [(group, name) for group in ("EXACT", "RGB_EXACT", "CLOSE", "RGB_CLOSE", "TIES") for name in getattr(pipelines, group)]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("group", "name"), GROUPS, ids=lambda value: value)
def test_kernels_equal_torch(group, name, batch):
    if group.startswith("RGB") and batch == "two channels":
        pytest.skip("needs three channels")
    made, dtype, memory_format = BATCHES[batch]
    images = made().cuda()
    if name in pipelines.OF_BYTES and images.is_floating_point():
        pytest.skip("returns to bytes")
    # Coordinates are float32: their error grows with the image, as Kornia's own does.
    tolerance = 1e-4 if max(images.shape[2:]) > 64 else 2e-5
    said = disagreement(name, getattr(pipelines, group)[name](), images, dtype, memory_format, tolerance)
    assert not said, said


@pytest.mark.parametrize(
    ("dtype", "memory_format"), [(torch.float32, torch.contiguous_format), (torch.bfloat16, torch.channels_last)]
)
@pytest.mark.parametrize("name", clips.all_pipelines())
def test_kernels_on_clips_equal_torch(name, dtype, memory_format):
    """One row of the parameter table serves all frames of a clip."""
    images = photographs(12, 3, 37, 54).cuda()
    said = disagreement(name, clips.all_pipelines()[name](), images, dtype, memory_format, frames=4)
    assert not said, said


@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_ragged_clips_equal_torch(layout):
    """Their crops are fitted on the device: by a row for each clip, to the size of its first frame."""
    batch = clips.clips_of(layout)
    for modules in ([K.RandomResizedCrop((12, 14)), K.RandomHorizontalFlip()], [v2.RandomInvert(), v2.RandomResizedCrop(12)]):
        augment = gpuaug.fuse(modules, ragged=True)
        for seed in range(3):
            torch.manual_seed(seed)
            got = augment(batch.to("cuda"))
            torch.manual_seed(seed)
            assert_values(got.cpu().float(), augment(batch).float(), atol=1 if got.dtype == torch.uint8 else 1e-4)


TYPED = {
    "moved": lambda: [v2.RandomHorizontalFlip(), v2.RandomCrop(24, padding=4, fill=0.5)],
    "crop and colours": lambda: [v2.RandomResizedCrop(24), v2.ColorJitter(0.4, 0.4, 0.4)],
    "converted": lambda: [v2.RandomCrop(24), v2.ToDtype(torch.float32, scale=True)],
    "a function": lambda: [v2.RandomCrop(24), v2.Lambda(lambda image: image.mT), v2.RandomInvert()],
    "a function that converts": lambda: [v2.RandomCrop(24), v2.Lambda(lambda image: image / 2), v2.RandomInvert()],
    "Kornia's": lambda: [K.RandomCrop((24, 24)), K.RandomInvert()],
}


@pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")
@pytest.mark.parametrize("dtype", sorted(IMAGE_DTYPES, key=str), ids=str)
@pytest.mark.parametrize("name", TYPED)
def test_types_are_those_of_the_cpu(name, dtype):
    images = converted(photographs(5), dtype)
    results = []
    for each in (images, images.cuda()):
        torch.manual_seed(0)
        results.append(gpuaug.fuse(v2.Compose(TYPED[name]()) if "Kornia" not in name else TYPED[name]())(each))
    expected, got = results
    assert got.dtype == expected.dtype
    # A level by rounding, and 2e-5 of the range.
    levels = {torch.uint8: 1, torch.int16: 2, torch.uint16: 2}
    tolerance = {**levels, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}.get(got.dtype, 2e-5)
    torch.testing.assert_close(got.cpu(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", compositions.SOME)
def test_kernels_pad_among_other_ops_as_torch_does(name):
    text = composition_difference(name, compositions.bytes_of().cuda())
    assert not text, text


@pytest.mark.parametrize("border", ["constant", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("size", [(48, 64), (37, 51)], ids=str)
@pytest.mark.parametrize("kernel", [(5, 5), (9, 3), (23, 23)], ids=str)
def test_blur_in_bfloat16_is_that_in_float32_rounded(kernel, size, border):
    blur = K.RandomGaussianBlur(kernel, (0.1, 2.0), border_type=border, p=0.7)
    modules, images = [K.CenterCrop(size), blur, K.Normalize(pipelines.MEAN, pipelines.STD)], photographs(6, 3, 80, 90).cuda()
    augment = gpuaug.fuse(modules, dtype=torch.bfloat16, memory_format=torch.channels_last)
    draws = augment.draw(images.shape, seed=0)
    expected = gpuaug.fuse(modules)(images, draws=draws)
    # A unit of bfloat16; and over the deviation what pixels, sums along y and weights of 11 bits may be off by.
    assert_values(augment(images, draws=draws).float(), expected, atol=2**-11 / 0.224, rtol=2**-8, draws=draws)


@pytest.mark.parametrize("name", pipelines.OF_ALL_CHANNELS)
def test_channels_made_of_all_three_are_nan_where_one_is(name):
    images = pipelines.with_holes(photographs(2, 3, 40, 41, dtype=torch.float32)).cuda()
    said = disagreement(name, {**pipelines.CLOSE, **pipelines.RGB_CLOSE}[name](), images)
    assert not said, said


@pytest.mark.parametrize("name", skipped.MOVING)
def test_skipped_samples_keep_every_bit(name):
    assert not skipped.fault(skipped.MOVING[name], "cuda")


@pytest.mark.parametrize("name", skipped.ANTIALIASED)
def test_antialias_leaves_every_bit_of_skipped_samples(name):
    assert not skipped.fault(skipped.ANTIALIASED[name], "cuda", antialias=True)


KORNIAS = [
    name for name, make in pipelines.CLOSE.items() if all(type(each).__module__.startswith("kornia.") for each in make())
]


@pytest.mark.parametrize("name", KORNIAS)
def test_kernels_equal_kornia(name):
    made = K.AugmentationSequential(*pipelines.CLOSE[name]())
    atol = 2.5e-4 / (1 if "Normalize" not in repr(made) else 0.25)
    assert_replays(made, photographs(5, 3, 37, 53).cuda(), atol=atol, share=1e-3 if name in pipelines.JUMPS else 0)


def test_fused_call_does_not_synchronise():
    augment = gpuaug.fuse(pipelines.RGB_CLOSE["self-supervised"](), dtype=torch.bfloat16, memory_format=torch.channels_last)
    images = photographs(6, 3, 64, 64).cuda()
    masks, boxes = torch.zeros(6, 1, 64, 64, dtype=torch.int64, device="cuda"), torch.ones(6, 2, 4, device="cuda")
    keys = ["input", "mask", "bbox_xyxy"]
    augment(images)
    augment(images, masks, boxes, data_keys=keys)
    torch.cuda.synchronize()
    torch.cuda._sleep(2 * 10**9)
    started = torch.cuda.Event()
    started.record()
    with synchronisation_is_error():
        augment(images)
        augment(images, masks, boxes, data_keys=keys)
    # A pageable copy would have waited for the sleep without being reported.
    assert not started.query()
    torch.cuda.synchronize()


def test_sizes_after_the_first_share_one_compilation():
    augment = gpuaug.fuse(pipelines.RGB_CLOSE["self-supervised"]())
    for side in (64, 56):
        augment(photographs(6, 3, side, side).cuda())
    compiled = sum(len(cache[0]) for cache in kernel_caches())
    for batch, height, width in ((5, 64, 64), (1, 56, 64), (16, 48, 80), (3, 33, 57), (32, 128, 128)):
        augment(photographs(batch, 3, height, width).cuda())
    assert sum(len(cache[0]) for cache in kernel_caches()) == compiled


@pytest.fixture(autouse=True)
def full_precision():
    """Kornia's blur is a convolution, which a GPU computes in TF32 unless told not to."""
    with without_tf32():
        yield


def kernel_caches():
    from gpuaug.fusion.backends.triton import contrast, gather, mix, tiles
    from gpuaug.fusion.backends.triton.filters import blur, frame, levels

    for module in (blur, frame, gather, levels, mix, contrast, tiles):
        for value in vars(module).values():
            if hasattr(value, "device_caches"):
                yield from value.device_caches.values()


def test_fused_stage_in_a_loader_is_the_same_at_every_depth_and_delay():
    batches = [(photographs(4, seed=index), torch.arange(4)) for index in range(6)]
    augment = gpuaug.fuse(pipelines.RGB_CLOSE["self-supervised"]())

    def slow(images):
        torch.cuda._sleep(3 * 10**7)
        return augment(images)

    seen = []
    for depth, stage in ((0, augment), (2, augment), (2, slow)):
        loader = gpuaug.StreamedLoader(batches, [gpuaug.TransformStage(stage, name="augment")], depth=depth, seed=7)
        seen.append([images.clone() for images, _ in loader])
    for other_run in seen[1:]:
        for one, other in zip(seen[0], other_run, strict=True):
            assert_values(one, other)


def test_triton_is_used_and_its_absence_warned_of_once(monkeypatch):
    assert dispatch.backend_name(torch.device("cuda")) == "triton"

    def broken(device, first):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(dispatch, "_BACKENDS", {})
    monkeypatch.setattr(dispatch, "TRITON_FAILURES", {})
    monkeypatch.setattr(backend, "probe", broken)
    images = photographs(2).cuda()
    augment = gpuaug.fuse(K.RandomHorizontalFlip())
    with pytest.warns(gpuaug.GpuAugWarning, match=r"cannot run a kernel there \(RuntimeError: no compiler\)"):
        result = augment(images)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        augment(images)
    assert result.is_cuda


@pytest.mark.multigpu
def test_fused_images_on_a_gpu_that_is_not_current():
    images = photographs(3).to("cuda:1")
    assert torch.cuda.current_device() == 0
    expected, got = both(K.AugmentationSequential(K.RandomVerticalFlip()), images)
    assert got.device == images.device
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)  # Kornia is given x / 255, which a GPU rounds otherwise


@triton.jit
def store_constant(out, VALUE: tl.constexpr):
    tl.store(out, VALUE)


@triton.jit
def store_sum(out, first, second, third, VALUE: tl.constexpr):
    tl.store(out, tl.load(first) + tl.load(second) + tl.load(third) + VALUE)


def test_kernels_that_threads_compile_at_the_same_time_keep_their_launchers():
    switch_interval = sys.getswitchinterval()
    numbers = [torch.tensor(value, device="cuda", dtype=torch.float32) for value in (100, 200, 300)]
    cases = [(store_constant, [], 0), (store_sum, numbers, 600)]
    out = torch.zeros(len(cases), 200, device="cuda")
    launches = [
        (Launch(kernel, (1, 1, 1), (), {"VALUE": value}), [out[row, value], *more])
        for value in range(out.shape[1])
        for row, (kernel, more, _) in enumerate(cases)
    ]
    try:
        sys.setswitchinterval(1e-6)
        with compile_in_parallel():
            for launch, tensors in launches:
                launch(tensors)
    finally:
        sys.setswitchinterval(switch_interval)
    for launch, tensors in launches:
        launch(tensors)
    values = torch.arange(out.shape[1], dtype=torch.float32)
    assert_values(out.cpu(), torch.stack([values + total for _, _, total in cases]))


# Mixes


KEYS = ["input", "class"]


def pipeline():
    mixes = K.RandomMixUpV2(), K.RandomCutMixV2(use_correct_lambda=True)
    return K.AugmentationSequential(
        K.RandomHorizontalFlip(), K.AugmentationSequential(*mixes, random_apply=1), K.Normalize(0.5, 0.25)
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("classes", [2, 1000, 21841])
def test_labels_kernel_equals_torch(classes, dtype):
    generator = torch.Generator().manual_seed(0)
    table = torch.zeros(64, 12)
    table[:, 3] = torch.randperm(64, generator=generator)
    table[:, 4] = torch.rand(64, generator=generator) * (torch.rand(64, generator=generator) < 0.8)
    # Some are no class: what is written for them must stay in their rows.
    values = torch.randint(-100, classes + 100, (64,), generator=generator).to(dtype).cuda()
    soft = SoftLabels(classes, 0.1)
    for rows in (None, table[:, 2:].cuda()):
        torch.testing.assert_close(soft_labels(soft, values, rows), soft.convert(values, rows), atol=1e-6, rtol=0)
        shares = torch.rand(64, classes, generator=generator)
        shares = (shares if dtype.is_floating_point else shares > 0.9).to(dtype).cuda()
        tolerance = 1e-3 if dtype is torch.float16 else 1e-6
        torch.testing.assert_close(soft_labels(soft, shares, rows), soft.convert(shares, rows), atol=tolerance, rtol=0)


@pytest.mark.parametrize("pick", ["batch", "sample"])
def test_mixed_images_and_labels_equal_the_cpu(pick):
    augment, images, labels = gpuaug.fuse(pipeline(), pick=pick, num_classes=10), photographs(16), torch.arange(16) % 10
    for seed in range(6):
        draws = augment.draw(images.shape, seed=seed)
        expected = augment(images, labels, data_keys=KEYS, draws=draws)
        got = augment(images.cuda(), labels.cuda(), data_keys=KEYS, draws=draws)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=0)


def test_mix_call_is_three_launches_without_synchronisation():
    augment = gpuaug.fuse(pipeline(), pick="sample", num_classes=1000, label_smoothing=0.1)
    images, labels = photographs(16).cuda(), torch.full((16,), -100, device="cuda")
    augment(images, labels, data_keys=KEYS)
    kernels = kernels_of(lambda: augment(images, labels, data_keys=KEYS))
    assert kernels == ["gather_kernel", "labels_kernel", "mix_kernel"]


# Plain torch


ROOT = Path(__file__).parents[2]
PTXAS = '#!/bin/sh\n[ "$1" = --version ] && echo "Cuda compilation tools, release 12.8, V12.8.93" || exit 3\n'


def read_by(variables, tmp_path):
    """Return the output of the program, run with these environment variables and an empty Triton cache."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "GPUAUG_REQUIRE_TRITON")}
    kept |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }
    kept = {name: value for name, value in (kept | variables).items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-m", "support.gpu.plain_torch"], env=kept, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout[done.stdout.rindex("\n{\n") :])


def of_triton(read):
    return [warning for warning in read["warnings"] if "Triton" in warning]


def without_ptxas(tmp_path):
    path = tmp_path / "ptxas"
    path.write_text(PTXAS)
    path.chmod(0o755)
    return {"TRITON_PTXAS_PATH": str(path), "TRITON_PTXAS_BLACKWELL_PATH": str(path)}


@pytest.mark.parametrize("lacks", ["a compiler", "ptxas"])
def test_what_is_missing_is_said_everywhere(lacks, tmp_path):
    read = read_by({"PATH": str(tmp_path)} if lacks == "a compiler" else without_ptxas(tmp_path), tmp_path)
    (reason,) = of_triton(read)
    assert reason.startswith("gpuaug.fuse runs in plain torch on cuda:0, about 50 times slower, because Triton cannot run")
    assert ("compiler" if lacks == "a compiler" else "ptxas") in reason.partition("(")[2].partition("). See")[0]
    assert read["explain"][0].endswith("; run by torch")
    assert reason in read["explain"]
    assert read["verdict"][0] == read["bench"][0] == read["result"] == reason
    assert "run by torch" in read["repr"]


def test_a_required_triton_is_an_error(tmp_path):
    read = read_by({"PATH": str(tmp_path), "GPUAUG_REQUIRE_TRITON": "1"}, tmp_path)
    assert read["error"].startswith("DeviceError: gpuaug.fuse cannot run on cuda:0 with GPUAUG_REQUIRE_TRITON set, because")
    assert of_triton(read) == []


def test_a_home_that_cannot_be_written(tmp_path):
    read = read_by({"HOME": "/dev/null", "TRITON_CACHE_DIR": None, "GPUAUG_REQUIRE_TRITON": "1"}, tmp_path)
    (told,) = of_triton(read)
    assert told.startswith(
        "Triton compiles its kernels anew in every process, because its cache /dev/null/.triton/cache cannot"
    )
    assert read["explain"][0].endswith("; run by triton")
    assert read["result"] is None
    assert not Path(read["cache"]).exists()
