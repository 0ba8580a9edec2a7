"""Advice about stages: what they are given of a batch, and where they put it."""

import functools

import kornia.augmentation as K
import torch
from support.messages.registry import example, untried
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2

import gpuaug

IMAGES = torch.arange(2 * 3 * 8 * 8, dtype=torch.uint8).view(2, 3, 8, 8)
LABELS = torch.tensor([0, 2])
FLIP = v2.RandomHorizontalFlip(1.0)
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)


def run(batch, *stages):
    """What a batch becomes in stages."""
    (got,) = gpuaug.StreamedLoader([batch], stages, device="cpu")
    return got


def stage(transform=torch.negative, **options):
    return gpuaug.TransformStage(transform, **options)


@example("into must be left out with on=None")
def into_of_a_whole_batch(told):
    def swapped(batch):
        return batch[1], batch[0]

    with told:
        stage(swapped, on=None, into=1)
    assert torch.equal(run((IMAGES, LABELS), stage(swapped, on=None))[0], LABELS)


@example("must name at least one member of the batch")
def no_member(told):
    with told:
        stage(on=())
    assert torch.equal(run((LABELS, IMAGES), stage())[0], -LABELS)


@example("must be a key, an index or a tuple of them")
def members_in_a_list(told):
    def both(one, other):
        return -one, other + 1

    with told:
        stage(both, on=[0, 1])
    assert torch.equal(run((LABELS, LABELS), stage(both, on=(0, 1)))[1], LABELS + 1)


@example("must name each member once")
def member_twice(told):
    with told:
        stage(on=(0, 0))
    assert torch.equal(run((LABELS, IMAGES), stage(on=0))[0], -LABELS)


@example("on must map members to names")
def members_to_numbers(told):
    mask = IMAGES[:, :1]
    with told:
        stage(gpuaug.fuse(FLIP), on={0: 0.5, 1: 1.5})
    assert torch.equal(run((IMAGES, mask), stage(gpuaug.fuse(FLIP), on={0: "input", 1: "mask"}))[1], mask.flip(-1))


@example("Return a tuple in that order, or pass into=")
def one_value_for_two(told):
    def added(one, other):
        return one + other

    with told:
        run((LABELS, LABELS), stage(added, on=(0, 1)))
    assert torch.equal(run((LABELS, LABELS), stage(lambda one, other: (-one, other), on=(0, 1)))[0], -LABELS)
    assert torch.equal(run((LABELS, LABELS), stage(added, on=(0, 1), into=2))[2], 2 * LABELS)


@example("on must be passed for a batch that is a")
def member_of_a_dict(told):
    batch = {"images": IMAGES, "labels": LABELS}
    with told:
        run(batch, stage())
    assert torch.equal(run(batch, gpuaug.TransformStage(torch.negative, on="images"))["images"], -IMAGES)


@example("on must be left out for a batch that is a single")
def member_of_a_tensor(told):
    with told:
        run(LABELS, stage(on=1))
    assert torch.equal(run(LABELS, stage()), -LABELS)
    assert torch.equal(run((IMAGES, LABELS), stage(on=1))[1], -LABELS)


@example("on must be an index of a … of …, got …. Pass an index from 0 to …")
def member_past_the_end(told):
    with told:
        run((IMAGES, LABELS), stage(on=2))
    assert torch.equal(run((IMAGES, LABELS), stage(on=1))[1], -LABELS)


@example("Pass on=None for batches that may be empty")
def member_of_an_empty_list(told):
    with told:
        run([], stage())
    assert run([], stage(lambda batch: batch, on=None)) == []


@example("into must be left out for a batch that is a single")
def place_in_a_tensor(told):
    with told:
        run(LABELS, stage(into=1))
    assert torch.equal(run((LABELS,), stage(into=1))[1], -LABELS)


@example("or the index after its end, got")
def place_far_past_the_end(told):
    with told:
        run((IMAGES, LABELS), stage(into=4))
    assert torch.equal(run((IMAGES, LABELS), stage(on=1, into=2))[2], -LABELS)


@example("stages must be a sequence of stages")
def stage_without_a_list(told):
    with told:
        gpuaug.StreamedLoader([LABELS], torch.negative, device="cpu")
    (got,) = gpuaug.StreamedLoader([LABELS], stages=[torch.negative], device="cpu")
    assert torch.equal(got, -LABELS)


@example("name must be a non-empty string")
def empty_name(told):
    with told:
        stage(name="")
    assert torch.equal(run(LABELS, stage()), -LABELS)


@example("The names of stages must differ")
def name_twice(told):
    with told:
        run(LABELS, stage(name="one"), stage(name="one"))
    assert torch.equal(run(LABELS, stage(name="one"), stage(name="two")), LABELS)


@example("transform must be an instance, got the class")
def class_as_transform(told):
    with told:
        stage(nn.Flatten)
    assert run(IMAGES, stage(nn.Flatten())).shape == (2, 192)


