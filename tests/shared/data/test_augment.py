import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from shared.data.augment import Augmentation, augment
from shared.errors import UserError

ADJUST = [TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue]
JITTERS = ["brightness", "contrast", "saturation", "hue"]
EVERYTHING = Augmentation(
    crop_padding=2, flip=True, brightness=0.6, contrast=0.6, saturation=0.6, hue=0.3
)


def random_images(*shape: int, seed: int = 0) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=draws)


def take(rows: dict[str, Tensor], indices: Tensor | slice) -> dict[str, Tensor]:
    return {name: values[indices] for name, values in rows.items()}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine a second one costs milliseconds for each of these tiny operations."""
    with threads(1):
        yield


# --- the same image as torchvision makes from the same parameters ---------------------------------


def by_torchvision(image: Tensor, row: dict[str, Tensor], padding: int) -> Tensor:
    if "top" in row:
        top, left = int(row["top"]) + padding, int(row["left"]) + padding
        image = TF.crop(TF.pad(image, [padding]), top, left, *image.shape[1:])
    if row.get("flip"):
        image = TF.horizontal_flip(image)
    image = TF.to_dtype(image, torch.float32, scale=True)
    for number in row.get("order", torch.tensor([])).tolist():
        if JITTERS[number] in row:
            image = ADJUST[number](image, float(row[JITTERS[number]]))
    return image


def assert_as_torchvision(images: Tensor, what: Augmentation, seed: int) -> None:
    rows = what.table(len(images), seed=seed, epoch=1)
    expected = [
        by_torchvision(image, take(rows, i), what.crop_padding) for i, image in enumerate(images)
    ]
    torch.testing.assert_close(augment(images, rows), torch.stack(expected), rtol=0, atol=1e-5)


strength = st.just(0.0) | st.floats(0.01, 1.5)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 5),
    channels=st.sampled_from([1, 3]),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    seed=st.integers(0, 1000),
    what=st.builds(
        Augmentation,
        crop_padding=st.integers(0, 12),
        flip=st.booleans(),
        brightness=strength,
        contrast=strength,
        saturation=strength,
        hue=st.just(0.0) | st.floats(0.01, 0.5),
    ),
)
def test_each_sample_is_as_torchvision_makes_it_from_the_same_parameters(
    batch, channels, height, width, seed, what
):
    assert_as_torchvision(random_images(batch, channels, height, width, seed=seed), what, seed)


@pytest.mark.parametrize("name", JITTERS)
def test_each_adjustment_alone_is_torchvisions(name):
    images = random_images(40, 3, 6, 5)
    images[:10] = images[:10, :1]  # greys, whose hue is undefined
    images[10:20] //= 128  # black and nearly black
    images[20:30] = images[20:30] // 128 * 255  # the corners of the colour cube, where hues switch
    assert_as_torchvision(images, Augmentation(**{name: 0.5}), seed=3)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_every_order_is_followed(order):
    images = random_images(3, 3, 4, 4)
    rows = EVERYTHING.table(3, seed=0, epoch=0) | {"order": torch.tensor([order] * 3)}
    expected = [by_torchvision(image, take(rows, i), 2) for i, image in enumerate(images)]
    torch.testing.assert_close(augment(images, rows), torch.stack(expected), rtol=0, atol=1e-5)


def test_a_one_channel_image_has_no_saturation_and_no_hue():
    images = random_images(8, 1, 4, 4)
    rows = Augmentation(saturation=1.0, hue=0.5).table(8, seed=0, epoch=0)
    assert torch.equal(augment(images, rows), images.float() / 255)


# --- the same distribution as torchvision's transforms --------------------------------------------

SAMPLES = 3000
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
ALIKE, DIFFERENT = 1e-2, 1e-6
"""Fixed seeds, so these decide once: the p-value of a right distribution, and of a wrong one."""


def ours(image: Tensor, what: Augmentation) -> Tensor:
    return augment(image.expand(SAMPLES, *image.shape), what.table(SAMPLES, seed=1, epoch=0))


def theirs(image: Tensor, transform: v2.Transform) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return torch.stack([transform(image) for _ in range(SAMPLES)])


def p_value(a: Tensor, b: Tensor) -> float:
    """That two sets of images are of one distribution, by Kolmogorov-Smirnov tests over
    statistics of an image: its mean, its spread, and single values (Bonferroni's correction).
    """

    def statistics(images: Tensor) -> Tensor:
        values = images.flatten(1).mul(1000).round()  # an ulp must not untie equal values
        return torch.cat([values.mean(1, True), values.std(1, keepdim=True), values[:, ::5]], 1)

    columns = zip(statistics(a).T.numpy(), statistics(b).T.numpy(), strict=True)
    p = [stats.ks_2samp(x, y, method="asymp").pvalue for x, y in columns]
    return min(p) * len(p)


@pytest.mark.parametrize("name", JITTERS)
def test_a_jitter_has_torchvisions_distribution_and_one_20_percent_stronger_has_not(name):
    image = random_images(3, 3, 3) // 2 + 40  # mid tones: few values are clipped
    expected = theirs(image, v2.Compose([TO_FLOAT, v2.ColorJitter(**{name: 0.4})]))
    assert p_value(ours(image, Augmentation(**{name: 0.4})), expected) > ALIKE
    assert p_value(ours(image, Augmentation(**{name: 0.48})), expected) < DIFFERENT


def test_all_jitters_have_torchvisions_distribution_and_in_a_fixed_order_have_not():
    image = random_images(3, 3, 3) // 128 * 255  # extremes: without clipping, order is no matter
    strengths = {"brightness": 0.9, "contrast": 0.9, "saturation": 0.9, "hue": 0.5}
    expected = theirs(image, v2.Compose([TO_FLOAT, v2.ColorJitter(**strengths)]))
    what = Augmentation(**strengths)
    assert p_value(ours(image, what), expected) > ALIKE

    rows = what.table(SAMPLES, seed=1, epoch=0)
    rows["order"] = torch.arange(4).expand(SAMPLES, 4)
    in_fixed_order = augment(image.expand(SAMPLES, *image.shape), rows)
    assert p_value(in_fixed_order, expected) < DIFFERENT


def test_crops_and_flips_have_torchvisions_distribution_and_a_missing_last_offset_is_seen():
    image = torch.arange(64, dtype=torch.uint8).reshape(1, 8, 8)  # each pixel tells where it was

    def placements(images: Tensor) -> Counter[tuple[float, ...]]:
        """Two neighbours from the middle, which padding never reaches: offsets and direction."""
        return Counter(map(tuple, images[:, 0, 4, 3:5].mul(255).round().tolist()))

    def p_of_counts(a: Counter[tuple[float, ...]], b: Counter[tuple[float, ...]]) -> float:
        keys = sorted(a.keys() | b.keys())
        return stats.chi2_contingency(np.array([[c[k] for k in keys] for c in (a, b)])).pvalue

    what = Augmentation(crop_padding=2, flip=True)
    transform = v2.Compose([v2.RandomCrop(8, padding=2), v2.RandomHorizontalFlip(), TO_FLOAT])
    expected = placements(theirs(image, transform))
    assert len(expected) == 5 * 5 * 2
    assert p_of_counts(placements(ours(image, what)), expected) > ALIKE

    rows = what.table(SAMPLES, seed=1, epoch=0)
    rows["top"] = rows["top"].clamp(max=1)
    never_last = augment(image.expand(SAMPLES, *image.shape), rows)
    assert p_of_counts(placements(never_last), expected) < DIFFERENT


def test_offsets_flips_and_orders_are_uniform():
    rows = EVERYTHING.table(24_000, seed=5, epoch=2)
    offsets = (rows["top"] + 2) * 5 + rows["left"] + 2
    orders = (rows["order"] * torch.tensor([64, 16, 4, 1])).sum(1)
    for values, kinds in [(offsets, 25), (rows["flip"], 2), (orders, 24)]:
        counts = values.unique(return_counts=True)[1]
        assert len(counts) == kinds
        assert stats.chisquare(counts.numpy()).pvalue > ALIKE


def test_parameters_are_not_correlated():
    """Generators seeded from neighbouring keys must not give the same numbers."""
    rows = EVERYTHING.table(4000, seed=0, epoch=0) | {
        f"next {k}": v for k, v in EVERYTHING.table(4000, seed=0, epoch=1).items()
    }
    columns = torch.stack([v if v.dim() == 1 else v[:, 0] for v in rows.values()]).double()
    correlations = torch.corrcoef(columns) - torch.eye(len(columns))
    assert correlations.abs().max() < 5 / 4000**0.5


# --- what the parameters depend on ---------------------------------------------------------------


def test_the_table_is_a_function_of_seed_and_epoch():
    rows = EVERYTHING.table(50, seed=3, epoch=4)
    again = EVERYTHING.table(50, seed=3, epoch=4)
    assert rows.keys() == {"top", "left", "flip", *JITTERS, "order"}
    for name, values in rows.items():
        assert torch.equal(values, again[name])
        assert not torch.equal(values, EVERYTHING.table(50, seed=3, epoch=5)[name])
        assert not torch.equal(values, EVERYTHING.table(50, seed=4, epoch=4)[name])


def test_the_table_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    EVERYTHING.table(50, seed=3, epoch=4)
    assert torch.equal(torch.get_rng_state(), before)


@given(small=st.integers(0, 60), large=st.integers(60, 200))
@settings(max_examples=20, deadline=None)
def test_a_row_does_not_depend_on_the_number_of_samples(small, large):
    rows = EVERYTHING.table(large, seed=7, epoch=0)
    for name, values in EVERYTHING.table(small, seed=7, epoch=0).items():
        assert torch.equal(values, rows[name][:small])


@pytest.mark.parametrize(
    "alone",
    [{"crop_padding": 2}, {"flip": True}, *({name: 0.3} for name in JITTERS)],
    ids=lambda setting: next(iter(setting)),
)
def test_switching_the_other_settings_on_leaves_the_draws_of_one_as_they_were(alone):
    rows = Augmentation(**alone).table(50, seed=1, epoch=1)
    with_others = Augmentation(**(vars(EVERYTHING) | alone)).table(50, seed=1, epoch=1)
    assert rows.keys() < with_others.keys()
    for name, values in rows.items():
        assert torch.equal(values, with_others[name])


# --- what the result depends on ------------------------------------------------------------------


@given(
    size=st.integers(1, 12),
    height=st.integers(1, 17),
    width=st.integers(1, 17),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_a_sample_is_bitwise_the_same_in_every_batch(size, height, width, seed):
    images = random_images(size, 3, height, width, seed=seed)
    rows = EVERYTHING.table(size, seed=seed, epoch=0)
    whole = augment(images, rows)
    mixed = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(augment(images[mixed], take(rows, mixed)), whole[mixed])
    for i in range(size):
        assert torch.equal(augment(images[i : i + 1], take(rows, slice(i, i + 1)))[0], whole[i])


@pytest.mark.parametrize("count", [1, 2])
def test_a_large_sample_is_bitwise_the_same_alone_and_with_any_number_of_threads(count):
    """Alone, its pixels are split among threads; in a batch, the samples are."""
    images = random_images(3, 3, 211, 223)
    rows = EVERYTHING.table(3, seed=0, epoch=0)
    with threads(2):
        whole = augment(images, rows)
    with threads(count):
        alone = [augment(images[i : i + 1], take(rows, slice(i, i + 1))) for i in range(3)]
    assert torch.equal(torch.cat(alone), whole)


def test_the_memory_format_is_kept_and_changes_no_bit():
    images = random_images(4, 3, 7, 6)
    rows = EVERYTHING.table(4, seed=0, epoch=0)
    contiguous = augment(images, rows)
    channels_last = augment(images.to(memory_format=torch.channels_last), rows)
    assert contiguous.is_contiguous()
    assert channels_last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(contiguous, channels_last)


@pytest.mark.parametrize("what", [Augmentation(), EVERYTHING], ids=["nothing", "everything"])
def test_images_are_not_written_to_and_results_are_floats_from_0_to_1(what):
    images = random_images(20, 3, 5, 5)
    before = images.clone()
    result = augment(images, what.table(20, seed=0, epoch=0))
    assert torch.equal(images, before)
    assert result.dtype == torch.float32
    assert result.min() >= 0
    assert result.max() <= 1


def test_nothing_on_is_the_identity():
    images = random_images(4, 2, 5, 5)
    rows = Augmentation().table(4, seed=0, epoch=0)
    assert rows == {}
    assert torch.equal(augment(images, rows), images.float() / 255)


def test_nothing_waits_for_the_device():
    """Tensors on `meta` hold no data: whatever looks at a value there raises."""
    rows = EVERYTHING.table(4, seed=0, epoch=0)
    result = augment(random_images(4, 3, 5, 6).to("meta"), rows)
    assert result.device.type == "meta"
    assert result.shape == (4, 3, 5, 6)


def test_an_empty_batch_stays_empty():
    images = random_images(0, 3, 5, 6)
    assert augment(images, EVERYTHING.table(0, seed=0, epoch=0)).shape == (0, 3, 5, 6)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("crop_padding", -1, "--crop-padding must be ≥ 0, got -1"),
        ("brightness", -0.1, "--brightness must be ≥ 0, got -0.1"),
        ("contrast", float("nan"), "--contrast must be ≥ 0, got nan"),
        ("saturation", float("inf"), "--saturation must be ≥ 0, got inf"),
        ("hue", -0.2, "--hue must be ≥ 0, got -0.2"),
        ("hue", 0.51, "--hue must be ≤ 0.5, got 0.51"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_the_name_of_its_flag(setting, value, message):
    with pytest.raises(UserError) as error:
        Augmentation(**{setting: value})
    assert str(error.value) == message


def test_colours_of_other_than_1_or_3_channels_cannot_be_jittered():
    rows = Augmentation(hue=0.1).table(2, seed=0, epoch=0)
    with pytest.raises(ValueError, match="1 or 3 channels, not 4"):
        augment(random_images(2, 4, 5, 5), rows)


@pytest.mark.parametrize("images", [torch.zeros(2, 3, 5, 5), random_images(3, 5, 5)])
def test_what_is_not_a_batch_of_uint8_images_is_refused(images):
    with pytest.raises(ValueError, match="images must be uint8"):
        augment(images, {})
