"""Sequence data sets: frames or waveforms of any length, and what becomes of a batch of them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from shared import seeding
from shared.data import audio
from shared.data.audio import FeatureKind, Features
from shared.data.decoding import (
    Chosen,
    DecodedFiles,
    Ragged,
    broken_files,
    check_files,
    decode_all,
    usable_cores,
)
from shared.data.folders import Listing, list_parts, published, raise_all, with_places
from shared.data.loading import micro_batches
from shared.data.masking import Masking
from shared.data.sampling import SampleKey
from shared.data.splits import PARTS, Splits, check_labels, spread
from shared.devices import move
from shared.distributed import main_goes_first
from shared.errors import UserError
from shared.settings import LARGEST, RunConfig

Sample = tuple[Tensor, int, int]
"""A sequence, frames float [T, F] or samples of a waveform [T]; its label; its index in the set."""

LONG = 8
"""Sequences longer than this many times the median of training are cut by default."""


class SequenceBatch(NamedTuple):
    """Padded sequences, float [B, T, F] frames or [B, T] samples of waveforms; the padding is 0."""

    inputs: Tensor
    lengths: Tensor
    """Of each sequence without its padding, int64 [B], on the CPU."""
    labels: Tensor
    """int64 [B]."""
    indices: Tensor
    """Of the samples in the set, int64 [B], on the CPU."""

    @property
    def samples(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def split(self, parts: int) -> list["SequenceBatch"]:
        """At most `parts` micro-batches of nearly one size, each as wide as its longest."""
        micros = micro_batches(self, parts)
        widths = [max(1, int(micro.lengths.max())) for micro in micros]
        return [
            micro._replace(inputs=micro.inputs[:, :width])
            for micro, width in zip(micros, widths, strict=True)
        ]


@dataclass(frozen=True)
class SequenceSet:
    """Sequences with labels.

    Args:
        sequences: float32, frames [T, F] or waveforms [T]; decoded already or when asked for.
        lengths: T of each, int64 [N].
        labels: int64 [N].
        classes: the name of each label.
        rate: of waveforms, samples a second; None for frames.
        workers: processes that make reading fast.
        max_frames: that a sequence may have, as frames or when features are made of it.

    Raises:
        UserError: a sequence is empty, or a label is not that of a class.
    """

    sequences: Sequence[Tensor]
    lengths: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    rate: int | None = None
    workers: int = 0
    max_frames: int | None = None

    def __post_init__(self) -> None:
        empty = (self.lengths < 1).nonzero()
        if len(empty):
            raise UserError(f"sample {int(empty[0])} is a sequence without a single step")
        check_labels(self.labels, self.classes)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        sequence = self.sequences[index]
        if len(sequence) != self.lengths[index]:
            raise UserError(
                f"sample {index} has {len(sequence)} steps, and had {self.lengths[index]} before: "
                "has its file changed?"
            )
        return sequence, int(self.labels[index]), index

    def __getitems__(self, keys: list[SampleKey]) -> list[Sample]:
        return [self[key.sample] for key in keys]

    def wants(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """What a description of weights must say to be used on this set, otherwise as it is."""
        if self.rate is not None:
            return {"features": {**(about.get("features") or {}), "rate": self.rate}}
        size = self.sequences[0].shape[1]
        return {"features": None, "model": {**about["model"], "features": size}}

    def subset(self, indices: Tensor) -> Self:
        """The samples at `indices`, int64 [n], in that order."""
        return replace(
            self,
            sequences=Chosen(self.sequences, indices.tolist()),
            lengths=self.lengths[indices],
            labels=self.labels[indices],
        )

    def limited(self, longest: int, how: Literal["truncate", "split"]) -> Self:
        """The set without sequences that are longer than `longest` steps.

        Args:
            longest: steps that may be.
            how: truncate keeps the beginning; split makes samples of nearly equal pieces.
        """
        pieces = []
        for index, length in enumerate(self.lengths.tolist()):
            count = 1 if how == "truncate" else -(-length // longest)
            kept = min(length, longest) if how == "truncate" else length
            ends = [kept * number // count for number in range(count + 1)]
            pieces += [Piece(index, *ends[number : number + 2]) for number in range(count)]
        return replace(
            self,
            sequences=Pieces(self.sequences, pieces),
            lengths=torch.tensor([piece.stop - piece.start for piece in pieces]),
            labels=self.labels[torch.tensor([piece.source for piece in pieces])],
        )


class Piece(NamedTuple):
    """A part of a sequence."""

    source: int
    """Index of the sequence."""
    start: int
    stop: int


class Pieces(Sequence[Tensor]):
    """Parts of the tensors of a sequence, which stays as it is."""

    def __init__(self, tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> None:
        self._tensors = tensors
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        piece = self._pieces[index]
        return self._tensors[piece.source][piece.start : piece.stop]


class Normalization(NamedTuple):
    """Mean and standard deviation of each feature."""

    mean: list[float]
    std: list[float]

    def __call__(self, frames: Tensor) -> Tensor:
        """Shift and scale frames [..., F] to mean 0 and standard deviation 1."""
        mean, std = (frames.new_tensor(values) for values in self)
        return (frames - mean) / std


@dataclass(frozen=True)
class Preparation:
    """What lies between the sequences of a set and the network, for a whole batch on the device."""

    features: Features | None
    """None where a set has frames already."""
    normalization: Normalization
    masking: Masking
    """Its `table` gives the rows of an epoch."""
    device: torch.device

    def __call__(
        self, batch: SequenceBatch, rows: Mapping[str, Tensor] | None = None
    ) -> SequenceBatch:
        """Move a padded batch, and make normalized frames of it; padding and what is hidden are 0.

        Args:
            batch: as a set gives it.
            rows: masks of every sample of the set; none to evaluate.
        """
        rows = {name: column[batch.indices] for name, column in (rows or {}).items()}
        batch, rows = move((batch, rows), self.device)
        inputs, lengths = batch.inputs, batch.lengths
        if self.features is not None:
            inputs, lengths = self.features(inputs), self.features.lengths(lengths)
        inputs = self.normalization(inputs)
        ends = lengths.to(inputs.device)
        padding = torch.arange(inputs.shape[1], device=inputs.device) >= ends[:, None]
        hidden = padding[:, :, None] | self.masking.hidden(ends, inputs.shape, rows)
        return batch._replace(inputs=inputs.masked_fill(hidden, 0.0), lengths=lengths)


@dataclass(frozen=True)
class SequenceConfig(RunConfig):
    """Which sequences to train on, and how they are read."""

    data: Literal["japanese-vowels", "synthetic", "audiofolder", "speechcommands"] = (
        "japanese-vowels"
    )
    """japanese-vowels ship with the package; synthetic is noise; audiofolder: your own recordings,
    WAV or FLAC; speechcommands."""
    data_dir: Path | None = None
    """Folder of speechcommands or audiofolder: class folders, perhaps below train, val and test."""
    download: bool = False
    """Fetch speechcommands into --data-dir."""
    cache_gb: float = 4.0
    """Recordings that take less memory are decoded once; others each time, by workers."""
    sample_rate: int | None = None
    """Samples a second to which recordings are brought. Default: what most of them have."""
    features: FeatureKind = "logmel"
    """What recordings become: logarithms of mel energies, or their cosine transform."""
    mels: int = 40
    """Bands of the mel scale."""
    coefficients: int = 13
    """Coefficients of mfcc."""
    window_ms: float = 25.0
    """Length of the analysis window, in milliseconds."""
    hop_ms: float = 10.0
    """Between two frames, in milliseconds."""
    max_frames: int | Literal["auto"] = "auto"
    """Longest sequence, in frames; longer ones are cut. auto: 8 times the median of training."""
    too_long: Literal["truncate", "split"] = "truncate"
    """truncate: keep the beginning. split: pieces, each a sample of its own, in every part."""
    bucket: bool = True
    """Make batches of sequences of like length, so that there is little padding."""
    lengths: Literal["uniform", "loguniform", "constant"] = "uniform"
    """Lengths of synthetic sequences, from --shortest to --longest. loguniform: most are short.
    constant: all are the longest."""
    shortest: int = 20
    """Frames of the shortest synthetic sequence."""
    longest: int = 100
    """Frames of the longest synthetic sequence."""
    time_masks: int = 0
    """Augmentation: stretches of time that are hidden."""
    time_mask: float = 0.2
    """Augmentation: longest of these, as a share of the sequence."""
    feature_masks: int = 0
    """Augmentation: bands of features that are hidden."""
    feature_mask: float = 0.2
    """Augmentation: widest of these, as a share of the features."""
    check_data: bool = False
    """Train nothing: read every file of audiofolder, and name all that are broken."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the values, a line each."""
        yield from super().problems()
        yield from self.outside(0, math.inf, "cache_gb")
        yield from self.outside(100, 768_000, "sample_rate")
        yield from self.outside(1, 4096, "mels", "coefficients")
        yield from self.outside(0.1, 10_000, "window_ms", "hop_ms")
        yield from self.outside(1, LARGEST, "max_frames", "shortest", "longest")
        yield from self.outside(0, 100, "time_masks", "feature_masks")
        yield from self.outside(0, 1, "time_mask", "feature_mask")
        if self.longest < self.shortest:
            yield f"--longest {self.longest}: is less than --shortest {self.shortest}"
        if self.features == "mfcc" and self.coefficients > self.mels:
            yield f"--coefficients {self.coefficients}: there are only --mels {self.mels}"
        is_audio = self.data in ("audiofolder", "speechcommands")
        if is_audio and self.data_dir is None:
            yield f"--data {self.data} needs --data-dir"
        if not is_audio:
            yield from self.ignored(f"--data {self.data} has no folder", "data_dir")
            of_audio = ("sample_rate", "features", "mels", "coefficients", "window_ms", "hop_ms")
            yield from self.ignored(f"--data {self.data} has no recordings", *of_audio, "cache_gb")
        elif self.features != "mfcc":
            yield from self.ignored(f"--features {self.features} has none", "coefficients")
        if self.data != "synthetic":
            lengths = ("lengths", "shortest", "longest")
            yield from self.ignored(f"--data {self.data} has its own lengths", *lengths)
        if not self.time_masks:
            yield from self.ignored("there are no --time-masks", "time_mask")
        if not self.feature_masks:
            yield from self.ignored("there are no --feature-masks", "feature_mask")
        if self.download and self.data != "speechcommands":
            yield f"--download: there is nothing to fetch for --data {self.data}"
        if self.check_data and self.data != "audiofolder":
            yield f"--check-data: --data {self.data} has no files of yours"

    def masking(self) -> Masking:
        """What is hidden of training sequences."""
        return Masking(self.time_masks, self.time_mask, self.feature_masks, self.feature_mask)

    def like(self, about: Mapping[str, Any]) -> Self:
        """These settings, for data to be read as it was for weights of this description."""
        features = about.get("features") or {}
        cutting = {name: about[name] for name in ("max_frames", "too_long") if name in about}
        changes = {"sample_rate": features.get("rate"), "hop_ms": features.get("hop_ms")}
        return replace(self, **cutting, **{k: v for k, v in changes.items() if v is not None})

    def describe_features(self, part: SequenceSet) -> dict[str, Any] | None:
        """The arguments of `Features` for a set; None where it has frames already."""
        if part.rate is None:
            return None
        return {
            "kind": self.features,
            "rate": part.rate,
            "window_ms": self.window_ms,
            "hop_ms": self.hop_ms,
            "mels": self.mels,
            "coefficients": self.coefficients,
        }


