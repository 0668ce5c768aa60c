"""Sequence sets: the vowels that ship, recordings in folders, and batches of them."""

import hashlib
import itertools
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from refs.sequence_lstm import collate
from shared.data import sequences
from shared.data.audio import Features
from shared.data.masking import Masking
from shared.data.sampling import SampleKey
from shared.data.sequences import (
    Preparation,
    SequenceBatch,
    SequenceConfig,
    SequenceSet,
    load,
    measure_normalization,
)
from shared.errors import UserError

CPU = torch.device("cpu")
VOWELS_SHA256 = "7f262a9551e4a1570df5fd3c499110674396c31b6b6869bfd2936cfce9c9dcad"
CARD = Path(__file__).parents[3] / "docs/data/japanese-vowels.md"


def random_set(*lengths: int, features: int = 3) -> SequenceSet:
    generator = torch.Generator().manual_seed(0)
    frames = [torch.randn(length, features, generator=generator) for length in lengths]
    labels = torch.arange(len(lengths))
    return SequenceSet(frames, torch.tensor(lengths), labels, tuple(map(str, range(len(lengths)))))


def keys(*samples: int) -> list[SampleKey]:
    return [SampleKey(0, sample) for sample in samples]


def batch_of(part: SequenceSet, wanted: list[SampleKey]) -> SequenceBatch:
    return collate(part.__getitems__(wanted))


# ------------------------------------------------------------------------------------------ vowels


@pytest.fixture(scope="module")
def vowels():
    return load(SequenceConfig())


def test_the_vowels_are_those_that_were_exported_and_the_card_names_them():
    content = files("shared.data").joinpath("japanese-vowels.npz").read_bytes()
    assert hashlib.sha256(content).hexdigest() == VOWELS_SHA256
    assert VOWELS_SHA256 in CARD.read_text("utf-8")


def test_the_parts_are_disjoint_and_complete_and_the_test_is_the_original():
    file = files("shared.data").joinpath("japanese-vowels.npz")
    with file.open("rb") as opened, np.load(opened) as arrays:
        parts = [arrays[part].tolist() for part in ("train", "val", "test")]
        assert arrays["frames"].shape == (int(arrays["lengths"].sum()), 12)
    assert [len(part) for part in parts] == [243, 27, 370]
    assert sorted(itertools.chain(*parts)) == list(range(640))
    assert sorted(parts[2]) == list(range(270, 640))


def test_the_vowels_are_as_they_were_published(vowels):
    lengths = torch.cat([part.lengths for part in vowels])
    assert (int(lengths.min()), int(lengths.max())) == (7, 29)
    assert vowels.test.labels.bincount().tolist() == [31, 35, 88, 44, 29, 24, 40, 50, 29]
    both = torch.cat([vowels.train.labels, vowels.val.labels])
    assert both.bincount().tolist() == [30] * 9
    for part in vowels:
        for sequence, length in zip(part.sequences, part.lengths.tolist(), strict=True):
            assert sequence.shape == (length, 12)
            assert sequence.dtype == torch.float32


def test_no_utterance_is_in_two_parts(vowels):
    train, val, test = ({s.numpy().tobytes() for s in part.sequences} for part in vowels)
    assert not train & val
    assert not train & test
    assert not val & test


# --------------------------------------------------------------------------------------- synthetic


@pytest.mark.parametrize("lengths", ["uniform", "loguniform", "constant"])
def test_synthetic_lengths_are_distributed_as_asked_for(lengths):
    config = SequenceConfig(data="synthetic", lengths=lengths, shortest=10, longest=80)
    parts = load(config)
    assert [len(part) for part in parts] == [2048, 256, 256]
    found = parts.train.lengths
    shortest = 80 if lengths == "constant" else 10
    assert shortest == found.min()
    assert 78 <= found.max() <= 80
    median = {"uniform": 45, "loguniform": 28, "constant": 80}[lengths]
    assert abs(found.double().median() - median) <= 3
    assert torch.equal(load(config).train.lengths, found)


# -------------------------------------------------------------------------------- sets and batches


def test_a_batch_is_padded_with_zeros_and_knows_its_lengths():
    part = random_set(3, 5, 1)
    batch = batch_of(part, keys(2, 0))
    assert batch.inputs.shape == (2, 3, 3)
    assert batch.lengths.tolist() == [1, 3]
    assert torch.equal(batch.inputs[0, :1], part.sequences[2])
    assert not batch.inputs[0, 1:].any()
    assert batch.labels.tolist() == batch.indices.tolist() == [2, 0]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 15))
