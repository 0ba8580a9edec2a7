"""Training inside of ``step_first`` on a real device: the weights and losses of the default stream, whatever is delayed."""

import copy
import io
import os
import subprocess
import sys
import threading
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from support import internals
from support.gpu.cuda_loops import CYCLES, Encoder, assert_same, host_batches, poison, reference, stages_for
from torch import nn

import gpuaug
from gpuaug import StreamedLoader
from gpuaug.core.streams import Lane

pytestmark = pytest.mark.gpu

CLASSES = 96  # labels of host_batches
ROOT = Path(__file__).parents[2]


@pytest.fixture
def encoder():
    return Encoder().cuda().requires_grad_(False)


@pytest.fixture
def head():
    torch.manual_seed(0)
    return nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, CLASSES)).cuda()


def checkpoint(module):
    """The weights, as ``torch.save`` writes them now."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def plain_step(model, optimizer):
    def step(images, labels):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def scaled_step(model, optimizer):
    """AMP with a scaler, whose second step overflows; gradients of two batches are accumulated."""
    scaler, steps = torch.amp.GradScaler("cuda", init_scale=2.0**10), iter(range(1000))

    def step(images, labels):
        number = next(steps)
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(model(images), labels) / 2
        scaler.scale(loss * (float("inf") if number == 2 else 1.0)).backward()
        if number % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return loss.detach()

    return step


def item_step(model, optimizer):
    step = plain_step(model, optimizer)
    return lambda images, labels: torch.tensor(step(images, labels).item(), device="cuda")


def compiled_step(model, optimizer, **options):
    return plain_step(torch.compile(model, **options), optimizer)


def graph_step(model, optimizer, own_stream=False):
    """The forward and backward pass in a graph of the user's, captured at the first batch on PyTorch's stream or on ours."""
    captured = {}

    def forward_and_backward():
        loss = nn.functional.cross_entropy(model(captured["images"]), captured["labels"])
        loss.backward()
        return loss.detach()

    def capture(images, labels):
        captured.update(images=images.clone(), labels=labels.clone())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                optimizer.zero_grad(set_to_none=True)
                forward_and_backward()
        torch.cuda.current_stream().wait_stream(side)
        optimizer.zero_grad(set_to_none=True)
        captured["graph"] = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        may_capture = own_stream and current != torch.cuda.default_stream()
        with torch.cuda.graph(captured["graph"], stream=current if may_capture else None):
            captured["loss"] = forward_and_backward()

    def step(images, labels):
        if not captured:
            capture(images, labels)
        captured["images"].copy_(images)
        captured["labels"].copy_(labels)
        captured["graph"].replay()
        optimizer.step()
        return captured["loss"].clone()

    return step


STEPS = {
    "plain": plain_step,
    "scaler and accumulation": scaled_step,
    "item": item_step,
    "compiled": compiled_step,
    "compiled to graphs": partial(compiled_step, mode="reduce-overhead"),
    "the user's graph": graph_step,
    "the user's graph, same stream": partial(graph_step, own_stream=True),
}


def train(encoder, head, make_step, *, first):
    """Train for two epochs, each step behind a delay, and save. Returns losses and weights."""
    model, losses = copy.deepcopy(head), []
    step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    loader = StreamedLoader(host_batches(), stages_for(encoder), seed=1)
    with gpuaug.step_first() if first else nullcontext():
        default = torch.cuda.current_stream() == torch.cuda.default_stream()
        assert default is not first
        for _ in range(2):
            for images, labels in loader:
                torch.cuda._sleep(CYCLES // 10)
                losses.append(step(images, labels))
                del images, labels  # while the step that reads them is still queued
        torch.cuda._sleep(CYCLES)  # the checkpoint must wait for the last step
        with torch.no_grad():
            torch._foreach_add_([*model.parameters()], 0.125)
    return torch.stack(losses).cpu(), checkpoint(model)


# Autograd creates the gradients of a captured model on the stream of the capture.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize("kind", STEPS)
def test_training_is_the_same_on_either_stream(encoder, head, kind):
    torch._dynamo.reset()
    losses, weights = train(encoder, head, STEPS[kind], first=False)
    first_losses, first_weights = train(encoder, head, STEPS[kind], first=True)
    assert losses.isfinite().all()
    torch.testing.assert_close(first_losses, losses)
    torch.testing.assert_close(first_weights, weights)


def test_plain_training_raises_no_warning_of_autograd_even_after_steps_outside(encoder, head):
    loader = StreamedLoader(host_batches(count=3), stages_for(encoder), seed=1)
    step = plain_step(head, torch.optim.SGD(head.parameters(), lr=0.05))
    torch.set_warn_always(True)  # otherwise this process may have shown the warning already
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="The AccumulateGrad node's stream")
            for context in (nullcontext(), gpuaug.step_first(), nullcontext()):
                with context:
                    for images, labels in loader:
                        step(images, labels)
    finally:
        torch.set_warn_always(False)


def test_stream_has_priority_and_is_made_once_per_thread(encoder):
    def inside():
        with gpuaug.step_first():
            current = torch.cuda.current_stream()
            with gpuaug.step_first():
                assert torch.cuda.current_stream() == current
            with torch.cuda.stream(torch.cuda.Stream()), gpuaug.step_first():
                assert torch.cuda.current_stream() == current
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        return current

    first, in_thread = inside(), []
    assert inside() == first
    thread = threading.Thread(target=lambda: in_thread.append(inside()))
    thread.start()
    thread.join()
    assert in_thread[0] != first
    loader = StreamedLoader(host_batches(count=2), stages_for(encoder))
    lanes = internals.shared(loader).lanes
    assert first.priority < lanes.copy.stream.priority == lanes.lane("stage/feature").stream.priority


def work_inside_and_outside():
    """Values that the step writes late, and that the loop writes late, each read and freed on the other side."""
    totals, shared = [], torch.zeros(1 << 20, device="cuda")
    for value in range(1, 5):
        torch.cuda._sleep(CYCLES)
        shared.fill_(value)  # read inside
        with gpuaug.step_first():
            totals.append(shared.double().sum())
            torch.cuda._sleep(CYCLES)
            shared.fill_(-value)
            inside = torch.full((1 << 20,), float(value), device="cuda")
        totals.append(shared.double().sum())
        torch.cuda._sleep(CYCLES)
        totals.append(inside.double().sum())
        del inside  # while the default stream is yet to read it
        with gpuaug.step_first():
            poison()
    return [total.item() / (1 << 20) for total in totals]


WANT = [sign * value for value in range(1, 5) for sign in (1.0, -1.0, 1.0)]


def test_work_inside_is_ordered_with_work_outside():
    with gpuaug.step_first():
        pass  # the stream exists
    assert work_inside_and_outside() == WANT


@pytest.mark.parametrize("broken", ["step", "outer"])
def test_removed_waits_change_values(monkeypatch, broken):
    real = Lane.wait
    monkeypatch.setattr(Lane, "wait", lambda lane, event: None if lane.name == broken else real(lane, event))
    assert work_inside_and_outside() != WANT
    torch.cuda.synchronize()


def test_order_after_an_error():
    values = torch.zeros(1 << 20, device="cuda")

    def fail():
        with gpuaug.step_first():
            torch.cuda._sleep(CYCLES)
            values.fill_(1.0)
            raise RuntimeError("the step failed")

    with pytest.raises(RuntimeError, match="the step failed"):
        fail()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert values.sum().item() == 1 << 20


def test_batches_of_a_loader_that_trains_inside_and_evaluates_outside(encoder):
    batches, stages = host_batches(), stages_for(encoder)[:1]
    want = reference(batches, stages)
    loader = StreamedLoader(batches, stages, depth=2, seed=1)
    for turn in range(4):
        kept = []
        loader.set_epoch(0)
        with gpuaug.step_first() if turn % 2 else nullcontext():
            for batch in loader:
                torch.cuda._sleep(CYCLES // 20)
                kept.append(tuple(tensor.clone() for tensor in batch))
                del batch
                poison()
        assert_same(kept, want)
        del kept


def test_reserved_memory_is_flat_over_contexts(encoder, head):
    loader = StreamedLoader(host_batches(count=4), stages_for(encoder), seed=1)
    step, reserved = plain_step(head, torch.optim.SGD(head.parameters(), lr=0.01)), []
    for _ in range(20):
        with gpuaug.step_first():
            for images, labels in loader:
                loss = step(images, labels)
        del images, labels
        assert loss.item() > 0
        reserved.append(torch.cuda.memory_reserved())
    assert set(reserved[2:]) == {reserved[2]}


def test_context_within_a_capture_is_part_of_the_graph():
    static, graph = torch.ones(1 << 20, device="cuda"), torch.cuda.CUDAGraph()
    with gpuaug.step_first():
        static * 2
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        with gpuaug.step_first():
            doubled = static * 2
        result = doubled + 1
    static.fill_(3.0)
    graph.replay()
    assert result.unique().tolist() == [7.0]


def test_profile_measures_the_loop_with_the_step_first():
    loader = StreamedLoader(host_batches(count=40), [lambda images: images.float() / 255])
    weights = torch.randn(3 * 64 * 64, 16, device="cuda")

    def step(batch):
        return batch[0].flatten(1) @ weights

    report = gpuaug.profile(loader, step, batches=8, rounds=2, show=False)
    assert report.step_first.median > 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert {"name": "loop, step first", "wall_ms": report.step_first.median}.items() <= report.rows()[-2].items()
    copied = gpuaug.profile(StreamedLoader(host_batches(count=40)), step_of_bytes, batches=8, rounds=1, show=False)
    assert copied.step_first is None  # no stage computes beside the step


def step_of_bytes(batch):
    return batch[0].float().sum()


@pytest.mark.multigpu
def test_context_is_on_the_gpu_that_is_named():
    before = torch.cuda.current_stream(0)
    with gpuaug.step_first("cuda:1"):
        assert torch.cuda.current_device() == 1
        assert torch.cuda.current_stream().priority < 0
        assert torch.cuda.current_stream(0) == before
    assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream(1) == torch.cuda.default_stream(1)


RANKS = """
import copy, sys, warnings
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import gpuaug

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
torch.manual_seed(0)
start = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU()))).cuda()
batches = [torch.randn(64, 512, generator=torch.Generator().manual_seed(10 * n + rank)).pin_memory() for n in range(12)]

