"""The contract suite over every server and every way to reach it: `python -m tests.matrix` writes docs/compatibility.md."""