def test_micro_batches_are_as_wide_as_their_longest(lengths, parts):
    batch = batch_of(random_set(*lengths), keys(*range(len(lengths))))
    micros = batch.split(parts)
    sizes = [micro.samples for micro in micros]
    assert len(micros) == min(parts, len(lengths))
    assert max(sizes) - min(sizes) <= 1
    assert torch.cat([micro.indices for micro in micros]).tolist() == list(range(len(lengths)))
    for micro in micros:
        assert micro.inputs.shape[1] == micro.lengths.max()
        for row, index in enumerate(micro.indices.tolist()):
            assert torch.equal(micro.inputs[row], batch.inputs[index, : micro.inputs.shape[1]])


def test_a_sequence_that_has_another_length_than_before_is_named():
    part = random_set(3, 5)
    part = replace(part, lengths=torch.tensor([3, 6]))
    with pytest.raises(UserError, match="sample 1 has 5 steps, and had 6 before"):
        batch_of(part, keys(0, 1))


def test_an_empty_sequence_and_a_strange_label_are_named():
    with pytest.raises(UserError, match="sample 1 is a sequence without a single step"):
        random_set(3, 0, 2)
    part = random_set(3, 2)
    with pytest.raises(UserError, match=r"sample 1 has the label 7, .* 2 classes"):
        replace(part, labels=torch.tensor([0, 7]))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 15))
def test_long_sequences_are_truncated_or_split(lengths, longest):
    part = random_set(*lengths)
    cut = part.limited(longest, "truncate")
    assert cut.lengths.tolist() == [min(length, longest) for length in lengths]
    assert all(
        torch.equal(one, other[:longest])
        for one, other in zip(cut.sequences, part.sequences, strict=True)
    )
    split = part.limited(longest, "split")
    assert split.lengths.max() <= longest
    assert torch.equal(torch.cat(list(split.sequences)), torch.cat(list(part.sequences)))
    assert [len(s) for s in split.sequences] == split.lengths.tolist()
    for label, length in enumerate(lengths):
        own = split.lengths[split.labels == label]
        assert own.sum() == length
        assert own.max() - own.min() <= 1


def test_what_is_too_long_is_said(capsys, monkeypatch):
    config = SequenceConfig(max_frames=20)
    cut = load(config)
    assert max(int(part.lengths.max()) for part in cut) == 20
    out = capsys.readouterr().out
    assert "sequences of train are longer than 20 frames: truncated" in out
    split = load(replace(config, too_long="split"))
    assert f"{len(split.test)} samples now" in capsys.readouterr().out
    assert len(split.test) > 370
    load(SequenceConfig())
    assert capsys.readouterr().out == ""


def test_by_default_a_sequence_far_longer_than_the_rest_is_cut(monkeypatch):
    part = random_set(10, 10, 12, 3000)
    monkeypatch.setattr(sequences, "_japanese_vowels", lambda: sequences.Splits(part, part, part))
    assert load(SequenceConfig()).train.lengths.tolist() == [10, 10, 12, 80]


# ----------------------------------------------------------------------------------- normalization


def test_the_statistics_are_those_of_real_frames():
    part = random_set(5, 9, 2)
    mean, std = measure_normalization(part, None)
    frames = torch.cat(list(part.sequences)).double()
    torch.testing.assert_close(torch.tensor(mean, dtype=torch.float64), frames.mean(0))
    expected = frames.std(0, correction=0)
    torch.testing.assert_close(torch.tensor(std, dtype=torch.float64), expected)


@pytest.mark.parametrize("value", [3.0, 0.1, float(np.log(1e-6)), 1e8, -7.7])
def test_a_feature_without_contrast_is_only_shifted(value):
    frames = torch.full((371, 2), value)
    part = SequenceSet([frames], torch.tensor([371]), torch.tensor([0]), ("a",))
    mean, std = measure_normalization(part, None)
    assert std == [1.0, 1.0]
    assert mean == frames[0].double().tolist()


