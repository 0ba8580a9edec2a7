"""Replacement of samples in a batch that several stages decode."""

import functools
import io
import random

import numpy as np
import pytest
import torch
from PIL import Image
from support.comparison.values import assert_values
from support.files import nvjpeg_double
from support.files.encoded import by_pil, encoded
from support.video.videos import lossless
from torch import Tensor

from gpuaug import DecodeStage, StreamedLoader, collate_encoded, read_clip
from gpuaug.core.batch import map_leaves
from gpuaug.core.encoded import Encoded
from gpuaug.core.errors import DecodeError, SelectionError
from gpuaug.core.rng import Position
from gpuaug.core.streams import Lanes
from gpuaug.decode.layout import source_indices

CPU = torch.device("cpu")


def picture(mode, number):
    file = io.BytesIO()
    Image.new(mode, (8 + number, 8), (number,) * len(mode)).save(file, "PNG")
    return file.getvalue()


@functools.cache
def video_of(number):
    return lossless(f"value {number}", [np.full((8, 8, 3), number, np.uint8)])


MAKERS = {
    "image": lambda number: picture("RGB", number),
    "mask": lambda number: picture("L", number),
    "clip": lambda number: read_clip(video_of(number), 1),
}
"""Member → function that returns the file of a sample, all of whose values are the number of the sample."""

DAMAGED = {
    "image": lambda number: random.choice([b"\x89PNG\r\n\x1a\n", picture("RGB", number)[:43]]),  # the decoder finds the second
    "mask": lambda number: random.choice([b"\x89PNG\r\n\x1a\n", picture("L", number)[:43]]),
    "clip": lambda number: read_clip("missing.mp4", 1),
}


def in_a_loader(batch, stages):
    streamed = StreamedLoader([batch], stages, device="cpu")
    (result,) = streamed
    return result, streamed.stats().replaced


def one_after_another(batch, stages):
    """Collect the images of each stage before the next stage is submitted, as the profiler does."""
    lanes, iterator_state, replaced = Lanes(CPU), {}, 0
    bound_stages = [stage.bind(f"decode {index}", lanes) for index, stage in enumerate(stages)]
    try:
        for bound in bound_stages:
            batch, work = bound.submit(batch, iterator_state, Position(0, 0, 0, 0), ())
            batch = work.collect(batch)
            replaced += len(work.replaced_samples)
        return map_leaves(lambda leaf: leaf.to(CPU) if hasattr(leaf, "to") else leaf, batch), replaced
    finally:
        for bound in bound_stages:
            bound.close(iterator_state)


def test_a_member_that_two_stages_decode_is_refused():
    batch = collate_encoded([(picture("RGB", 1), 1)])
    with pytest.raises(SelectionError, match="on must name encoded images in the batch, got images of a DecodeStage"):
        in_a_loader(batch, [DecodeStage(on=0), DecodeStage(on=0, name="second")])


def values(member):
    """The number of the sample that each entry of a member belongs to."""
    if isinstance(member, Encoded):
        assert not member.headers.problems
        return values(DecodeStage()(member, "cpu"))
    return [int(entry.flatten()[0]) if isinstance(entry, Tensor) else int(entry) for entry in member]


@pytest.mark.parametrize("run", [in_a_loader, one_after_another])
def test_a_sample_is_replaced_in_every_member_whatever_the_stages(run):
    rng = random.Random(0)
    random.seed(0)
    outcomes = set()
    for _ in range(50):
        count, members = rng.randint(2, 5), rng.sample(list(MAKERS), rng.randint(1, 3))
        stage_of = {name: rng.randrange(4) for name in members}
        stage_of[members[0]] = 1
        decoded = [name for name in members if stage_of[name]]  # stage 0: no stage decodes the member
        bad = {name: {number for number in range(count) if rng.random() < 0.2} if stage_of[name] else set() for name in members}
        samples = [
            {name: (DAMAGED if number in bad[name] else MAKERS)[name](number) for name in members}
            | {"label": number, "name": str(number)}
            for number in range(count)
        ]
        stages = []
        for stage in rng.sample(sorted({*stage_of.values()} - {0}), len({*stage_of.values()} - {0})):
            on = tuple(name for name in members if stage_of[name] == stage)
            harmless = not any(bad[name] for name in on) and rng.random() < 0.5
            on_error = "raise" if harmless else "replace"
            channels = 3 if "image" in on else None
            stages.append(DecodeStage(on=on, backend="cpu", channels=channels, on_error=on_error, threads=1))
        all_bad = set().union(*bad.values())
        if len(all_bad) == count:
            with pytest.raises(DecodeError, match=f"{count - 1} other sample.* needs at least one sample per batch"):
                run(collate_encoded(samples), stages)
            continue
        batch, replaced = run(collate_encoded(samples), stages)
        assert replaced == len(all_bad)
        expected = source_indices(count, all_bad).tolist()
        for name in ("label", "name", *members):
            assert values(batch[name]) == expected, name
        outcomes.add((len(stages), len(decoded) == len(members), min(replaced, 2)))
    assert len(outcomes) >= 12  # a sweep without several stages and bad files would prove nothing