def load(config: SequenceConfig) -> Splits[SequenceSet]:
    """Read the data set that the settings name, and cut what is too long.

    Raises:
        UserError: it is not there, or something is wrong with it; all that is, at once.
    """
    match config.data:
        case "japanese-vowels":
            splits = _japanese_vowels()
        case "synthetic":
            splits = _synthetic(config)
        case "audiofolder":
            assert config.data_dir is not None
            splits = _recordings(list_parts(config.data_dir, audio.SUFFIXES), config)
        case "speechcommands":
            splits = _recordings(_speechcommands(config), config)
    return _limited(splits, config)


def check(config: SequenceConfig) -> dict[str, Any]:
    """Read every file of the folder, and print a line for each that is broken."""
    assert config.data_dir is not None
    return check_files(config.data_dir, audio.SUFFIXES, audio.decode, "recordings")


def measure_normalization(
    part: SequenceSet, features: Features | None, samples: int = 2000
) -> Normalization:
    """The statistics of the features of a set, or of `samples` spread over it; of real frames only.

    A feature that never changes is shifted, and not scaled.
    """
    count, origin, total, squares = 0, None, torch.zeros(()), torch.zeros(())
    for frames in spread(part, samples).sequences:
        frames = frames[None]
        frames = (frames if features is None else features(frames))[0].double()
        # Around the first frame, so that what never changes gives 0 and not a rounding error.
        origin = frames[0] if origin is None else origin
        frames = frames - origin
        count += len(frames)
        total, squares = total + frames.sum(0), squares + frames.square().sum(0)
    assert origin is not None
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=0).sqrt()
    return Normalization((origin + mean).tolist(), [value or 1.0 for value in std.tolist()])


