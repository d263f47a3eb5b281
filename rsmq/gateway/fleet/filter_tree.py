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
    """Filters with their subscribers: a key K has a value V for each of its filters.

    Most filters of a fleet are a topic name with one subscriber: these are kept as a pair, without a dict of their own.
    """

    def __init__(self) -> None:
        self._exact: dict[str, tuple[K, V] | dict[K, V]] = {}
        self._root: FilterLevel[K, V] = FilterLevel()
        self.size = 0

    def put(self, pattern: str, key: K, value: V) -> None:
        """Add or replace the value of a key for a filter."""
        if "+" not in pattern and "#" not in pattern:
            of_name = self._exact.get(pattern)
            if not isinstance(of_name, dict):
                if of_name is None or of_name[0] == key:
                    self._exact[pattern] = key, value
                    self.size += of_name is None
                    return
                of_name = self._exact[pattern] = {of_name[0]: of_name[1]}
            found = of_name
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
            of_name = self._exact.get(pattern)
            if isinstance(of_name, dict):
                self.size -= of_name.pop(key, None) is not None
                if not of_name:
                    del self._exact[pattern]
            elif of_name is not None and of_name[0] == key:
                del self._exact[pattern]
                self.size -= 1
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
        found = list(exact.items()) if isinstance(exact, dict) else [] if exact is None else [exact]
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