def test_an_error_of_a_stage_names_the_stage(caplog):
    samples = [{"image": picture("RGB", number), "mask": picture("L", number)} for number in range(3)]
    samples[0]["image"], samples[2]["mask"] = samples[0]["image"][:43], samples[2]["mask"][:50]
    stages = [DecodeStage(on="image", on_error="replace", name="first"), DecodeStage(on="mask", name="second")]
    for order in (stages, stages[::-1]):
        with pytest.raises(DecodeError, match=r"because of sample 2: .*pass on_error='replace'") as raised:
            in_a_loader(collate_encoded(samples), order)
        assert raised.value.__notes__ == ["gpuaug: raised in stage 'second', at batch 0 of epoch 0."]
    caplog.clear()
    in_a_loader(collate_encoded(samples), [stages[0], DecodeStage(on="mask", on_error="replace")])
    assert [record.getMessage().count("sample ") for record in caplog.records] == [1, 1], "each sample is logged once"


@pytest.mark.parametrize("run", [in_a_loader, one_after_another])
def test_members_with_other_numbers_of_files_are_an_error_at_the_replacement(run):
    """A user's collate function may return such members. Their files cannot be assigned to samples."""
    files = [picture("RGB", number) for number in range(4)]
    views = collate_encoded(files * 2)
    damaged = collate_encoded([files[0], files[1][:43], *files[2:]])
    one_stage = [DecodeStage(on_error="replace")]
    two_stages = [DecodeStage(on=name, on_error="replace") for name in ("image", "views")]
    for stages in (one_stage, two_stages, two_stages[::-1], [two_stages[0]], [two_stages[0], DecodeStage(on="views")]):
        good, _ = run({"views": views, "image": collate_encoded(files)}, stages)
        assert (len(good["image"]), len(good["views"])) == (4, 8)
        for batch in ({"views": views, "image": damaged}, {"image": damaged, "views": views}):
            with pytest.raises(DecodeError, match=r"Sample 1 cannot be replaced, because the batch has a member of \d encoded"):
                run(batch, stages)


def test_views_that_no_stage_decodes_are_replaced():
    samples = [(picture("RGB", number), [picture("RGB", number), picture("L", number)]) for number in range(2)]
    samples[1] = (samples[1][0][:43], samples[1][1])
    batch, replaced = in_a_loader(collate_encoded(samples), [DecodeStage(on=0, on_error="replace")])
    assert (values(batch[0]), [values(view) for view in batch[1]], replaced) == ([0, 0], [[0, 0], [0, 0]], 1)


@pytest.mark.parametrize("bad", [None, (2, 1)])
def test_engines_decode_the_members_of_a_batch_together(bad, monkeypatch):
    """One call per chroma subsampling, because a call of a few files leaves engines idle."""
    calls = []

    class Engines(nvjpeg_double.BatchDecoder):
        def decode_call(self, files, stream):
            calls.append(len(files))
            return super().decode_call(files, stream)

    nvjpeg_double.use(monkeypatch, Engines)
    subsampling = {(member, sample): 2 * ((member + sample) % 3 == 0) for member in range(4) for sample in range(3)}
    files = {key: encoded(20 + 8 * key[0], 40 - 8 * key[1], subsampling=value) for key, value in subsampling.items()}
    samples = [{"image": [files[member, sample] for member in range(4)]} for sample in range(3)]
    if bad is not None:
        member, sample = bad
        samples[sample]["image"][member] = files[bad][:-40]  # the header is whole
    loader = StreamedLoader([collate_encoded(samples)], [DecodeStage(backend="engines", on_error="replace")], device="cpu")
    (batch,) = loader
    for member, images in enumerate(batch["image"]):
        for sample, image in enumerate(images):
            source = 0 if bad is not None and sample == bad[1] else sample
            assert_values(image.permute(1, 2, 0), torch.tensor(by_pil(files[member, source])))
    if bad is None:
        assert sorted(calls) == sorted(list(subsampling.values()).count(value) for value in (0, 2))