def _limited(splits: Splits[SequenceSet], config: SequenceConfig) -> Splits[SequenceSet]:
    """Cut what is too long, and say so."""
    rate = splits.train.rate
    hop = 1 if rate is None else audio.hop_of(rate, config.hop_ms)
    median = splits.train.lengths.double().median().item()
    max_frames = math.ceil(LONG * median / hop)
    if config.max_frames != "auto":
        max_frames = config.max_frames
    longest = max_frames * hop - (rate is not None)  # T samples make 1 + T // hop frames
    limited = []
    for name, part in zip(PARTS, splits, strict=True):
        part = replace(part, max_frames=max_frames)
        too_long = int((part.lengths > longest).sum())
        if too_long:
            part = part.limited(longest, config.too_long)
            print(
                f"{too_long} sequences of {name} are longer than {max_frames} frames: "
                + ("truncated" if config.too_long == "truncate" else f"{len(part)} samples now")
            )
        limited.append(part)
    return Splits(*limited)


def _recordings(listings: Mapping[str, Listing], config: SequenceConfig) -> Splits[SequenceSet]:
    """Files of recordings; small sets are decoded once, large ones stream."""
    paths = [path for name in PARTS for path in listings[name].paths]
    headers = _read_headers(paths, config.sample_rate)
    rate = config.sample_rate or audio.commonest_rate(headers)
    lengths = [audio.resampled_length(header, rate) for header in headers]
    others = sum(header.rate != rate for header in headers)
    gigabytes = 4 * sum(lengths) / 1e9
    fits = gigabytes <= config.cache_gb
    print(
        f"{config.data_dir}: {len(paths):,} recordings of {len(listings['train'].classes)} "
        f"classes, {sum(lengths) / rate / 60:,.1f} minutes at {rate:,} samples/s"
        + (f" ({others:,} resampled)" if others else "")
        + f", {gigabytes:.2f} GB: "
        + ("kept in memory" if fits else "more than --cache-gb, so decoded each time")
    )
    decode = partial(audio.decode, rate=rate)
    recordings: Sequence[Tensor] = DecodedFiles(paths, decode)
    if fits:
        recordings = Ragged(decode_all(paths, decode, usable_cores()))
    workers = 0 if fits else usable_cores()
    parts = []
    for listing, places in with_places(listings):
        own, steps = Chosen(recordings, places), torch.tensor([lengths[place] for place in places])
        parts.append(SequenceSet(own, steps, listing.labels, listing.classes, rate, workers))
    return Splits(*parts)


