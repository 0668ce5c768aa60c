import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.data.folders import list_classes, list_parts
from shared.data.splits import carve
from shared.errors import UserError

SUFFIXES = (".png", ".jpg")


def fill(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return root


def complaint(folder):
    with pytest.raises(UserError) as raised:
        list_parts(folder, SUFFIXES)
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


@pytest.mark.parametrize(("per_class", "part"), [(1, "val"), (2, "test")])
def test_a_part_that_cannot_be_carved_is_named(tmp_path, per_class, part):
    fill(tmp_path, *[f"{name}/{number}.png" for name in "ab" for number in range(per_class)])
    assert f"has no {part} folder, and too few files" in complaint(tmp_path)
    fill(tmp_path, "a/8.png", "a/9.png")
    assert len(list_parts(tmp_path, SUFFIXES)["test"].paths) >= 1


def test_files_are_listed_by_class_and_name(tmp_path):
    fill(tmp_path, "b/2.jpg", "b/1.PNG", "a/deep/3.png", "a/notes.txt", ".cache/x.png", "b/.x.png")
    listing = list_classes(tmp_path, SUFFIXES)
    assert listing.classes == ("a", "b")
    assert [str(p.relative_to(tmp_path)) for p in listing.paths] == [
        "a/deep/3.png", "b/1.PNG", "b/2.jpg",
    ]  # fmt: skip
    assert listing.labels.tolist() == [0, 1, 1]


def test_names_need_not_be_ascii(tmp_path):
    fill(tmp_path, "数字/ü é.png", "кот/1.png")
    assert list_classes(tmp_path, SUFFIXES).classes == ("кот", "数字")


def test_the_folders_own_split_is_used(tmp_path):
    for part in ("train", "val", "test"):
        fill(tmp_path, *(f"{part}/{c}/{part}{i}.png" for c in "ab" for i in range(3)))
    parts = list_parts(tmp_path, SUFFIXES)
    for name, listing in parts.items():
        assert len(listing.paths) == 6
        assert all(path.name.startswith(name) for path in listing.paths)


@pytest.mark.parametrize("given_parts", [(), ("train",), ("train", "test"), ("train", "val")])
def test_missing_parts_are_carved_from_training_and_from_nothing_else(tmp_path, given_parts):
    for part in given_parts or ("",):
        fill(tmp_path / part, *(f"{c}/{part}{i}.png" for c in "ab" for i in range(30)))
    parts = list_parts(tmp_path, SUFFIXES)
    paths = [path for listing in parts.values() for path in listing.paths]
    assert len(paths) == len(set(paths)) == 60 * max(1, len(given_parts))
    for name in ("val", "test"):
        expected = 60 if name in given_parts else 6
        assert abs(len(parts[name].paths) - expected) <= 2
        assert parts[name].labels.bincount().tolist() == [len(parts[name].paths) // 2] * 2
    assert list_parts(tmp_path, SUFFIXES)["val"].paths == parts["val"].paths


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_a_carved_part_has_its_share_of_every_class(labels):
    labels = torch.tensor(labels)
    rest, part = carve(labels, 0.2)
    assert sorted(torch.cat([rest, part]).tolist()) == list(range(len(labels)))
    for label in labels.unique():
        count, carved = int((labels == label).sum()), int((labels[part] == label).sum())
        assert carved < count
        assert abs(carved - 0.2 * count) <= 1


def test_what_is_wrong_with_a_folder_is_named(tmp_path):
    assert complaint(tmp_path / "absent") == f"{tmp_path}/absent: no such folder"
    fill(tmp_path, "file")
    assert complaint(tmp_path / "file") == f"{tmp_path}/file: not a folder"
    (tmp_path / "bare").mkdir()
    assert complaint(tmp_path / "bare") == f"{tmp_path}/bare: has no class folders"
    fill(tmp_path / "flat", "1.png", "2.png")
    assert complaint(tmp_path / "flat") == f"{tmp_path}/flat: has no class folders"
    fill(tmp_path / "texts", "a/1.txt")
    assert complaint(tmp_path / "texts") == f"{tmp_path}/texts/a: has no .png .jpg files"


def test_all_problems_are_named_at_once(tmp_path):
    fill(tmp_path, "train/a/1.png", "val/a/1.png", "val/new/1.png")
    (tmp_path / "train" / "empty").mkdir()
    (tmp_path / "train" / "a" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    text = complaint(tmp_path)
    assert f"{tmp_path}/train/empty: has no .png .jpg files" in text
    assert f"{tmp_path}/train/a/gone.png: a link that leads nowhere" in text
    (tmp_path / "train" / "empty").rmdir()
    (tmp_path / "train" / "a" / "gone.png").unlink()
    assert complaint(tmp_path) == f"{tmp_path}/val/new: a class that training has not"


def test_a_long_list_of_problems_is_cut_and_counted(tmp_path):
    for number in range(25):
        (tmp_path / f"c{number:02}").mkdir()
    text = complaint(tmp_path)
    assert "c00" in text
    assert text.endswith("; and 5 more")
