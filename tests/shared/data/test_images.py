"""Decoded images, their statistics, and the data sets that need no download."""

import hashlib
import itertools
import pickle
import tarfile
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.datasets import CIFAR10

from shared.data.images import ImageBatch, ImageConfig, ImageSet, Normalization, load
from shared.data.sampling import SampleKey
from shared.data.splits import spread
from shared.errors import UserError

CLASSES = tuple("abcdefghi")
DIGITS_SHA256 = "64c662606d78e586bf36706d9c83a09e5c4bed59a10acc126a5c51b38542fe9a"
CARD = Path(__file__).parents[3] / "docs/data/digits.md"


def random_set(size: int = 6, channels: int = 3) -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (size, channels, 4, 5), dtype=torch.uint8, generator=generator)
    return ImageSet(images, torch.arange(size), tuple(map(str, range(size))))


def keys(*samples: int) -> list[SampleKey]:
    return [SampleKey(0, sample) for sample in samples]


# ------------------------------------------------------------------------------------------ digits


@pytest.fixture(scope="module")
def digits():
    return load(ImageConfig())


def test_the_digits_are_those_that_were_exported():
    content = files("shared.data").joinpath("digits.npz").read_bytes()
    assert hashlib.sha256(content).hexdigest() == DIGITS_SHA256


def test_the_card_names_the_file_that_ships():
    assert DIGITS_SHA256 in CARD.read_text("utf-8")


def test_the_parts_are_disjoint_and_complete():
    with files("shared.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        parts = [arrays[part].tolist() for part in ("train", "val", "test")]
        assert arrays["images"].shape == (1797, 8, 8)
    assert [len(part) for part in parts] == [1259, 179, 359]
    assert sorted(itertools.chain(*parts)) == list(range(1797))


def test_no_picture_is_in_two_parts(digits):
    pictures = [{image.numpy().tobytes() for image in part.images} for part in digits]
    train, val, test = pictures
    assert not train & val
    assert not train & test
    assert not val & test


def test_the_parts_have_the_same_share_of_each_class(digits):
    counts = torch.stack([part.labels.bincount(minlength=10) for part in digits]).double()
    assert counts.sum() == 1797
    expected = counts.sum(1, keepdim=True) * counts.sum(0) / counts.sum()
    assert (counts - expected).abs().max() <= 1


def test_digits_look_like_digits(digits):
    for part in digits:
        assert part.images.shape == (len(part), 1, 8, 8)
        assert (part.images.dtype, part.labels.dtype) == (torch.uint8, torch.int64)
        assert part.classes == tuple("0123456789")
        assert part.images.max() == 255
    center = digits.train.images[:, 0, 3:5, 3:5].double().mean(dim=(1, 2))
    zeros, ones = (center[digits.train.labels == label].mean() for label in (0, 1))
    assert ones > 5 * zeros, "a zero is hollow, a one is not"


# --------------------------------------------------------------------------------------- synthetic


def test_synthetic_images_repeat_with_the_seed():
    one, again, other = (
        load(ImageConfig(data="synthetic", seed=1)),
        load(ImageConfig(data="synthetic", seed=1)),
        load(ImageConfig(data="synthetic", seed=2)),
    )
    for a, b, c in zip(one, again, other, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)
        assert not torch.equal(a.images, c.images)
        assert not torch.equal(a.labels, c.labels)


def test_synthetic_images_are_noise_of_every_class():
    parts = load(ImageConfig(data="synthetic"))
    assert [len(part) for part in parts] == [2048, 256, 256]
    for part in parts:
        assert part.images.shape[1:] == (3, 32, 32)
        assert part.images.unique().tolist() == list(range(256))
        assert part.labels.unique().tolist() == list(range(len(part.classes)))
    assert not torch.equal(parts.val.images, parts.test.images)


# -------------------------------------------------------------------------------- sets and batches


def test_a_batch_has_the_samples_that_were_asked_for():
    part = random_set()
    batch = part.__getitems__(keys(4, 0, 4))
    assert batch.samples == 3
    assert torch.equal(batch.inputs, part.images[[4, 0, 4]])
    assert batch.labels.tolist() == batch.indices.tolist() == [4, 0, 4]


def test_a_transform_is_applied_to_each_image():
    part = random_set()
    flipped = replace(part, transform=lambda image: image.flip(-1))
    assert torch.equal(flipped.__getitems__(keys(2, 1)).inputs, part.images[[2, 1]].flip(-1))


def test_a_subset_keeps_all_but_the_samples():
    part = replace(random_set(), transform=torch.neg, seed=3)
    few = part.subset(torch.tensor([5, 2]))
    assert torch.equal(few.images, part.images[[5, 2]])
    assert few.labels.tolist() == [5, 2]
    assert (few.classes, few.transform, few.seed) == (part.classes, torch.neg, 3)
    assert len(few) == 2


def test_a_few_of_each_part_are_evenly_spread(digits):
    for part, few in zip(digits, digits.spread(200), strict=True):
        assert len(few) == min(200, len(part))
        assert len(few.labels.unique()) == 10
    by_label = ImageSet(torch.zeros(9, 1, 1, 1, dtype=torch.uint8), torch.arange(9), CLASSES)
    assert spread(by_label, 3).labels.tolist() == [0, 3, 6]
    assert spread(by_label, 99).labels.tolist() == list(range(9))


def test_a_label_beyond_the_classes_is_named():
    for label in (-1, 9):
        labels = torch.tensor([0, 1, label])
        with pytest.raises(UserError, match=rf"sample 2 has the label {label}, .* 9 classes"):
            ImageSet(torch.zeros(3, 1, 1, 1, dtype=torch.uint8), labels, CLASSES)


@given(st.integers(1, 40), st.integers(1, 50))
def test_micro_batches_are_of_one_size_nearly(size, parts):
    part = random_set(size, channels=1)
    batch = part.__getitems__(keys(*range(size)))
    micro = batch.split(parts)
    sizes = [m.samples for m in micro]
    assert len(micro) == min(parts, size)
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    for whole, *pieces in zip(batch, *micro, strict=True):
        assert torch.equal(torch.cat(pieces), whole)
    assert all(isinstance(m, ImageBatch) for m in micro)


# ----------------------------------------------------------------------------------- normalization


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 256), st.integers(0, 2**32))
@settings(max_examples=50)
def test_the_statistics_are_those_of_the_pixels(size, channels, levels, seed):
    pixels = np.random.default_rng(seed).integers(
        levels, size=(size, channels, 3, 4), dtype=np.uint8
    )
    part = ImageSet(torch.from_numpy(pixels), torch.zeros(size), ("a",))
    mean, std = part.normalization()
    scaled = pixels.astype(np.float64) / 255
    np.testing.assert_allclose(mean, scaled.mean((0, 2, 3)), rtol=1e-12, atol=1e-15)
    expected = scaled.std((0, 2, 3))
    expected[pixels.std((0, 2, 3)) == 0] = 1
    np.testing.assert_allclose(std, expected, rtol=1e-10)