def _read_headers(paths: Sequence[Path], rate: int | None) -> list[audio.Header]:
    try:
        return [audio.read_header(path) for path in paths]
    except UserError:  # one is broken: then the user is to learn of all, not of one for every run
        raise_all(broken_files(paths, partial(audio.decode, rate=rate), usable_cores()))
        raise


def _speechcommands(config: SequenceConfig) -> dict[str, Listing]:
    """Speech Commands (Warden, 2018, https://arxiv.org/abs/1804.03209), with its own split."""
    from torchaudio.datasets import SPEECHCOMMANDS

    root, folder, fetch = Path(str(config.data_dir)), "SpeechCommands", config.download
    files_of: dict[str, list[Path]] = {}
    for name, subset in zip(PARTS, ("training", "validation", "testing"), strict=True):
        with main_goes_first(), published("Speech Commands", root, fetch):
            if fetch:
                root.mkdir(parents=True, exist_ok=True)
            part = SPEECHCOMMANDS(root, folder_in_archive=folder, download=fetch, subset=subset)
        names = (part.get_metadata(index)[0] for index in range(len(part)))
        files_of[name] = [root / folder / path for path in names]
    classes = tuple(sorted({path.parent.name for path in files_of["train"]}))
    return {
        name: Listing(paths, torch.tensor([classes.index(p.parent.name) for p in paths]), classes)
        for name, paths in files_of.items()
    }


