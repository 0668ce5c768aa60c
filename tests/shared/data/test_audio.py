"""Recordings of every kind people have, and features that padding does not change."""

import os
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import torchaudio
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from shared.data import audio
from shared.data.audio import FLOOR, Features, Header
from shared.errors import UserError

RATE = 8000


def tone(samples: int = 2000, rate: int = RATE, hertz: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(samples) / rate)


def write(path, samples, rate=RATE, **more):
    soundfile.write(path, samples, rate, **more)
    return path


@pytest.mark.parametrize(
    ("name", "subtype", "error"),
    [
        ("8.wav", "PCM_U8", 1 / 128),
        ("16.wav", "PCM_16", 1 / 2**15),
        ("24.wav", "PCM_24", 1 / 2**23),
        ("32.wav", "PCM_32", 1e-7),
        ("float.wav", "FLOAT", 1e-7),
        ("double.wav", "DOUBLE", 1e-7),
        ("ulaw.wav", "ULAW", 0.02),
        ("8.flac", "PCM_S8", 1 / 128),
        ("16.flac", "PCM_16", 1 / 2**15),
        ("24.FLAC", "PCM_24", 1 / 2**23),
    ],
)
def test_any_depth_becomes_floats(tmp_path, name, subtype, error):
    waveform = audio.decode(write(tmp_path / name, tone(), subtype=subtype), RATE)
    assert waveform.dtype == torch.float32
    assert waveform.shape == (2000,)
    assert (waveform - torch.from_numpy(tone())).abs().max() <= error


def test_channels_are_averaged(tmp_path):
    both = np.stack([tone(), np.zeros(2000), -tone() / 2], 1)
    waveform = audio.decode(write(tmp_path / "three.wav", both, subtype="FLOAT"), RATE)
    torch.testing.assert_close(waveform, torch.from_numpy(tone() / 6).float())


