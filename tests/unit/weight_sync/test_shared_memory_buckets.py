"""Bucket files: closed to others, unique, gone afterwards, and refused where there is no room."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lit_rl.weight_sync.shared_memory import SharedMemoryBuckets
from lit_rl.weight_sync.source import stream_weights


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_a_bucket_is_readable_by_its_user_only_after_writing(tmp_path: Path, umask: int) -> None:
    buckets = SharedMemoryBuckets(tmp_path)
    before = os.umask(umask)
    try:
        path = buckets.write([("a", torch.arange(3.0))])
    finally:
        os.umask(before)

    assert mode(path) == 0o600
    # What safetensors writes before the file has its name lies behind this door.
    assert mode(path.parent) == 0o700
    assert path.parent.parent == tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8])
def test_a_bucket_holds_every_tensor_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a": torch.tensor([[1.25, -2.0]]).to(dtype),
        "b": torch.tensor(7).to(dtype),
        "c": torch.empty(0, 3).to(dtype),
    }

    loaded = load_file(SharedMemoryBuckets(tmp_path).write(list(tensors.items())))

    assert set(loaded) == {"a", "b", "c"}
    assert all(loaded[name].dtype == dtype and torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_streamed_weights_arrive_under_their_names(tmp_path: Path, tiny_causal_lm: nn.Module) -> None:
    buckets = SharedMemoryBuckets(tmp_path)
    received = {}
    for bucket in stream_weights(tiny_causal_lm, 2000, torch.float32):
        path = buckets.write(bucket)
        received |= load_file(path)
        buckets.release(path)

    expected = dict(tiny_causal_lm.named_parameters())
    assert set(received) == set(expected)
    assert all(torch.equal(received[name], expected[name]) for name in expected)


def test_names_are_unique_over_buckets_and_writers(tmp_path: Path) -> None:
    writers = [SharedMemoryBuckets(tmp_path) for _ in range(2)]
    paths = [writer.write([("a", torch.ones(1) * number)]) for number in range(3) for writer in writers]

    assert len(set(paths)) == 6
    assert [load_file(path)["a"].item() for path in paths] == [0, 0, 1, 1, 2, 2]


def test_closing_leaves_nothing_behind_and_may_be_repeated(tmp_path: Path) -> None:
    buckets = SharedMemoryBuckets(tmp_path)
    released, kept = buckets.write([("a", torch.ones(1))]), buckets.write([("b", torch.ones(1))])

    buckets.release(released)
    buckets.release(released)
    assert not released.exists()
    assert kept.exists()
    buckets.close()
    buckets.close()
    assert list(tmp_path.iterdir()) == []
    SharedMemoryBuckets(tmp_path).close()


def test_left_overs_of_dead_processes_go_and_those_of_live_ones_stay(tmp_path: Path, dead_pid: int) -> None:
    alive = SharedMemoryBuckets(tmp_path).write([("a", torch.ones(1))])
    dead = tmp_path / f"lit_rl_weights_{dead_pid}_abc"
    dead.mkdir()
    (dead / "bucket_1.safetensors").touch()
    (dead / ".tmpXyZ").touch()  # safetensors was cut short
    foreign = tmp_path / "lit_rl_weights_of_mine"
    foreign.touch()

    buckets = SharedMemoryBuckets(tmp_path)

    assert not dead.exists()
    assert alive.exists()
    assert foreign.exists()
    assert buckets.remove_leftovers() == 0


def test_left_overs_that_cannot_be_removed_are_left(
    tmp_path: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"lit_rl_weights_{dead_pid}_abc").mkdir()

    def refuse(path: object, *args: object, **kwargs: object) -> None:
        raise PermissionError(f"another user's: {path}")

    monkeypatch.setattr(os, "rmdir", refuse)

    assert SharedMemoryBuckets(tmp_path).remove_leftovers() == 0


def test_a_bucket_without_room_is_refused_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=16 << 20))
    buckets = SharedMemoryBuckets(tmp_path)

    with pytest.raises(OSError, match=r"bucket of 8 MB does not fit into .* \(17 MB free\).*weight_bucket_mib"):
        buckets.write([("a", torch.zeros(2_000_000))])

    assert list(tmp_path.iterdir()) == []
