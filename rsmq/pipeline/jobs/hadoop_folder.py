"""A folder of an archive through Spark's JVM."""

from __future__ import annotations

from typing import Any, cast

from pyspark.sql import SparkSession

from rsmq.pipeline.jobs.folder import Item


class HadoopFolder:
    """A folder on any file system that Spark can use (a disk, HDFS, S3). Paths are relative to its address.

    It goes through the JVM that runs Spark, so it needs no client and no credentials of its own.
    """

    def __init__(self, spark: SparkSession, address: str) -> None:
        context = spark.sparkContext
        self._jvm = cast(Any, context._jvm)
        self._gateway = cast(Any, context._gateway)
        hadoop = context._jsc.hadoopConfiguration()
        self._root = self._jvm.org.apache.hadoop.fs.Path(address)
        self._files = self._root.getFileSystem(hadoop)
        self._root = self._files.makeQualified(self._root)
        self._renamer = self._jvm.org.apache.hadoop.fs.FileContext.getFileContext(self._root.toUri(), hadoop)
        self.address: str = self._root.toString()

    def exists(self, path: str = "") -> bool:
        """Whether a file or folder exists."""
        return bool(self._files.exists(self._at(path)))

    def list(self, path: str = "") -> list[Item]:
        """Its content, sorted by name; empty if it does not exist."""
        if not self.exists(path):
            return []
        found = self._files.listStatus(self._at(path))
        items = (
            Item(each.getPath().getName(), each.getLen(), each.isDirectory(), each.getModificationTime())
            for each in found
        )
        return sorted(items, key=lambda item: item.name)

    def size(self, path: str) -> int:
        """Bytes of the files in a folder, without those that Spark ignores."""
        return sum(item.size for item in self.list(path) if not item.is_folder and item.name[0] not in "._")

    def read(self, path: str) -> str:
        """The text of a small file."""
        stream = self._files.open(self._at(path))
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def write(self, path: str, text: str) -> bool:
        """Create a small file, whole or not at all. Returns False and changes nothing if it exists."""
        draft = self._at(f"{path}.draft")
        stream = self._files.create(draft, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        return self._rename(draft, self._at(path))

    def move(self, source: str, target: str) -> bool:
        """Rename a file or folder; parents of the target are created. False if the target exists."""
        self._files.mkdirs(self._at(target).getParent())
        return self._rename(self._at(source), self._at(target))

    def delete(self, path: str) -> None:
        """Remove a file or a folder with its content, if it exists."""
        self._files.delete(self._at(path), True)

    def _rename(self, source: Any, target: Any) -> bool:
        modes = self._gateway.new_array(getattr(self._jvm.org.apache.hadoop.fs, "Options$Rename"), 0)
        if self._files.exists(target):
            return False
        self._renamer.rename(source, target, modes)
        return True

    def _at(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, path) if path else self._root
