"""Recordings: files to waveforms of one rate, and batches of waveforms to features."""

import math
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.errors import UserError

SUFFIXES = (".flac", ".wav")
"""Of the files that count as recordings."""

FORMATS = ("FLAC", "WAV", "WAVEX")
"""What may be in them, as libsndfile calls it."""

LOUDEST = 1e6
"""Samples beyond this, where full scale is 1, are no sound; energies of them would overflow."""

LARGEST_KERNEL = 20_000_000
"""Values in a resampling kernel, which is the larger the less two rates have in common."""

FLOOR = 1e-6
"""Added to energies before their logarithm is taken: silence has one too."""

FeatureKind = Literal["logmel", "mfcc"]


class Header(NamedTuple):
    """What a file says of its recording."""

    samples: int
    """For each channel."""
    rate: int
    """Samples a second."""


def read_header(path: Path) -> Header:
    """Read how long a recording is, without its samples.

    Raises:
        UserError: the file is not there, is no recording, or is empty.
    """
    import soundfile

    try:
        info = soundfile.info(os.fsencode(path))  # names need not be UTF-8
    except soundfile.LibsndfileError as error:
        raise UserError(f"{path}: {_reason(path, error)}") from None
    if info.format not in FORMATS:
        raise UserError(f"{path}: is {info.format_info}, which is neither WAV nor FLAC")
    if not info.frames:
        raise UserError(f"{path}: has no samples")
    return Header(info.frames, info.samplerate)


def resampled_length(header: Header, rate: int) -> int:
    """Samples that a recording has at another rate."""
    return -(-header.samples * rate // header.rate)


def hop_of(rate: int, hop_ms: float) -> int:
    """Samples between two frames."""
    return max(1, round(rate * hop_ms / 1000))


def commonest_rate(headers: Sequence[Header]) -> int:
    """The rate that most recordings have; among equals the lower one."""
    counts = Counter(header.rate for header in headers)
    return min(counts, key=lambda rate: (-counts[rate], rate))


def decode(path: Path, rate: int | None = None) -> Tensor:
    """Read a recording as float32 [T], full scale at ±1: channels averaged, perhaps resampled.

    Args:
        path: of the file.
        rate: samples a second to bring it to; None leaves it as it is.

    Raises:
        UserError: the file is not there, is no recording, is cut off, is empty, or holds values
            that are not finite.
    """
    import soundfile

    header = read_header(path)
    try:
        samples, _ = soundfile.read(os.fsencode(path), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise UserError(f"{path}: is cut off or damaged: {_reason(path, error)}") from None
    if len(samples) < header.samples or _is_cut_off(path):
        raise UserError(f"{path}: is cut off")
    waveform = torch.from_numpy(samples).mean(1)
    wrong = ~(waveform.abs() <= LOUDEST)  # NaN too
    if wrong.any():
        index = int(wrong.nonzero()[0])
        raise UserError(f"{path}: sample {index} is {waveform[index].item()}; full scale is 1")
    if rate is None or rate == header.rate:
        return waveform
    return _resample(path, waveform, header, rate)


def _resample(path: Path, waveform: Tensor, header: Header, rate: int) -> Tensor:
    from torchaudio.functional import resample

    divisor = math.gcd(header.rate, rate)
    if header.rate // divisor * (rate // divisor) > LARGEST_KERNEL:
        raise UserError(
            f"{path}: its {header.rate} samples/s cannot be brought to {rate}, a ratio without a "
            "common measure; another --sample-rate may do"
        )
    resampled: Tensor = resample(waveform, header.rate, rate)
    # torchaudio rounds the length in float32, which is off by one where recordings are long.
    return F.pad(resampled, (0, resampled_length(header, rate) - len(resampled)))


def _reason(path: Path, error: Exception) -> str:
    if not path.exists():
        return "no such file"
    if path.stat().st_size == 0:
        return "is empty"
    return str(error).rpartition(": ")[2].rstrip(".") or "not a recording"


def _is_cut_off(path: Path) -> bool:
    """Whether a WAV file is shorter than it says; libsndfile reads what is there, silently."""
    with path.open("rb") as file:
        if file.read(12)[:4] != b"RIFF":
            return False
        while len(head := file.read(8)) == 8:
            size = int.from_bytes(head[4:], "little")
            if head[:4] == b"data":
                # Programs that write to a pipe cannot know the size, and say the largest there is.
                start = file.tell()
                return size < 0x7FFFF000 and file.seek(0, os.SEEK_END) - start < size
            file.seek(size + size % 2, os.SEEK_CUR)
    return True


class Features(nn.Module):
    """Spectral features of a batch of padded waveforms: those of each recording alone.

    A frame is centred on every `hop`-th sample, and what lies outside the recording counts as
    silence (`pad_mode="constant"`): so padding changes nothing, and recordings shorter than a
    window have features too.

    Args:
        kind: `logmel`, logarithms of mel-scaled energies; or `mfcc`, their cosine transform
            (Davis & Mermelstein, Comparison of Parametric Representations for Monosyllabic Word
            Recognition, 1980).
        rate: of the waveforms, samples a second.
        window_ms: length of the analysis window, milliseconds.
        hop_ms: between the middles of two windows, milliseconds.
        mels: bands.
        coefficients: of mfcc that are kept.

    Raises:
        UserError: there are more bands than the spectrum has lines for.
    """

    hann: Tensor
    banks: Tensor
    dct: Tensor | None

    def __init__(
        self,
        kind: FeatureKind,
        rate: int,
        window_ms: float = 25.0,
        hop_ms: float = 10.0,
        mels: int = 40,
        coefficients: int = 13,
    ) -> None:
        from torchaudio.functional import create_dct, melscale_fbanks

        super().__init__()
        self.window = max(1, round(rate * window_ms / 1000))
        self.hop = hop_of(rate, hop_ms)
        """Samples between two frames."""
        self.fft = max(2, 1 << (self.window - 1).bit_length())
        self.size = mels if kind == "logmel" else coefficients
        """Features of a frame."""
        with warnings.catch_warnings():  # an empty band is an error here
            warnings.filterwarnings("ignore", "At least one mel filterbank")
            banks = melscale_fbanks(self.fft // 2 + 1, 0.0, rate / 2, mels, rate)
        empty = int((banks.amax(0) == 0).sum())
        if empty:
            raise UserError(
                f"--mels {mels}: {empty} of the bands are narrower than the spectrum's lines at "
                f"{rate} samples/s and --window-ms {window_ms}"
            )
        dct = create_dct(coefficients, mels, "ortho") if kind == "mfcc" else None
        self.register_buffer("hann", torch.hann_window(self.window), persistent=False)
        self.register_buffer("banks", banks, persistent=False)
        self.register_buffer("dct", dct, persistent=False)

    def lengths(self, lengths: Tensor) -> Tensor:
        """Frames of waveforms of these lengths, int64 [B]."""
        return 1 + lengths // self.hop

    @torch.no_grad()
    def forward(self, waveforms: Tensor) -> Tensor:
        """Waveforms float [B, T], padded with zeros, to features float32 [B, 1 + T / hop, size]."""
        spectrum = torch.stft(
            waveforms,
            self.fft,
            self.hop,
            self.window,
            self.hann,
            center=True,
            pad_mode="constant",
            return_complex=True,
        )
        energies = spectrum.abs().square().transpose(1, 2) @ self.banks
        features: Tensor = (energies + FLOOR).log()
        return features if self.dct is None else features @ self.dct
