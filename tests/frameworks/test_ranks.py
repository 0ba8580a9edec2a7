"""Two processes over gloo, started by torchrun: who trains on what."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

COMMON = """
import json, os, sys, warnings
import torch
from torch.utils.data import DataLoader, TensorDataset
import gpuaug

said = []
warnings.simplefilter("ignore")
warnings.simplefilter("always", gpuaug.GpuAugWarning)
warnings.showwarning = lambda message, *others: said.append(str(message))
rank = int(os.environ["RANK"])
torch.manual_seed(0)
data = TensorDataset(torch.arange(21.0))
epochs = []

def noise(values):
    return values + torch.rand_like(values)

def write(**found):
    with open(os.path.join(sys.argv[1], f"{rank}.json"), "w") as file:
        json.dump(found, file)
"""

ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
model = accelerator.prepare(torch.nn.Linear(1, 1))
training = gpuaug.StreamedLoader(accelerator.prepare(DataLoader(data, 2, shuffle=True)), [noise])
for epoch in range(2):
    epochs.append([])
    stepped = []
    for number, (values,) in enumerate(training):
        epochs[-1] += values.tolist()
        with accelerator.accumulate(model):
            accelerator.backward(model(values[:, None]).square().mean())
            stepped += [number] if accelerator.sync_gradients else []
accelerator.register_for_checkpointing(training)
rest = []
for number, (values,) in enumerate(training):
    rest += values.tolist() if number > 2 else []
    if number == 2:
        accelerator.save_state(os.path.join(sys.argv[1], "state"))
accelerator.wait_for_everyone()
accelerator.load_state(os.path.join(sys.argv[1], "state"))
resumed = [value for (values,) in training for value in values.tolist()]
evaluation = gpuaug.StreamedLoader(accelerator.prepare(DataLoader(data, 2)), depth=4)
gathered = torch.cat([accelerator.gather_for_metrics(values) for (values,) in evaluation]).tolist()
assert not said
list(accelerator.prepare(gpuaug.StreamedLoader(DataLoader(data, 2))))
write(epochs=epochs, stepped=stepped, gathered=gathered, said=said, rest=rest, resumed=resumed)
"""

LIGHTNING = """
import lightning.pytorch as pl
from gpuaug.integrations.lightning import StreamLoaders

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def on_train_epoch_start(self):
        epochs.append([])

    def training_step(self, batch, _):
        epochs[-1] += batch[0].tolist()
        return self.layer(batch[0][:, None]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.001)

def fit(loader, *callbacks):
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False, callbacks=[*callbacks])
    trainer.fit(Model(), loader)

fit(DataLoader(data, 2, shuffle=True), StreamLoaders(train=[noise]))
assert not said
fit(gpuaug.StreamedLoader(DataLoader(data, 2)))
write(epochs=epochs[:2], said=said)
"""


@pytest.mark.parametrize("script", [ACCELERATE, LIGHTNING], ids=["accelerate", "lightning"])
def test_ranks_share_each_epoch_and_draw_by_themselves(script, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(COMMON + script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path), str(tmp_path)]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for epoch in range(2):
        values = [value for rank in ranks for value in rank["epochs"][epoch]]
        samples = sorted(int(value) for value in values)
        assert sorted(set(samples)) == list(range(21))
        assert len(samples) <= 24  # a few come twice, so that ranks have as many
        assert len({round(value % 1, 4) for value in values}) > len(set(samples)), "ranks drew the same"
    assert ranks[0]["epochs"][0] != ranks[0]["epochs"][1]
    for found in ranks:
        assert "ranks reads all 21 samples" in " ".join(found["said"])
        assert found.get("gathered", list(range(21))) == list(range(21))
        assert found.get("stepped", [3, 5]) == [3, 5]
        assert found.get("resumed") == found.get("rest")
