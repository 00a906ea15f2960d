"""Micro-batches of images: a function of their number alone, whoever makes them and wherever a run begins."""

import random
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

from qtrain.core.errors import UserError
from qtrain.data.images.augment import ImageTransform, Mixer, make_augmentation
from qtrain.data.images.image_loader import BatchMaker, ImageLoader
from qtrain.data.images.images import open_images
from tests.data.images.pictures import write_folder

pytest.importorskip("timm")

CONFIG = {"input_size": (3, 8, 8), "mean": (0.5,) * 3, "std": (0.2,) * 3, "interpolation": "bicubic"}
CONFIG |= {"crop_pct": 0.9, "crop_mode": "center"}
EVERYTHING = {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.5, "mixup": 0.8, "cutmix": 1.0, "vflip": 0.3}


@pytest.fixture
def images(tmp_path):
    return open_images({"type": "image_folder", "path": str(write_folder(tmp_path / "images"))}, "--train_ds")


def maker(images, options=None, seed=1, micro=2, batch=4, dtype=torch.float32) -> BatchMaker:
    chosen = make_augmentation(options)
    return BatchMaker(images, ImageTransform(CONFIG, chosen), Mixer(chosen, 3), seed, micro, batch, dtype)


def take(loader, count: int) -> list:
    with loader:
        return [next(loader) for _ in range(count)]


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.tensors(), b.tensors(), strict=True))


@pytest.mark.parametrize("options", [{}, EVERYTHING, {"label_smoothing": 0.1, "color_jitter": 0.9}])
def test_a_resumed_loader_goes_on_at_the_exact_image(images, options):
    """Across an epoch's end, and while other code draws from the same global generators."""
    whole = take(ImageLoader(maker(images, options)), 17)
    for start in (1, 11, 12, 15):
        torch.manual_seed(start)
        loader = ImageLoader(maker(images, options), position=whole[start - 1][1])
        rest = []
        for _ in range(2):
            rest += [next(loader)]
            torch.rand(3), random.random(), np.random.rand()
        loader.close()
        assert all(same(a[0], b[0]) and a[1] == b[1] for a, b in zip(rest, whole[start:], strict=False)), start
    assert not same(whole[0][0], whole[12][0])


def test_processes_are_given_tensors_without_shared_memory(images, monkeypatch):
    """torch would send a transform's mean through /dev/shm, which may be read-only or full."""

    def refuse(*_):
        raise RuntimeError("unable to open shared memory object")

    for kind in (torch.Tensor, torch.UntypedStorage):
        monkeypatch.setitem(ForkingPickler._extra_reducers, kind, refuse)
    assert len(take(ImageLoader(maker(images), num_workers=1), 1)) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_processes_make_what_threads_make(images, num_workers):
    shared = maker(images, EVERYTHING)
    alone = take(ImageLoader(shared), 5)
    last = shared.members(11)[1]
    (images._root / images._files[last]).write_bytes(b"no image")
    with ImageLoader(shared, num_workers=num_workers) as loader:
        for expected, position in alone:
            found = next(loader)
            assert same(found[0], expected) and found[1] == position
        with pytest.raises(UserError, match=rf"{images._files[last]} cannot be read as an image"):
            for _ in range(7):
                next(loader)
        if not num_workers:  # each process raises its own
            with pytest.raises(StopIteration):
                next(loader)


@pytest.mark.parametrize(("num_workers", "options"), [(0, {}), (2, EVERYTHING)])
def test_images_of_another_dtype_are_the_same_rounded(images, num_workers, options):
    expected = [batch.images.bfloat16() for batch, _ in take(ImageLoader(maker(images, options)), 3)]
    rounded = maker(images, options, dtype=torch.bfloat16)
    found = [batch for batch, _ in take(ImageLoader(rounded, num_workers=num_workers), 3)]
    for batch, true in zip(found, expected, strict=True):
        assert batch.images.dtype == torch.bfloat16 and torch.equal(batch.images, true)
        assert batch.targets.dtype == torch.float32


def test_an_epoch_shows_every_image_once_in_a_new_order(images):
    plain = maker(images, batch=6)
    epochs = [[i for n in range(12) for i in plain.members(12 * epoch + n)] for epoch in range(2)]
    assert plain.per_epoch == 12 and all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    cut = maker(images, batch=10)  # what is left over is not always the same
    left = [set(range(24)) - {i for n in range(10) for i in cut.members(10 * epoch + n)} for epoch in range(3)]
    assert all(len(rest) == 4 for rest in left) and len(set(map(frozenset, left))) > 1


def test_the_models_own_draws_do_not_notice_the_augmentation(images):
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = torch.rand(2).tolist(), random.random(), np.random.rand()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    take(ImageLoader(maker(images, EVERYTHING)), 3)
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == expected


def test_an_images_augmentation_depends_on_seed_epoch_and_image_alone(images):
    """Not on the size of the micro-batch that it comes in."""
    small, large = maker(images), maker(images, micro=4)
    whole = large.make(1, large.decode(1), 2)[0].images
    halves = [small.make(n, small.decode(n), n + 1)[0].images for n in (2, 3)]
    assert torch.equal(torch.cat(halves), whole)
    other = maker(images, seed=2)
    assert not torch.equal(other.make(0, other.decode(0), 1)[0].images, small.make(0, small.decode(0), 1)[0].images)


def test_targets():
    """One-hot, smoothed, mixed: they add up to 1, and mixing takes from both of two images."""
    labels, images = torch.tensor([0, 2]), torch.stack([torch.zeros(3, 8, 8), torch.ones(3, 8, 8)])
    assert Mixer(make_augmentation({}), 3)(images, labels)[1].tolist() == [[1, 0, 0], [0, 0, 1]]
    smooth = Mixer(make_augmentation({"label_smoothing": 0.3}), 3)(images, labels)[1]
    assert torch.allclose(smooth, torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.1, 0.8]]))
    np.random.seed(0)
    mixed, targets = Mixer(make_augmentation({"mixup": 1.0}), 3)(images.clone(), labels)
    share = float(targets[0, 0])
    assert 0 < share < 1 and torch.allclose(targets.sum(1), torch.ones(2))
    assert torch.allclose(mixed[0], torch.full((3, 8, 8), 1 - share)) and float(targets[1, 2]) == pytest.approx(share)


@pytest.mark.parametrize(("changed", "key"), [({"seed": 2}, "seed"), ({"batch": 8}, "batch_size")])
def test_a_position_of_another_run_is_refused(images, changed, key):
    position = maker(images).position(3)
    with pytest.raises(UserError, match=f"cannot resume.*{key}"):
        ImageLoader(maker(images, **changed), position=position)