@example("Wrap the operation in a function of the tensors")
def number_as_transform(told):
    with told:
        stage(3)
    assert torch.equal(run(LABELS, stage(lambda labels: labels * 3)), LABELS * 3)


@example("Pass gpuaug.fuse(…), which draws for each image")
def transform_that_draws_once(told):
    transform, images = v2.RandomCrop(4), torch.arange(64).view(1, 1, 8, 8).expand(16, 3, 8, 8).to(torch.uint8)
    with told:
        stage(transform)
    got = run(images, gpuaug.fuse(transform))
    assert not all(torch.equal(each, got[0]) for each in got)
    once = run(images, lambda images: transform(images))
    assert all(torch.equal(each, once[0]) for each in once)


@example("transform must accept images of different sizes")
def ragged_batch_for_a_transform(told):
    packed, transform = gpuaug.collate_ragged([IMAGES[0], IMAGES[1, :, :5]]), v2.Resize((4, 4))
    with told:
        run(packed, transform)
    assert run(packed, gpuaug.fuse(transform, ragged=True)).shape == (2, 3, 4, 4)


@example("Put gpuaug.fuse(…, ragged=True), which makes")
def ragged_batch_for_a_function(told):
    packed, transform = gpuaug.collate_ragged([IMAGES[0], IMAGES[1, :, :5]]), torch.negative
    with told:
        run(packed, transform)
    fused = gpuaug.fuse(v2.Resize((4, 4)), ragged=True)
    assert run(packed, fused, transform).shape == (2, 3, 4, 4)


@example("as the wrapped loader yields them")
def whole_numbers_for_kornia(told):
    wide = IMAGES.long()
    with told:
        run(wide, K.RandomHorizontalFlip(p=1.0))
    run(wide / 255, K.RandomHorizontalFlip(p=1.0))
    transform = K.RandomHorizontalFlip(p=1.0)
    with told:
        run(IMAGES, transform)
    expected = transform(IMAGES.float() / 255)
    torch.testing.assert_close(run(IMAGES, gpuaug.TransformStage(lambda images: transform(images.float() / 255))), expected)
    torch.testing.assert_close(run(IMAGES, gpuaug.fuse(transform)), expected)


def targets():
    return [{"boxes": torch.tensor([[1.0, 2, 4, 5]])} for _ in range(2)]


@example("… no longer match the images, because … transforms …")
def boxes_left_behind(told):
    transform = gpuaug.fuse(FLIP)
    with told:
        run((IMAGES, targets()), transform)
    got = run((IMAGES, targets()), gpuaug.TransformStage(transform, on={0: "input", 1: "targets"}))
    assert got[1][0]["boxes"].tolist() == [[4, 2, 7, 5]]
    run((IMAGES, targets()), lambda images: transform(images))


@example("labels no longer match the images")
def labels_left_behind(told):
    transform = gpuaug.fuse([TO_FLOAT, v2.MixUp(num_classes=3)])
    with told:
        run((IMAGES, LABELS), transform)
    got = run((IMAGES, LABELS), gpuaug.TransformStage(transform, on={0: "input", 1: "class"}))
    assert got[1].shape == (2, 3)
    run((IMAGES, LABELS), lambda images: transform(images))


@example("and pass it the labels with the data key 'class'; or mix in the dataset")
def labels_left_behind_by_a_mix_that_kornia_runs(told):
    invert, mix = K.RandomInvert(p=1.0), K.RandomMixUpV2((0.5, 0.5), p=1.0)
    with told:
        run((IMAGES / 255, LABELS), K.AugmentationSequential(invert, mix, random_apply=2))
    for fused_mix in (mix, K.RandomCutMixV2(num_mix=1, p=1.0, use_correct_lambda=True)):
        transform = gpuaug.fuse([invert, fused_mix], num_classes=3)
        got = run((IMAGES, LABELS), gpuaug.TransformStage(transform, on={0: "input", 1: "class"}))
        assert got[1].shape == (2, 3)


@example("Images of shape … are read with … channels")
def channels_last(told):
    images, transform = IMAGES.permute(0, 2, 3, 1), gpuaug.fuse(FLIP)
    with told:
        run(images, transform)
    assert torch.equal(run(images, lambda images: images.movedim(-1, 1), transform), IMAGES.flip(-1))
    run(images, lambda images: transform(images))


@example("A container of tensors must be of a type that can be rebuilt")
def container_that_cannot_be_rebuilt(told):
    class Pair(tuple):
        def __new__(cls, one, other):
            return tuple.__new__(cls, (one, other))

    with told:
        run(Pair(IMAGES, LABELS), stage())
    assert torch.equal(run((LABELS, IMAGES), stage())[0], -LABELS)

    class Moved(Pair):
        def to(self, device):
            return Moved(*(each.to(device) for each in self))

    assert isinstance(run(Moved(IMAGES, LABELS)), Moved)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, features):
        return self.linear(features)


FEATURES = torch.ones(2, 3)


