"""The bar chart of the page: an SVG that follows the reader's light or dark mode."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot

INK, OWN, BARE, PEER = "#010203", "#2f81f7", "#8b949e", "#d29922"
STYLE = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"


def draw(path: Path, bars: list[tuple[str, float, str]]) -> None:
    """One bar for each title, its CPU and what it belongs to, on a logarithmic axis, the cheapest on top."""
    with pyplot.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "rsmq", "font.family": "sans-serif", "text.color": INK}
    ):
        figure, axes = pyplot.subplots(figsize=(9, 0.32 * len(bars) + 1.1), layout="constrained")
        colors = {"rsmq": OWN, "bare": BARE}
        values = [value for _, value, _ in bars]
        axes.barh(
            range(len(bars)),
            [value - 1 for value in values],
            left=1,
            color=[colors.get(owner, PEER) for _, _, owner in bars],
            height=0.7,
        )
        for row, value in enumerate(values):
            text = f"{value:.1f}" if value < 100 else f"{value:,.0f}".replace(",", " ")
            axes.text(value * 1.06, row, text, va="center", fontsize=9)
        axes.set_xscale("log")
        axes.set_xlim(1, max(values) * 2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_yticks(range(len(bars)), [title for title, _, _ in bars])
        axes.invert_yaxis()
        axes.set_title("CPU of one worker, µs per message (logarithmic; shorter is better)", fontsize=11, loc="left")
        axes.tick_params(colors=INK, length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(INK)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    text = path.read_text().replace(INK, "currentColor")
    start = text.index(">", text.index("<svg")) + 1
    path.write_text("\n".join(line.rstrip() for line in (text[:start] + STYLE + text[start:]).splitlines()) + "\n")