@pytest.mark.parametrize("rate", [4000, 11025, 44100, 7990])
def test_another_rate_is_resampled_and_its_length_is_foretold(tmp_path, rate):
    path = write(tmp_path / "a.wav", tone(rate // 2, rate), rate, subtype="FLOAT")
    waveform = audio.decode(path, RATE)
    assert len(waveform) == audio.resampled_length(audio.read_header(path), RATE)
    assert abs(len(waveform) - RATE // 2) <= 1
    middle = slice(500, 3000)
    expected = torch.from_numpy(tone(RATE // 2)).float()
    assert (waveform[middle] - expected[middle]).abs().max() < 0.02


def test_the_commonest_rate_is_chosen_and_among_equals_the_lower():
    headers = [Header(1, rate) for rate in (8000, 16000, 16000, 44100)]
    assert audio.commonest_rate(headers) == 16000
    assert audio.commonest_rate(headers[:2]) == 8000


def broken(tmp_path):
    """Files that are no recordings, each with a word of what is said of it."""
    whole = write(tmp_path / "whole.wav", tone()).read_bytes()
    flac = write(tmp_path / "whole.flac", np.random.default_rng(0).normal(0, 0.1, 9000))
    holes = tone()
    holes[[7, 9]] = np.nan
    write(tmp_path / "nan.wav", holes, subtype="FLOAT")
    holes[7] = 1e20
    write(tmp_path / "loud.wav", holes, subtype="FLOAT")
    holes[7] = np.inf
    write(tmp_path / "inf.wav", holes, subtype="FLOAT")
    write(tmp_path / "none.wav", np.zeros(0))
    write(tmp_path / "au.wav", tone(), format="AU")
    contents = {
        "unpadded.wav": write(tmp_path / "odd.wav", tone(1999), subtype="PCM_U8").read_bytes()[:-2],
        "zero.wav": b"",
        "text.wav": b"no recording at all",
        "text.flac": b"no recording at all",
        "cut.wav": whole[: len(whole) // 2],
        "head.wav": whole[:20],
        "cut.flac": flac.read_bytes()[: flac.stat().st_size // 2],
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return {
        "nan.wav": "sample 7 is nan",
        "inf.wav": "sample 7 is inf",
        "loud.wav": "; full scale is 1",
        "au.wav": "which is neither WAV nor FLAC",
        "unpadded.wav": "is cut off",
        "none.wav": "has no samples",
        "zero.wav": "is empty",
        "text.wav": "",
        "text.flac": "",
        "cut.wav": "is cut off",
        "head.wav": "",
        "cut.flac": "is cut off or damaged",
        "absent.wav": "no such file",
    }


def test_each_broken_file_is_named_in_one_line(tmp_path):
    for name, word in broken(tmp_path).items():
        with pytest.raises(UserError) as raised:
            audio.decode(tmp_path / name, RATE)
        message = str(raised.value)
        assert message.startswith(f"{tmp_path / name}: ")
        assert len(message) > len(f"{tmp_path / name}: ")
        assert word in message
        assert len(message.splitlines()) == 1


def test_files_as_other_programs_write_them_are_read(tmp_path):
    """Without a last pad byte, with sizes that were not known yet, with bytes after the data."""
    whole = write(tmp_path / "a.wav", tone(1999), subtype="PCM_U8").read_bytes()
    expected = audio.decode(tmp_path / "a.wav")
    assert len(whole) % 2 == 0
    at = whole.index(b"data") + 4
    unknown = whole[:4] + b"\xff" * 4 + whole[8:at] + b"\xff" * 4 + whole[at + 4 :]
    for name, content in {
        "unpadded": whole[:-1],
        "piped": unknown[:-1],
        "more": whole + b"x" * 9,
    }.items():
        (tmp_path / f"{name}.wav").write_bytes(content)
        assert torch.equal(audio.decode(tmp_path / f"{name}.wav"), expected), name


def test_names_may_be_of_any_bytes(tmp_path):
    write(tmp_path / "a.wav", tone())
    strange = Path(os.fsdecode(os.fsencode(tmp_path) + b"/latin\xe9.wav"))
    (tmp_path / "a.wav").rename(strange)
    assert len(audio.decode(strange)) == 2000


def test_a_ratio_that_would_take_gigabytes_is_refused(tmp_path):
    path = write(tmp_path / "a.wav", tone(), rate=44100)
    with pytest.raises(UserError, match="44100 samples/s cannot be brought to 44099"):
        audio.decode(path, 44099)


def test_a_long_recording_has_the_length_that_was_foretold(tmp_path):
    path = write(tmp_path / "a.wav", np.zeros(180_697), rate=44100)
    assert len(audio.decode(path, 16000)) == audio.resampled_length(audio.read_header(path), 16000)


def test_silence_is_no_error(tmp_path):
    path = write(tmp_path / "silence.wav", np.zeros(500))
    features = Features("logmel", RATE)(audio.decode(path, RATE)[None])
    torch.testing.assert_close(features, torch.full((1, 7, 40), np.log(FLOOR)).float())


# ---------------------------------------------------------------------------------------- features


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    kind=st.sampled_from(["logmel", "mfcc"]),
    rate=st.sampled_from([8000, 16000]),
)
def test_features_of_a_padded_batch_are_those_of_each_recording_alone(lengths, kind, rate):
    generator = torch.Generator().manual_seed(len(lengths))
    waveforms = [0.1 * torch.randn(length, generator=generator) for length in lengths]
    features = Features(kind, rate)
    batch = features(pad_sequence(waveforms, batch_first=True))
    frames = features.lengths(torch.tensor(lengths))
    assert batch.shape == (len(lengths), int(frames.max()), features.size)
    for row, (waveform, length) in enumerate(zip(waveforms, frames.tolist(), strict=True)):
        alone = features(waveform[None])[0]
        assert len(alone) == length
        torch.testing.assert_close(batch[row, :length], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rate", [8000, 16000])
def test_features_are_those_of_torchaudio(rate):
    waveforms = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))
    window, hop = rate // 40, rate // 100
    spectral = {"n_fft": 256 if rate == 8000 else 512, "win_length": window, "hop_length": hop}
    spectral |= {"n_mels": 40, "pad_mode": "constant"}
    mel = torchaudio.transforms.MelSpectrogram(rate, **spectral)(waveforms)
    expected = (mel + FLOOR).log().transpose(1, 2)
    torch.testing.assert_close(Features("logmel", rate)(waveforms), expected, rtol=1e-4, atol=1e-4)
    mfcc = torchaudio.transforms.MFCC(rate, 13, log_mels=True, melkwargs=spectral)(waveforms)
    found = Features("mfcc", rate)(waveforms)
    torch.testing.assert_close(found, mfcc.transpose(1, 2), rtol=1e-3, atol=1e-3)


def test_bands_without_a_line_of_the_spectrum_are_refused():
    with pytest.raises(UserError, match=r"--mels 200: \d+ of the bands"):
        Features("logmel", RATE, mels=200)