@pytest.mark.parametrize("masks", [0, 2])
def test_prepared_batches_are_normalized_and_zero_in_padding_and_masks(masks):
    part = random_set(50, 90, 20)
    masking = Masking(time_masks=masks, feature_masks=masks)
    prepare = Preparation(None, measure_normalization(part, None), masking, CPU)
    batch = batch_of(part, keys(2, 0, 1))
    rows = masking.table(3, 0, 0)
    inputs = prepare(batch, rows)
    assert inputs.lengths.tolist() == [20, 50, 90]
    for row, length in enumerate(inputs.lengths.tolist()):
        assert not inputs.inputs[row, length:].any()
    own_rows = {name: column[batch.indices] for name, column in rows.items()}
    hidden = masking.hidden(batch.lengths, batch.inputs.shape, own_rows)
    assert not inputs.inputs[hidden].any()
    assert hidden.any() == (masks > 0)
    plain = prepare(batch)
    real = torch.cat([plain.inputs[row, :n] for row, n in enumerate(plain.lengths.tolist())])
    torch.testing.assert_close(real.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(real.std(0, correction=0), torch.ones(3), atol=1e-5, rtol=0)


# -------------------------------------------------------------------------------------- recordings


def fill(root: Path, rates=(8000,), per_class: int = 12) -> Path:
    """Two classes, low and high, of noise in a band, of lengths that differ."""
    noise = np.random.default_rng(0)
    for name in ("high", "low"):
        for number in range(per_class):
            path = root / name / f"{number:02}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            samples = noise.normal(0, 0.1, 400 + 100 * number)
            soundfile.write(path, samples, rates[number % len(rates)])
    return root


def audio_config(root: Path, **changes) -> SequenceConfig:
    return SequenceConfig(data="audiofolder", data_dir=root, **changes)


def test_recordings_kept_and_streamed_are_the_same(tmp_path, capsys):
    config = audio_config(fill(tmp_path, rates=(8000, 8000, 11025)))
    kept, streamed = load(config), load(replace(config, cache_gb=0.0))
    lines = capsys.readouterr().out.splitlines()
    assert "24 recordings of 2 classes" in lines[0]
    assert "at 8,000 samples/s (8 resampled)" in lines[0]
    assert "kept in memory" in lines[0]
    assert "decoded each time" in lines[1]
    assert kept.train.workers == 0
    assert streamed.train.workers > 0
    for one, other in zip(kept, streamed, strict=True):
        assert torch.equal(one.lengths, other.lengths)
        batch, again = (batch_of(part, keys(*range(len(part)))) for part in (one, other))
        assert torch.equal(batch.inputs, again.inputs)
        assert torch.equal(batch.labels, again.labels)


def test_all_broken_recordings_are_named_at_once(tmp_path):
    fill(tmp_path)
    (tmp_path / "high" / "00.wav").write_bytes(b"")
    (tmp_path / "low" / "05.wav").write_bytes(b"text")
    soundfile.write(tmp_path / "low" / "07.wav", np.full(900, np.nan), 8000, subtype="FLOAT")
    for cache_gb in (4.0, 0.0):
        with pytest.raises(UserError) as raised:
            load(audio_config(tmp_path, cache_gb=cache_gb))
        assert "high/00.wav: is empty; " in str(raised.value)
        assert "low/05.wav: " in str(raised.value)
        assert "low/07.wav: sample 0 is nan" in str(raised.value)


def test_features_come_with_the_set(tmp_path):
    part = load(audio_config(fill(tmp_path))).train
    settings = audio_config(tmp_path, mels=20).describe_features(part)
    features = Features(**settings)
    normalization = measure_normalization(part, features)
    assert len(normalization.mean) == 20
    batch = batch_of(part, keys(0, 5))
    inputs = Preparation(features, normalization, Masking(), CPU)(batch)
    assert inputs.lengths.tolist() == [1 + length // 80 for length in batch.lengths.tolist()]
    assert inputs.inputs.shape == (2, int(inputs.lengths.max()), 20)


def test_limits_of_recordings_are_in_frames(tmp_path):
    config = audio_config(fill(tmp_path), max_frames=6)
    part = load(config).train
    features = Features(**config.describe_features(part))
    assert int(features.lengths(part.lengths).max()) == 6
    assert load(replace(config, max_frames=7)).train.lengths.max() > part.lengths.max()


def test_a_batch_moves_but_its_lengths_stay():
    batch = batch_of(random_set(3, 2), keys(0, 1))
    moved = sequences.move(batch, torch.device("meta"))
    assert isinstance(moved, SequenceBatch)
    assert moved.inputs.device.type == "meta"
    assert moved.lengths.device.type == "cpu"


def fake_speech_commands(root: Path) -> Path:
    folder = root / "SpeechCommands" / "speech_commands_v0.02"
    lists = {"validation_list.txt": [], "testing_list.txt": []}
    for word in ("no", "yes"):
        for number in range(6):
            path = folder / word / f"{number:08x}_nohash_0.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(path, np.zeros(1600 + number), 16000)
            if number >= 4:
                lists[list(lists)[number - 4]].append(f"{word}/{path.name}")
    for name, own in lists.items():
        (folder / name).write_text("\n".join(own) + "\n")
    (folder / "_background_noise_").mkdir()
    soundfile.write(folder / "_background_noise_" / "hum.wav", np.zeros(9), 16000)
    return root


def test_speech_commands_come_with_their_own_split(tmp_path):
    config = SequenceConfig(data="speechcommands", data_dir=fake_speech_commands(tmp_path))
    parts = load(config)
    assert [len(part) for part in parts] == [8, 2, 2]
    assert parts.train.classes == ("no", "yes")
    assert parts.val.lengths.tolist() == [1604, 1604]
    assert parts.test.lengths.tolist() == [1605, 1605]
    assert parts.train.rate == 16000
