"""Hugging Face's Trainer, whose loaders are wrapped where it makes them, and its image processors."""

import kornia.augmentation as K
import pytest
import torch
from support.comparison.replay import photographs
from support.comparison.values import assert_values
from torch.utils.data import Dataset, default_collate
from torchvision.transforms import v2

import gpuaug

pytestmark = pytest.mark.frameworks

BATCH = 4


class Samples(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"pixels": torch.tensor([float(index)]), "labels": torch.tensor(index)}


class Model(torch.nn.Module):
    """Keeps what it was trained on."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def forward(self, pixels, labels=None):
        if self.training:
            self.seen.append(pixels.flatten().tolist())
        return {"loss": self.layer(pixels).square().mean(), "logits": pixels}


@pytest.fixture
def make_trainer(noise, tmp_path):
    transformers = pytest.importorskip("transformers")
    from accelerate.state import AcceleratorState, GradientState

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            augment = gpuaug.TransformStage(noise, on="pixels")
            return gpuaug.StreamedLoader(super().get_train_dataloader(), [augment])

        def get_eval_dataloader(self, eval_dataset=None):
            scale = gpuaug.TransformStage(lambda pixels: pixels / 2, on="pixels")
            return gpuaug.StreamedLoader(super().get_eval_dataloader(eval_dataset), [scale])

    def make(samples=40, **settings):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        defaults = {
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": BATCH,
            "num_train_epochs": 3,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
        }
        args = transformers.TrainingArguments(str(tmp_path), **{**defaults, **settings})
        data = Samples(samples)
        torch.manual_seed(0)
        return Trainer(Model(), args, train_dataset=data, eval_dataset=data, data_collator=default_collate)

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("samples", [100, 40, 42])
def test_evaluation_counts_every_sample(make_trainer, samples):
    trainer = make_trainer(samples)
    trainer.compute_metrics = lambda found: {"predictions": found.predictions.flatten().tolist()}
    metrics = trainer.evaluate()
    assert metrics["eval_predictions"] == [index / 2 for index in range(samples)]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_epoch_has_all_samples_with_draws_of_its_own(make_trainer, workers):
    trainer = make_trainer(42, gradient_accumulation_steps=4, dataloader_num_workers=workers)
    trainer.train()
    assert trainer.state.global_step == 3 * 3
    values = [[value for batch in trainer.model.seen[11 * n :][:11] for value in batch] for n in range(3)]
    assert all(sorted(int(value) for value in epoch) == list(range(42)) for epoch in values)
    draws = [[value % 1 for value in sorted(epoch)] for epoch in values]
    assert draws[0] != draws[1] != draws[2]


@pytest.mark.parametrize(("at", "accumulation"), [(15, 1), (20, 1), (14, 2)])
def test_a_resumed_run_goes_on_as_an_uninterrupted_one(make_trainer, monkeypatch, at, accumulation):
    import transformers

    from gpuaug.integrations.accelerate import skip_first_batches

    monkeypatch.setattr(transformers.trainer, "skip_first_batches", skip_first_batches)
    whole = make_trainer(gradient_accumulation_steps=accumulation)
    whole.train()
    step = at // accumulation
    stopped = make_trainer(save_strategy="steps", save_steps=step, gradient_accumulation_steps=accumulation)
    stopped.train()
    resumed = make_trainer(gradient_accumulation_steps=accumulation)
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-{step}")
    assert stopped.model.seen == whole.model.seen
    assert resumed.model.seen == whole.model.seen[step * accumulation :]
    assert torch.equal(resumed.model.layer.weight, whole.model.layer.weight)


def test_a_run_that_is_resumed_without_the_line_for_it_says_the_line(make_trainer, monkeypatch):
    import accelerate
    import transformers

    monkeypatch.setattr(transformers.trainer, "skip_first_batches", accelerate.skip_first_batches)
    make_trainer(save_strategy="steps", save_steps=15).train()
    resumed = make_trainer()
    with pytest.raises(gpuaug.ArgumentError, match=r"transformers.trainer.skip_first_batches = gpuaug.integrations"):
        resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-15")


@pytest.mark.parametrize("name", ["ViT", "CLIP", "DeiT", "Siglip", "Blip", "Bit", "ChineseCLIP", "MobileNetV1", "MobileNetV2"])
def test_an_image_processor_written_out_is_one_launch_with_its_values(name):
    """As docs/validation.md writes it out."""
    transformers = pytest.importorskip("transformers")
    processor = getattr(transformers, f"{name}ImageProcessor")()
    if not hasattr(processor, "backend"):
        pytest.skip("transformers before 5 returns other pixels from Pillow")
    if name not in ("ViT", "CLIP", "Siglip"):  # test_processors.py
        with pytest.raises(gpuaug.ArgumentTypeError, match="Write out what it does"):
            gpuaug.fuse(processor)
    size, crop = processor.size, processor.crop_size
    sides = [size.shortest_edge] if size.shortest_edge else [size.height, size.width]
    transforms = [v2.Resize(sides, processor.resample)]
    transforms += [K.CenterCrop((crop.height, crop.width))] if processor.do_center_crop else []
    transforms += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(processor.image_mean, processor.image_std)]
    # Images that are resized to all remainders of the margin by 4: halves are rounded down, not to even.
    images = [photographs(1, 3, *sides)[0] for sides in ((240, 301), (300, 260), *((270, 271 + n) for n in range(6)))]
    preprocess = gpuaug.fuse(transforms, ragged=True)
    assert preprocess.explain().launches == 1
    got = preprocess(gpuaug.collate_ragged(images))
    assert_values(
        got, processor(images, return_tensors="pt")["pixel_values"], atol=2.01 / 255 / 0.26
    )  # rounded to bytes per axis
