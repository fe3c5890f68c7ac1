"""Weight buckets as files in shared memory, for replicas on the same host.

A file is written, its path is sent, every replica maps and loads it, and it is unlinked once all have acknowledged.
Each writer has a folder of its own, closed to other users, whose name carries its process id: runs never meet, and
left-overs of dead processes can be told from live ones. The folder also holds whatever safetensors writes on the way:
it saves into a temporary file and renames that over the name it was given (0.8).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import psutil
from safetensors.torch import save_file
from torch import Tensor

_PREFIX = "lit_rl_weights"


class SharedMemoryBuckets:
    """Writes buckets and takes them away again."""

    def __init__(self, folder: Path | None = None) -> None:
        """Take a shared-memory folder and remove what dead processes left there.

        Args:
            folder: Where to write; the host's shared memory by default, the temporary folder where there is none.
        """
        shared = Path("/dev/shm")
        self.folder = folder or (shared if shared.is_dir() else Path(tempfile.gettempdir()))
        self._counter = 0
        self._own_folder: Path | None = None
        self.remove_leftovers()

    def write(self, tensors: list[tuple[str, Tensor]]) -> Path:
        """Write one bucket.

        Args:
            tensors: Names and contiguous CPU or GPU tensors.

        Returns:
            The file, readable by this user only.

        Raises:
            OSError: If the folder lacks the space; checked before a byte is written, since a full shared memory kills
                the writer.
        """
        num_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
        free = shutil.disk_usage(self.folder).free
        if free < num_bytes + (16 << 20):
            raise OSError(
                f"Weight sync: a bucket of {num_bytes / 1e6:.0f} MB does not fit into {self.folder} "
                f"({free / 1e6:.0f} MB free). "
                "Lower data.serving.weight_bucket_mib, or give the machine more shared memory."
            )
        if self._own_folder is None:
            # Created with mode 0700, so nothing in it is open to others even before it has its final mode.
            self._own_folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}_{os.getpid()}_", dir=self.folder))
        self._counter += 1
        path = self._own_folder / f"bucket_{self._counter}.safetensors"
        save_file({name: tensor.cpu() for name, tensor in tensors}, path)
        path.chmod(0o600)
        return path

    def release(self, path: Path) -> None:
        """Unlink a bucket that every replica has loaded."""
        path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unlink whatever is still there; safe to call twice."""
        folder, self._own_folder = self._own_folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def remove_leftovers(self) -> int:
        """Remove the folders whose writer is dead, and return how many there were; another user's stay."""
        count = 0
        for path in self.folder.glob(f"{_PREFIX}_*"):
            pid = path.name.removeprefix(f"{_PREFIX}_").split("_")[0]
            if pid.isdigit() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(path, ignore_errors=True)
                count += not path.exists()
        return count