def data_parallel(model):
    return DistributedDataParallel(model, device_ids=[rank], bucket_cap_mb=1)

def fully_sharded(model):
    from torch.distributed.fsdp import fully_shard
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)

def fsdp_1(model):
    from torch.distributed.fsdp import FullyShardedDataParallel
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=rank)

def weights_of(model):
    if sys.argv[1] == "fully_sharded":
        return [p.full_tensor() for p in model.parameters()]
    if sys.argv[1] == "fsdp_1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        with FullyShardedDataParallel.summon_full_params(model):
            return [p.detach().clone() for p in model.parameters()]
    return [p.detach().clone() for p in model.parameters()]

wrap = globals()[sys.argv[1]]

def train(first, wrap_inside=True):
    module = copy.deepcopy(start)
    loader = gpuaug.StreamedLoader(batches, [lambda x: x + 0.1 * torch.rand_like(x)], seed=1, rank=rank)
    if not wrap_inside:
        model = wrap(module)
    with gpuaug.step_first() if first else nullcontext():
        if wrap_inside:
            model = wrap(module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for number, batch in enumerate(loader):
            torch.cuda._sleep(2_000_000)
            sync = number % 2 == 1
            context = nullcontext()
            if sys.argv[1] == "data_parallel" and not sync:
                context = model.no_sync()
            with context:
                model(batch).square().mean().backward()
            if sync:
                optimizer.step()
                optimizer.zero_grad()
            del batch
    return [weight.cpu() for weight in weights_of(model)]

want = train(first=False)
with warnings.catch_warnings():
    warnings.filterwarnings("error", message="The AccumulateGrad node's stream")
    got = train(first=True)
same = {"rtol": 1e-3, "atol": 1e-4}
torch.testing.assert_close(got, want, **same)
torch.testing.assert_close(train(first=True, wrap_inside=False), want, **same)
assert not all(torch.equal(weight, other.detach().cpu()) for weight, other in zip(got, start.parameters(), strict=True))
dist.destroy_process_group()
print("same", flush=True)
"""


FRAMEWORKS = """
import copy, os, sys, tempfile
from contextlib import nullcontext
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import gpuaug

torch.manual_seed(0)
start = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
dataset = TensorDataset(torch.randn(192, 512))
device = f"cuda:{os.environ['LOCAL_RANK']}"

def augment(inputs):
    torch.cuda._sleep(1_000_000)
    return inputs + 0.1 * torch.rand_like(inputs)

def loss_of(model, batch):
    torch.cuda._sleep(2_000_000)
    return model(batch[0]).square().mean()

def with_accelerate(first):
    from accelerate import Accelerator
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = copy.deepcopy(start)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), DataLoader(dataset, 8)
    )
    loader = gpuaug.StreamedLoader(loader, [gpuaug.TransformStage(augment, on=0)], seed=1)
    with gpuaug.step_first(accelerator.device) if first else nullcontext():
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            del batch
    return accelerator.unwrap_model(model)

