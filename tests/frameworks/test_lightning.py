"""Lightning: a Trainer with the callback that wraps its loaders, loaders that a module wraps itself, and Fabric."""

import pytest
import torch
from support.process.processes import run_script
from torch.utils.data import DataLoader, TensorDataset

import gpuaug

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SAMPLES, BATCH = 12, 2
BATCHES = SAMPLES // BATCH


@pytest.fixture
def pl():
    import lightning.pytorch

    return lightning.pytorch


@pytest.fixture
def make_model(pl):
    class Model(pl.LightningModule):
        """Keeps what it was trained on and validated with."""

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen, self.validated = [], []

        def training_step(self, batch, _):
            (values,) = batch
            self.seen.append(values.tolist())
            return self.layer(values[:, None]).square().mean()

        def validation_step(self, batch, _):
            self.validated += batch[0].tolist()

        test_step = validation_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.001)

    return Model


@pytest.fixture
def make_trainer(pl, tmp_path):
    def make(*callbacks, **settings):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        kept = {"enable_checkpointing": any(isinstance(each, pl.callbacks.ModelCheckpoint) for each in callbacks)}
        return pl.Trainer(**{**quiet, **kept, "default_root_dir": tmp_path, "callbacks": [*callbacks], **settings})

    return make


def samples(shuffle=True):
    order = torch.Generator().manual_seed(5)
    return DataLoader(TensorDataset(torch.arange(float(SAMPLES))), BATCH, shuffle=shuffle, generator=order)


def stream_loaders(noise, **stages):
    from gpuaug.integrations.lightning import StreamLoaders

    return StreamLoaders(train=[noise], seed=1, **stages)


@pytest.mark.parametrize("every", [{"every_n_epochs": 1}, {"every_n_train_steps": 15}, {"every_n_train_steps": 12}])
def test_a_resumed_run_has_the_draws_of_an_uninterrupted_one(pl, make_model, make_trainer, noise, tmp_path, every):
    def run(max_epochs, *callbacks, ckpt_path=None):
        model = make_model()
        trainer = make_trainer(stream_loaders(noise), *callbacks, max_epochs=max_epochs)
        trainer.fit(model, samples(shuffle=False), ckpt_path=ckpt_path)
        return model.seen

    whole = run(4)
    assert len(whole) == 4 * BATCHES
    assert whole[:BATCHES] != whole[BATCHES : 2 * BATCHES]
    keep = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **every)
    run(3, keep)
    for path in tmp_path.glob("*.ckpt"):
        step = int(path.stem.removeprefix("step="))
        assert run(4, ckpt_path=path) == whole[step:]
    assert list(tmp_path.glob("*.ckpt"))


def test_loaders_of_every_kind_are_wrapped_with_their_stages(make_model, make_trainer, noise):
    stages = stream_loaders(noise, validate=[lambda values: -values], test=[lambda values: 10 * values])
    trainer, model = make_trainer(stages, max_epochs=1), make_model()
    trainer.fit(model, samples(), samples(shuffle=False))
    assert model.validated == [*range(0, -4, -1), *range(0, -SAMPLES, -1)]  # the sanity check has two batches
    assert isinstance(trainer.train_dataloader, gpuaug.StreamedLoader)
    model.validated.clear()
    trainer.test(model, samples(shuffle=False))
    assert model.validated == list(range(0, 10 * SAMPLES, 10))
    assert "process_dataloader" not in vars(trainer.strategy)


def test_a_loader_without_stages_and_one_that_is_wrapped_stay(make_model, make_trainer, noise):
    trainer, model = make_trainer(stream_loaders(noise), max_epochs=1), make_model()
    wrapped, validated = gpuaug.StreamedLoader(samples()), samples(shuffle=False)
    trainer.fit(model, wrapped, validated)
    assert trainer.train_dataloader is wrapped
    assert trainer.val_dataloaders is validated


def test_overfit_batches(make_model, make_trainer, noise):
    model = make_model()
    make_trainer(stream_loaders(noise), max_epochs=2, overfit_batches=2).fit(model, samples())
    assert [[int(value) for value in batch] for batch in model.seen] == 2 * [[0, 1], [2, 3]]
    assert model.seen[:2] != model.seen[2:]
    with pytest.raises(ValueError, match="needs to subclass"):
        make_trainer(overfit_batches=2).fit(make_model(), gpuaug.StreamedLoader(samples()))


def test_a_module_that_wraps_its_loader_itself(pl, make_model, make_trainer, noise, tmp_path):
    class Model(make_model):
        def train_dataloader(self):
            return gpuaug.StreamedLoader(samples(shuffle=False), [noise], seed=1)

    def run(max_epochs, *callbacks, ckpt_path=None):
        model = Model()
        make_trainer(StreamLoaders(), *callbacks, max_epochs=max_epochs).fit(model, ckpt_path=ckpt_path)
        return model.seen

    from gpuaug.integrations.lightning import StreamLoaders

    run(2, pl.callbacks.ModelCheckpoint(tmp_path, filename="last", every_n_epochs=1))
    assert run(4, ckpt_path=tmp_path / "last.ckpt") == run(4)[2 * BATCHES :]


def test_fabric(noise, tmp_path):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    with pytest.raises(TypeError, match="Only PyTorch DataLoader"):
        fabric.setup_dataloaders(gpuaug.StreamedLoader(samples()))

    def make():
        return gpuaug.StreamedLoader(samples(), [noise], seed=1, device=fabric.device)

    whole = [values.tolist() for (values,) in make()]
    wrapped_after = gpuaug.StreamedLoader(fabric.setup_dataloaders(samples(), move_to_device=False), [noise], seed=1)
    assert [values.tolist() for (values,) in wrapped_after] == whole
    loader = make()
    for number, _ in enumerate(loader):
        if number == 2:
            fabric.save(tmp_path / "state.ckpt", {"loader": loader})
    resumed = make()
    fabric.load(tmp_path / "state.ckpt", {"loader": resumed})
    assert [values.tolist() for (values,) in resumed] == whole[3:]


@pytest.mark.slow
def test_the_other_name_of_the_package():
    script = """
import pytorch_lightning as pl, torch, gpuaug
from torch.utils.data import DataLoader
from gpuaug.integrations.lightning import StreamLoaders

class Model(pl.LightningModule):
    def training_step(self, batch, _):
        assert isinstance(self.trainer.train_dataloader, gpuaug.StreamedLoader)

    def configure_optimizers(self):
        return None

callbacks = [StreamLoaders(train=[])]
trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, callbacks=callbacks)
trainer.fit(Model(), DataLoader(torch.arange(4.0), 2))
print("trained")
"""
    assert "trained" in run_script(script).stdout
