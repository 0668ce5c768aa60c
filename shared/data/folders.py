"""Data sets that are folders on a disk: a folder for each class, with or without parts above."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shared.data.splits import PARTS, carve
from shared.errors import UserError

_SHOWN = 20


class Listing(NamedTuple):
    """Files and their labels, in the order of classes and names."""

    paths: list[Path]
    labels: Tensor
    classes: tuple[str, ...]

    def subset(self, indices: Tensor) -> "Listing":
        """The files at `indices`, int64 [n]."""
        return Listing(
            [self.paths[i] for i in indices.tolist()], self.labels[indices], self.classes
        )


def list_parts(folder: Path, suffixes: Sequence[str]) -> dict[str, Listing]:
    """List a data set, with its own split where it has one.

    Args:
        folder: holds `train` and perhaps `val` and `test`, each with a folder for each class; or
            the folders of the classes themselves.
        suffixes: of the files that count, in lower case, with the dot.

    Returns:
        A listing for each of `PARTS`. What the folder does not split is split here, a tenth of
        every class for each missing part, by a permutation that no seed of a run changes.

    Raises:
        UserError: the folder or a class is not there or is empty, a link leads nowhere, or
            another part has a class that `train` has not.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    listings = {}
    if (folder / "train").is_dir():
        listings["train"] = list_classes(folder / "train", suffixes)
        classes = listings["train"].classes
        for part in PARTS[1:]:
            if (folder / part).is_dir():
                listings[part] = list_classes(folder / part, suffixes, classes)
    else:
        listings["train"] = list_classes(folder, suffixes)
    for part in PARTS[1:]:
        if part not in listings:
            rest, carved = carve(listings["train"].labels)
            if not len(carved):
                raise UserError(
                    f"{folder}: has no {part} folder, and too few files to take some of train for "
                    "it, since every class keeps one"
                )
            listings[part] = listings["train"].subset(carved)
            listings["train"] = listings["train"].subset(rest)
    return listings


def list_classes(
    folder: Path, suffixes: Sequence[str], classes: tuple[str, ...] | None = None
) -> Listing:
    """List the files in the class folders of one part.

    Args:
        folder: has a folder for each class; hidden ones do not count.
        suffixes: of the files that count.
        classes: those that there may be; by default all that there are.

    Raises:
        UserError: as for `list_parts`; all problems at once.
    """
    found = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not found:
        raise UserError(f"{folder}: has no class folders")
    known = tuple(found) if classes is None else classes
    problems = [
        f"{folder / name}: a class that training has not" for name in found if name not in known
    ]
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(known):
        own = sorted(p for p in (folder / name).rglob("*") if _counts(p, suffixes))
        if not own and classes is None:
            problems.append(f"{folder / name}: has no {' '.join(suffixes)} files")
        problems += [f"{p}: a link that leads nowhere" for p in own if not p.exists()]
        paths += own
        labels += [label] * len(own)
    if not paths and not problems:
        problems.append(f"{folder}: has no {' '.join(suffixes)} files")
    raise_all(problems)
    return Listing(paths, torch.tensor(labels), known)


def with_places(listings: Mapping[str, Listing]) -> list[tuple[Listing, range]]:
    """Each part in the order of `PARTS`, with the places of its files among those of all parts."""
    parts, start = [], 0
    for name in PARTS:
        places = range(start, start := start + len(listings[name].paths))
        parts.append((listings[name], places))
    return parts


@contextmanager
def published(name: str, folder: Path | None, download: bool) -> Iterator[None]:
    """Around the code of others that looks for a published data set, or fetches it.

    Raises:
        UserError: it raised an error, which says that the set is not there or cannot be had.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        if download:
            reason = " ".join(str(error).split())
            raise UserError(f"--download: {name} into {folder}: {reason}") from None
        raise UserError(
            f"--data-dir {folder}: {name} is not there, or not all of it; --download fetches it"
        ) from None


def raise_all(problems: Sequence[str]) -> None:
    """Raise one UserError for all problems, if there are any; the first ones spelled out."""
    if problems:
        more = len(problems) - _SHOWN
        shown = "; ".join(problems[:_SHOWN])
        raise UserError(f"{shown}; and {more} more" if more > 0 else shown)


def _counts(path: Path, suffixes: Sequence[str]) -> bool:
    is_file = path.is_file() or path.is_symlink()
    return is_file and path.suffix.lower() in suffixes and not path.name.startswith(".")