def _japanese_vowels() -> Splits[SequenceSet]:
    """640 utterances of two vowels; docs/data/japanese-vowels.md is their data card."""
    file = files("shared.data").joinpath("japanese-vowels.npz")
    with file.open("rb") as opened, np.load(opened) as arrays:
        lengths = torch.from_numpy(arrays["lengths"]).long()
        frames = torch.from_numpy(arrays["frames"]).split(lengths.tolist())
        labels = torch.from_numpy(arrays["labels"]).long()
        classes = tuple(f"speaker {number}" for number in range(1, 10))
        whole = SequenceSet(frames, lengths, labels, classes)
        parts = (torch.from_numpy(arrays[part]).long() for part in PARTS)
        return Splits(*(whole.subset(indices) for indices in parts))


def _synthetic(
    config: SequenceConfig, features: int = 40, classes: int = 10
) -> Splits[SequenceSet]:
    """Noise with random labels: 2,048 sequences to train, 256 each to validate and test."""
    generator = seeding.generator(seeding.SETUP, config.seed)
    parts = []
    for count in (2048, 256, 256):
        lengths = _draw_lengths(count, config, generator)
        frames = torch.randn(int(lengths.sum()), features, generator=generator)
        labels = torch.randint(classes, (count,), generator=generator)
        names = tuple(str(label) for label in range(classes))
        parts.append(SequenceSet(frames.split(lengths.tolist()), lengths, labels, names))
    return Splits(*parts)


def _draw_lengths(count: int, config: SequenceConfig, generator: torch.Generator) -> Tensor:
    """Lengths of synthetic sequences, int64 [count]."""
    if config.lengths == "constant":
        return torch.full((count,), config.longest)
    draws = torch.rand(count, generator=generator, dtype=torch.float64)
    if config.lengths == "loguniform":
        steps = config.shortest * (config.longest / config.shortest) ** draws
    else:
        steps = config.shortest + draws * (config.longest + 1 - config.shortest)
    return steps.long().clamp(config.shortest, config.longest)
