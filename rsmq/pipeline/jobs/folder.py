"""Folders of an archive: small files that exist whole or not at all, listings, moves; and who may write there now."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from uuid import uuid4

from pyarrow import fs

from rsmq.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCAL: Final = "file:"


@dataclass(frozen=True, slots=True)
class Item:
    """One file or folder of a listing. `size` in bytes."""

    name: str
    size: int
    is_folder: bool
    modified_ms: int


class Folder(Protocol):
    """A folder on some file system. Paths are relative to its address."""

    address: str

    def exists(self, path: str = "") -> bool:
        """Whether a file or folder exists."""

    def list(self, path: str = "") -> list[Item]:
        """Its content, sorted by name; empty if it does not exist."""

    def size(self, path: str) -> int:
        """Bytes of the files in a folder, without those that Spark ignores."""

    def read(self, path: str) -> str:
        """The text of a small file."""

    def write(self, path: str, text: str) -> bool:
        """Create a small file, whole or not at all. Returns False and changes nothing if it exists."""

    def move(self, source: str, target: str) -> bool:
        """Rename a file or folder; parents of the target are created. False if the target exists."""

    def delete(self, path: str) -> None:
        """Remove a file or a folder with its content, if it exists."""


class ArrowFolder:
    """A folder through Arrow: a disk, or what `pyarrow.fs` has a URL for (s3://, gs://, hdfs://). It needs no JVM."""

    def __init__(self, address: str) -> None:
        path = address.removeprefix("file://")
        if "://" in path:
            self.files, root = fs.FileSystem.from_uri(path.replace("s3a://", "s3://", 1))
        else:
            self.files, root = fs.LocalFileSystem(), os.path.abspath(path.removeprefix(LOCAL))
        self.is_local = isinstance(self.files, fs.LocalFileSystem)
        self.root = root.rstrip("/")
        self.address = f"{LOCAL}{self.root}" if self.is_local else address

    def exists(self, path: str = "") -> bool:
        """Whether a file or folder exists."""
        return bool(self.files.get_file_info(self.at(path)).type != fs.FileType.NotFound)

    def list(self, path: str = "") -> list[Item]:
        """Its content, sorted by name; empty if it does not exist."""
        found = self.files.get_file_info(fs.FileSelector(self.at(path), allow_not_found=True))
        items = (
            Item(each.base_name, each.size or 0, each.type == fs.FileType.Directory, (each.mtime_ns or 0) // 1_000_000)
            for each in found
        )
        return sorted(items, key=lambda item: item.name)

    def size(self, path: str) -> int:
        """Bytes of the files in a folder, without those that Spark ignores."""
        return sum(item.size for item in self.list(path) if not item.is_folder and item.name[0] not in "._")

    def read(self, path: str) -> str:
        """The text of a small file."""
        with self.files.open_input_stream(self.at(path)) as stream:
            return str(stream.read().decode())

    def write(self, path: str, text: str) -> bool:
        """Create a small file, whole or not at all. Returns False and changes nothing if it exists."""
        draft = f"{path}.{uuid4().hex[:8]}.draft"
        with self.create(draft) as stream:
            stream.write(text.encode())
        return self.move(draft, path)

    def create(self, path: str) -> Any:
        """A stream that writes a new file. Parents are created."""
        self.files.create_dir(self.at(path).rpartition("/")[0])
        return self.files.open_output_stream(self.at(path))

    def move(self, source: str, target: str) -> bool:
        """Rename a file or folder; parents of the target are created. False if the target exists."""
        self.files.create_dir(self.at(target).rpartition("/")[0])
        if self.is_local and os.path.isfile(self.at(source)):
            try:
                os.link(self.at(source), self.at(target))  # fails if it exists, also if it came this moment
            except FileExistsError:
                return False
            finally:
                os.unlink(self.at(source))
            return True
        if self.exists(target):
            return False
        self.files.move(self.at(source), self.at(target))
        return True

    def delete(self, path: str) -> None:
        """Remove a file or a folder with its content, if it exists."""
        found = self.files.get_file_info(self.at(path))
        if found.type == fs.FileType.Directory:
            self.files.delete_dir(self.at(path))
        elif found.type == fs.FileType.File:
            self.files.delete_file(self.at(path))
            if self.is_local:  # Spark's checksum of the file, which would be wrong for a new one of this name
                Path(self.at(path)).with_name(f".{found.base_name}.crc").unlink(missing_ok=True)

    def at(self, path: str) -> str:
        """The full path."""
        return f"{self.root}/{path}" if path else self.root


@contextmanager
def exclusive(address: str, name: str) -> Iterator[None]:
    """Be the only process with this name in an archive. Raises ConfigError at once if another one is.

    A lock of the operating system, which ends with its process. An archive that is not on a disk of this machine has
    none: there the records of the archive let only one of two writers commit.
    """
    if not address.startswith(LOCAL) or fcntl is None:
        yield
        return
    path = Path(address.removeprefix("file://").removeprefix(LOCAL), "_rsmq", "locks", f"{name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"another `rsmq pipeline archive` with --name {name} is at work in {address}: wait until it has ended, "
                f"or use another --name"
            ) from None
        yield  # the lock ends with the file