def with_lightning(first):
    import pytorch_lightning as pl
    from gpuaug.integrations.lightning import StreamLoaders

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = copy.deepcopy(start)

        def training_step(self, batch, _):
            return loss_of(self.layers, batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    module = Module()
    trainer = pl.Trainer(
        max_epochs=1, accelerator="gpu", devices=2, strategy="ddp", accumulate_grad_batches=2,
        callbacks=[StreamLoaders(train=[gpuaug.TransformStage(augment, on=0)], seed=1)], default_root_dir=tempfile.mkdtemp(),
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    with gpuaug.step_first(device) if first else nullcontext():
        trainer.fit(module, DataLoader(dataset, 8))
    return module.layers

train = globals()[sys.argv[1]]
want, got = ([weight.cpu() for weight in train(first).parameters()] for first in (False, True))
torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
assert not all(torch.equal(weight, other) for weight, other in zip(got, start.parameters(), strict=True))
torch.distributed.destroy_process_group()
print("same", flush=True)
"""


@pytest.mark.multigpu
@pytest.mark.parametrize(
    ("script", "name"),
    [
        *((RANKS, wrapper) for wrapper in ("data_parallel", "fully_sharded", "fsdp_1")),
        (FRAMEWORKS, "with_accelerate"),
        (FRAMEWORKS, "with_lightning"),
    ],
    ids=lambda value: "" if "\n" in value else value,
)
def test_training_on_two_gpus_is_the_same_on_either_stream(script, name, tmp_path):
    if script is FRAMEWORKS:
        pytest.importorskip({"with_accelerate": "accelerate", "with_lightning": "pytorch_lightning"}[name])
    path = tmp_path / "train.py"
    path.write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path), name]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("same") == 2