def test_normalized_images_have_mean_0_and_deviation_1():
    part = random_set(size=50)
    images = part.images.double() / 255
    normalized = part.normalization()(images)
    assert normalized.mean(dim=(0, 2, 3)).abs().max() < 1e-12
    assert (normalized.std(dim=(0, 2, 3), correction=0) - 1).abs().max() < 1e-12


def test_a_channel_without_contrast_becomes_zero():
    images = torch.full((2, 2, 3, 3), 77, dtype=torch.uint8)
    images[0, 1] = 200
    part = ImageSet(images, torch.zeros(2), ("a",))
    normalization = part.normalization()
    assert normalization.std[0] == 1.0
    assert normalization.std[1] < 1.0
    assert (normalization(images.double() / 255)[:, 0] == 0).all()


def test_normalizing_keeps_type_and_memory_format():
    images = torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    normalized = Normalization([0.5] * 3, [0.2] * 3)(images)
    assert normalized.dtype == torch.float32
    assert normalized.is_contiguous(memory_format=torch.channels_last)


def test_the_statistics_can_be_stored_as_json_numbers():
    mean, std = random_set().normalization()
    assert {type(value) for value in (*mean, *std)} == {float}


# ----------------------------------------------------------------------------------------- cifar10


def make_cifar10(folder: Path, monkeypatch) -> Path:
    """A small archive in the format of the original, and torchvision told of its checksums."""
    source = folder / "source" / CIFAR10.base_folder
    source.mkdir(parents=True)
    noise = np.random.default_rng(0)
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    for name in names:
        data = noise.integers(0, 256, (20, 3072), np.uint8)
        entry = {"data": data, "labels": [number % 10 for number in range(20)]}
        (source / name).write_bytes(pickle.dumps(entry))
    meta = {"label_names": [f"class {number}" for number in range(10)]}
    (source / "batches.meta").write_bytes(pickle.dumps(meta))
    sums = {p.name: hashlib.md5(p.read_bytes()).hexdigest() for p in source.iterdir()}
    monkeypatch.setattr(CIFAR10, "train_list", [[name, sums[name]] for name in names[:5]])
    monkeypatch.setattr(CIFAR10, "test_list", [[names[5], sums[names[5]]]])
    of_meta = {**CIFAR10.meta, "md5": sums["batches.meta"]}
    monkeypatch.setattr(CIFAR10, "meta", of_meta)
    archive = folder / CIFAR10.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source, CIFAR10.base_folder)
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    return source


def test_cifar10_is_read_from_a_folder_that_holds_it(tmp_path, monkeypatch):
    source = make_cifar10(tmp_path, monkeypatch)
    parts = load(ImageConfig(data="cifar10", data_dir=source.parent))
    assert [len(part) for part in parts] == [90, 10, 20]
    assert parts.val.labels.bincount().tolist() == [1] * 10
    first = pickle.loads((source / "test_batch").read_bytes())["data"][0]
    assert torch.equal(parts.test.images[0], torch.from_numpy(first).view(3, 32, 32))
    assert parts.train.classes[3] == "class 3"
    (source / "data_batch_2").write_bytes(b"damaged")
    with pytest.raises(
        UserError, match=r"CIFAR-10 is not there, or not all of it; --download fetches it"
    ):
        load(ImageConfig(data="cifar10", data_dir=source.parent))


def test_cifar10_is_downloaded(tmp_path, monkeypatch):
    make_cifar10(tmp_path, monkeypatch)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{CIFAR10.filename}"
        monkeypatch.setattr(CIFAR10, "url", url)
        config = ImageConfig(data="cifar10", data_dir=tmp_path / "new", download=True)
        assert len(load(config).train) == 90
        server.shutdown()
    with pytest.raises(UserError, match=r"--download: .*refused"):  # nobody listens any more
        load(replace(config, data_dir=tmp_path / "other"))