@example("encoder must be an nn.Module, a bound method")
def function_as_encoder(told):
    with told:
        gpuaug.FeatureStage(torch.negative)
    assert torch.equal(run(FEATURES, gpuaug.TransformStage(torch.negative)), -FEATURES)
    encoder = torch.export.export(nn.Tanh(), (FEATURES,))
    with told:
        gpuaug.FeatureStage(encoder)
    assert torch.equal(run(FEATURES, gpuaug.FeatureStage(encoder.module())), FEATURES.tanh())


@example("Write autocast=torch.bfloat16")
def autocast_of_integers(told):
    encoder = Encoder().requires_grad_(False)
    with told:
        gpuaug.FeatureStage(encoder, autocast=torch.int8)
    assert run(FEATURES, gpuaug.FeatureStage(encoder, autocast=torch.bfloat16)).dtype is torch.bfloat16


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2)


class OnACopy(nn.Module):
    def forward(self, x):
        x = x.clone()
        return x.mul_(2)


@example("encoder must not write to its input")
def encoder_that_writes_to_its_input(told):
    with told:
        run(FEATURES.clone(), gpuaug.FeatureStage(InPlace()))
    assert torch.equal(run(FEATURES, gpuaug.FeatureStage(OnACopy())), FEATURES * 2)


@example("Fixed arguments of an encoder must not be modules")
def module_as_a_fixed_argument(told):
    class WithHelper(nn.Module):
        def __init__(self, helper):
            super().__init__()
            self.helper = helper

        def forward(self, x):
            return self.helper(x)

    with told:
        gpuaug.FeatureStage(functools.partial(nn.Bilinear(1, 1, 1).requires_grad_(False), input2=nn.Dropout()))
    assert torch.equal(run(FEATURES, gpuaug.FeatureStage(WithHelper(nn.Dropout()))), FEATURES)


@example("output must be a key, an index or a function")
def output_of_another_type(told):
    with told:
        gpuaug.FeatureStage(nn.Identity(), output=1.0)
    assert torch.equal(run(FEATURES, gpuaug.FeatureStage(nn.Identity())), FEATURES)


@example("output must name a part of the encoder's result")
def output_that_is_not_there(told):
    with told:
        run(FEATURES, gpuaug.FeatureStage(nn.Identity(), output="last_hidden_state"))
    with told:
        run(FEATURES, gpuaug.FeatureStage(nn.Identity(), output="relu"))
    assert torch.equal(run(FEATURES, gpuaug.FeatureStage(nn.Identity(), output=lambda result: result.relu())), FEATURES.relu())
    assert torch.equal(run(FEATURES, gpuaug.FeatureStage(nn.Identity())), FEATURES)


@example("shapes must be a list of shapes or tensors", "shapes must hold shapes, tensors or tuples")
def shapes_of_graphs(told):
    features = gpuaug.FeatureStage(nn.Identity())
    for wrong in (FEATURES, [2.0]):
        with told:
            features.capture(wrong)
    features.capture([(8, 3, 512, 512)])


@example("Freeze all parameters with ….requires_grad_(False)")
def encoder_that_trains(told):
    encoder = Encoder()
    with told:
        run(FEATURES, gpuaug.FeatureStage(encoder))
    encoder.requires_grad_(False)
    torch.testing.assert_close(run(FEATURES, gpuaug.FeatureStage(encoder)), encoder(FEATURES))
    model = nn.Sequential(encoder, nn.Linear(2, 1))  # the head is trained
    with told:
        run(FEATURES, gpuaug.FeatureStage(model.forward))
    model[1](run(FEATURES, gpuaug.FeatureStage(encoder))).sum().backward()


@example("Move the encoder with ….to(…)")
def encoder_on_another_device(told):
    encoder = Encoder().requires_grad_(False).to("meta")
    with told:
        run(FEATURES, gpuaug.FeatureStage(encoder))
    encoder = Encoder().requires_grad_(False).to("cpu")
    torch.testing.assert_close(run(FEATURES, gpuaug.FeatureStage(encoder)), encoder(FEATURES))


@example("could not stack these samples")
def samples_of_several_sizes(told):
    dataset = [IMAGES[0], IMAGES[1, :, :5]]
    with told:
        list(gpuaug.StreamedLoader(DataLoader(dataset, batch_size=2), device="cpu"))
    (got,) = gpuaug.StreamedLoader(DataLoader(dataset, batch_size=2, collate_fn=gpuaug.collate_ragged), device="cpu")
    assert len(got) == 2
    batched = [gpuaug.collate_ragged(dataset)] * 2
    with told:
        list(gpuaug.StreamedLoader(DataLoader(batched), device="cpu"))
    assert len(list(gpuaug.StreamedLoader(DataLoader(batched, batch_size=None), device="cpu"))) == 2


untried(
    "needs a GPU",
    "A batch cannot be moved to",
    "The copy of a batch does not overlap with training",
    "because a CUDA graph cannot hold its encoder",
    "run without CUDA graphs, because a graph of",
)
