"""Which subscribers a topic name reaches: exact filters in a dict, those with wildcards in a trie by level."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FilterLevel(Generic[K, V]):
    """A level of the trie. `here`: subscribers whose filter ends here; `below`: those whose filter ends with `#`."""

    __slots__ = ("below", "children", "here")

    def __init__(self) -> None:
        self.children: dict[str, FilterLevel[K, V]] = {}
        self.here: dict[K, V] = {}
        self.below: dict[K, V] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing needs this node."""
        return not (self.children or self.here or self.below)


class FilterTree(Generic[K, V]):
    """Filters with their subscribers: a key K has a value V for each of its filters."""

    def __init__(self) -> None:
        self._exact: dict[str, dict[K, V]] = {}
        self._root: FilterLevel[K, V] = FilterLevel()
        self.size = 0

    def put(self, pattern: str, key: K, value: V) -> None:
        """Add or replace the value of a key for a filter."""
        if "+" not in pattern and "#" not in pattern:
            found = self._exact.setdefault(pattern, {})
        else:
            node, levels = self._root, pattern.split("/")
            is_open = levels[-1] == "#"
            for level in levels[:-1] if is_open else levels:
                node = node.children.setdefault(level, FilterLevel())
            found = node.below if is_open else node.here
        self.size += key not in found
        found[key] = value

    def remove(self, pattern: str, key: K) -> None:
        """Remove a key from a filter, if it is there."""
        if "+" not in pattern and "#" not in pattern:
            found = self._exact.get(pattern, {})
            if found.pop(key, None) is not None:
                self.size -= 1
            if not found:
                self._exact.pop(pattern, None)
            return
        levels = pattern.split("/")
        is_open = levels[-1] == "#"
        path, node = list[tuple[FilterLevel[K, V], str]](), self._root
        for level in levels[:-1] if is_open else levels:
            child = node.children.get(level)
            if child is None:
                return
            path.append((node, level))
            node = child
        if (node.below if is_open else node.here).pop(key, None) is not None:
            self.size -= 1
        for parent, level in reversed(path):
            if not parent.children[level].is_empty:
                break
            del parent.children[level]

    def match(self, name: str) -> list[tuple[K, V]]:
        """The subscribers of a topic name; a key whose filters overlap occurs once for each of them."""
        exact = self._exact.get(name)
        found = list(exact.items()) if exact else []
        root = self._root
        if root.children or root.below:
            levels = name.split("/")
            if name[:1] == "$":  # no wildcard in the first level matches it
                first = root.children.get(levels[0])
                if first is not None:
                    self._walk(first, levels, 1, found)
            else:
                self._walk(root, levels, 0, found)
        return found

    def _walk(self, node: FilterLevel[K, V], levels: list[str], at: int, found: list[tuple[K, V]]) -> None:
        if node.below:
            found += node.below.items()
        if at == len(levels):
            if node.here:
                found += node.here.items()
            return
        child = node.children.get(levels[at])
        if child is not None:
            self._walk(child, levels, at + 1, found)
        child = node.children.get("+")
        if child is not None:
            self._walk(child, levels, at + 1, found)

    def __repr__(self) -> str:
        return f"<FilterTree size={self.size}>"
