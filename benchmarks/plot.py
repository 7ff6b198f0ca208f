"""Draw the plot of the benchmark page: each area relative to hand-written loops."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, NullLocator

PEER, KD, INK, MUTED = "#9aa5ab", "#2a7f62", "#22333b", "#6b7a80"
TICKS = (0.5, 1, 2, 4, 8, 16)


def draw(
    geomeans: Mapping[str, Sequence[float | None]], overall: Sequence[float | None], path: Path
) -> None:
    """Draw peer/raw and kd/raw of every area that has both, on a logarithmic axis."""
    means = {**geomeans, "all areas": overall}
    areas = [(area, mean[0], mean[1]) for area, mean in means.items()]
    points = [(area, peer, kd) for area, peer, kd in areas if peer is not None and kd is not None]
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kd", "text.color": INK})
    plt.rcParams.update({"font.family": "sans-serif", "font.size": 10})
    figure, axes = plt.subplots(figsize=(8.2, 0.36 * len(points) + 1.5))
    figure.subplots_adjust(
        left=0.14, right=0.96, top=1 - 0.75 / figure.get_figheight(), bottom=0.14
    )
    for height, (_, peer, kd) in enumerate(reversed(points)):
        axes.plot([kd, peer], [height, height], color="#d5dcdf", linewidth=3, zorder=1)
        axes.scatter(peer, height, s=52, color=PEER, zorder=2)
        axes.scatter(kd, height, s=52, color=KD, zorder=3)
    axes.axvline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.set_xscale("log")
    axes.set_xlim(left=0.48)
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(points)), [area for area, *_ in reversed(points)])
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.set_xlabel(
        "relative to hand-written loops (raw = 1), logarithmic; left is faster", color=INK
    )
    axes.tick_params(length=0, colors=INK)
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#d5dcdf")
    for x, colour, name in ((0.0, KD, "kd"), (0.09, PEER, "peer (tensordict)")):
        axes.text(x, 1.045, "\N{BLACK CIRCLE}", color=colour, transform=axes.transAxes, fontsize=13)
        axes.text(x + 0.03, 1.05, name, transform=axes.transAxes)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)
