"""The contract suite over every server and every way to reach it: `make matrix`, docs/compatibility.md."""
