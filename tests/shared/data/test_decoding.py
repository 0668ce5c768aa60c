import io
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from shared.data.decoding import DecodedFiles, Ragged, broken_files, decode_all
from shared.data.image_files import decode, decoded_bytes
from shared.errors import UserError

RED = (200, 30, 10)


def save(path, image, **more):
    image.save(path, **more)
    return path


def color(image):
    """The mean of each channel of uint8 [3, H, W]."""
    return [round(value) for value in image.double().mean((1, 2)).tolist()]


@pytest.mark.parametrize(
    ("name", "image", "expected"),
    [
        ("rgb.png", Image.new("RGB", (5, 4), RED), RED),
        ("rgb.bmp", Image.new("RGB", (5, 4), RED), RED),
        ("grey.png", Image.new("L", (5, 4), 99), (99, 99, 99)),
        ("grey.JPG", Image.new("L", (5, 4), 99), (99, 99, 99)),
        ("two.png", Image.new("1", (5, 4), 1), (255, 255, 255)),
        ("palette.png", Image.new("RGB", (5, 4), RED).quantize(4), RED),
        ("palette.gif", Image.new("RGB", (5, 4), RED), RED),
        ("rgba.png", Image.new("RGBA", (5, 4), (*RED, 40)), RED),
        ("la.png", Image.new("LA", (5, 4), (99, 3)), (99, 99, 99)),
        ("cmyk.tif", Image.new("CMYK", (5, 4), (0, 255, 255, 0)), (255, 0, 0)),
        ("16.png", Image.fromarray(np.full((4, 5), 200 * 257, np.uint16)), (200, 200, 200)),
        ("16.tif", Image.fromarray(np.full((4, 5), 200 * 257, np.uint16)), (200, 200, 200)),
        ("float.tif", Image.fromarray(np.full((4, 5), 120.0, np.float32)), (120, 120, 120)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_people_have_becomes_three_channels_of_eight_bits(tmp_path, name, image, expected):
    image = decode(save(tmp_path / name, image))
    assert image.dtype == torch.uint8
    assert image.shape == (3, 4, 5)
    assert color(image) == pytest.approx(expected, abs=2)


def test_of_an_animation_the_first_picture_is_taken(tmp_path):
    frames = [Image.new("RGB", (5, 4), RED), Image.new("RGB", (5, 4), (0, 0, 255))]
    path = tmp_path / "moving.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    assert color(decode(path)) == pytest.approx(RED, abs=2)


def test_rotated_photographs_are_as_people_see_them(tmp_path):
    pixels = np.zeros((4, 6, 3), np.uint8)
    pixels[:, :3] = 255  # white on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    path = tmp_path / "turned.png"
    Image.fromarray(pixels).save(path, exif=exif)
    image = decode(path)
    assert image.shape == (3, 6, 4)
    assert image[0, :3].min() == 255, "left has become top"
    assert image[0, 3:].max() == 0


def broken(tmp_path):
    """Files that are no images, each with a word of what is said of it."""
    whole = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)).save(
        whole, "JPEG"
    )
    png = io.BytesIO()
    Image.new("RGB", (40, 40), RED).save(png, "PNG")
    contents = {
        "empty.jpg": b"",
        "text.jpg": b"no image at all",
        "cut.jpg": whole.getvalue()[: len(whole.getvalue()) // 2],
        "cut.png": png.getvalue()[:60],
        "flipped.png": png.getvalue().replace(b"IDAT", b"IDAX"),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return sorted(tmp_path / name for name in contents)


def test_each_broken_file_is_named_in_one_line(tmp_path):
    for path in [*broken(tmp_path), tmp_path / "absent.jpg", tmp_path]:
        with pytest.raises(UserError) as raised:
            decode(path)
        assert str(raised.value).startswith(f"{path}: ")
        assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("processes", [1, 2])
def test_all_broken_files_are_named_at_once(tmp_path, processes):
    good = [save(tmp_path / f"{i}.png", Image.new("RGB", (5, 4), RED)) for i in range(70)]
    paths = sorted(good + broken(tmp_path))
    with pytest.raises(UserError) as raised:
        decode_all(paths, decode, processes)
    for path in broken(tmp_path):
        assert f"{path}: " in str(raised.value)
    assert str(raised.value) == "; ".join(broken_files(paths, decode, processes))


def test_decoding_in_parallel_keeps_the_order(tmp_path):
    sizes = [(1 + i % 7, 1 + i % 5) for i in range(150)]
    paths = [
        save(tmp_path / f"{i:03}.png", Image.new("L", size, i)) for i, size in enumerate(sizes)
    ]
    images = decode_all(paths, decode, 2)
    assert [(im.shape[2], im.shape[1]) for im in images] == sizes
    assert [int(im[0, 0, 0]) for im in images] == list(range(150))
    ragged, lazy = Ragged(images), DecodedFiles(paths, decode)
    assert len(ragged) == len(lazy) == 150
    for index in (0, 1, 77, 149):
        assert torch.equal(ragged[index], images[index])
        assert torch.equal(lazy[index], images[index])


def decode_with_threads(path):
    return torch.ones(1_000_000).sum()[None]


@pytest.mark.timeout(60)
def test_files_are_decoded_when_this_process_has_used_threads(tmp_path):
    """A child that was forked has none of its parent's threads, and would wait for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        decode_with_threads(tmp_path)
        tensors = decode_all([tmp_path] * 3, decode_with_threads, 2)
    finally:
        torch.set_num_threads(before)
    assert [tensor.item() for tensor in tensors] == [1e6] * 3


SLOW = """
import os, sys, time
from pathlib import Path
import torch
from shared.data.decoding import decode_all

def slow(path):
    Path(f"{os.getpid()}.pid").touch()
    time.sleep(300)
    return torch.zeros(1)

if __name__ == "__main__":
    decode_all([Path(str(number)) for number in range(130)], slow, 2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only there can a process ask for it")
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_children_end_with_a_parent_that_is_killed(tmp_path, signum):
    (tmp_path / "program.py").write_text(SLOW)
    parent = subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path)
    deadline = time.monotonic() + 100
    while len(list(tmp_path.glob("*.pid"))) < 2:
        assert parent.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = [psutil.Process(int(path.stem)) for path in tmp_path.glob("*.pid")]
    parent.send_signal(signum)
    parent.wait(30)
    _, alive = psutil.wait_procs(children, timeout=30)
    alive = [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    for child in alive:
        child.kill()
    assert not alive


def test_memory_is_estimated_from_headers(tmp_path):
    paths = [save(tmp_path / f"{i}.png", Image.new("L", (10, 20))) for i in range(4)]
    assert decoded_bytes(paths) == 4 * 3 * 200
    assert decoded_bytes([*paths, *broken(tmp_path)[:1]]) < 5 * 3 * 1600
