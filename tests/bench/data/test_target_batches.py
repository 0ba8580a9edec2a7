import torch
from torchvision import tv_tensors

from bench.data import target_batches

CPU = torch.device("cpu")


def test_every_form_of_a_batch_has_the_same_boxes():
    batch = target_batches.random_batch(3, 32, CPU, boxes=True)
    counts = [len(target["boxes"]) for target in batch.targets]
    assert len(set(counts)) > 1
    image, joined = batch.for_torchvision()
    assert isinstance(image, tv_tensors.Image)
    assert joined["boxes"].canvas_size == (32, 32)
    padded = batch.by_key()
    assert padded["valid"].sum(1).tolist() == counts
    for index, (sample, target) in enumerate(batch.samples()):
        assert torch.equal(sample, batch.images[index])
        assert isinstance(target["boxes"], tv_tensors.BoundingBoxes)
        labels, owners = joined["labels"].T
        assert torch.equal(joined["boxes"][owners == index], target["boxes"])
        assert torch.equal(labels[owners == index], target["labels"])
        assert torch.equal(padded["bbox_xyxy"][index][padded["valid"][index]], target["boxes"])


def test_joined_targets_come_apart_as_they_were():
    batch = target_batches.random_batch(3, 16, CPU, boxes=True)
    images, targets = map(target_batches.split_targets, target_batches.collate(batch.samples()))
    assert torch.equal(images, batch.images)
    for target, expected in zip(targets, batch.targets, strict=True):
        assert list(target) == ["boxes", "labels"]
        assert all(torch.equal(target[key], expected[key]) for key in target)


def test_every_tensor_of_a_result_is_read():
    reads = []

    class CountedTensor(torch.Tensor):
        def data_ptr(self):
            reads.append(id(self))
            return super().data_ptr()

    tensors = [torch.zeros(2).as_subclass(CountedTensor) for _ in range(4)]
    result = tensors[0], [{"boxes": tensors[1], "labels": tensors[2]}, {"boxes": tensors[3], "image_id": 3}]
    assert target_batches.read_tensors(result) is result
    assert reads == [id(tensor) for tensor in tensors]
