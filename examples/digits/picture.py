"""The picture: scans with their prediction, reconstructions, the confusion matrix, the loss."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure

from kd_core import TensorDict
from shipping import Shipped

GOOD, BAD, INK = "#2a7f62", "#c8443b", "#22333b"


def draw_report(path: Path, scans: TensorDict, shipped: Shipped, history: list[float]) -> None:
    """Draw the report of one shipped file to `path`."""
    images, labels = scans["image"].numpy(), scans["label"].numpy()
    shares = np.exp(shipped.logits - shipped.logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    found = shares.argmax(-1)
    plt.rcParams.update({"font.size": 9, "text.color": INK, "axes.labelcolor": INK})
    figure = plt.figure(figsize=(13, 9.4), layout="constrained")
    figure.suptitle(
        f"digits, scored from the {shipped.form} file alone: "
        f"{shipped.accuracy:.1%} of {len(labels)} held-out scans right",
        fontsize=14,
        fontweight="bold",
    )
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.12, 1])
    left, right = top.subfigures(1, 2, width_ratios=[1.55, 1])
    order = np.concatenate([np.flatnonzero(found != labels), np.flatnonzero(found == labels)])
    draw_scans(left, images, labels, found, shares, order)
    draw_pictures(right, images, shipped.pictures, labels)
    matrix, curve = bottom.subplots(1, 2, width_ratios=[1, 1.35])
    draw_confusion(matrix, labels, found)
    draw_loss(curve, history)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_scans(
    area: SubFigure,
    images: np.ndarray,
    labels: np.ndarray,
    found: np.ndarray,
    shares: np.ndarray,
    order: np.ndarray,
) -> None:
    """Draw scans with prediction and confidence, the wrong ones first."""
    wrong = int((found != labels).sum())
    area.suptitle(f"prediction and confidence ({wrong} wrong, in red; true digit in brackets)")
    for axes, i in zip(area.subplots(4, 9).flat, order, strict=False):
        right = found[i] == labels[i]
        colour = GOOD if right else BAD
        show(axes, images[i])
        for side in axes.spines.values():
            side.set(color=colour, linewidth=1 if right else 2.5)
        truth = "" if right else f" ({labels[i]})"
        axes.set_title(f"{found[i]}{truth}  {shares[i].max():.0%}", color=colour, fontsize=8.5)


def draw_pictures(
    area: SubFigure, images: np.ndarray, pictures: np.ndarray, labels: np.ndarray
) -> None:
    """Draw one scan of each digit above what the network makes of it."""
    area.suptitle('scan (above) and ("out", "image") (below)')
    grid = area.subplots(4, 5)
    for digit in range(10):
        i = int(np.flatnonzero(labels == digit)[0])
        row, column = 2 * (digit // 5), digit % 5
        show(grid[row, column], images[i])
        show(grid[row + 1, column], pictures[i])


def draw_confusion(axes: Axes, labels: np.ndarray, found: np.ndarray) -> None:
    """Draw how often each digit was taken for which."""
    counts = np.zeros((10, 10), dtype=int)
    np.add.at(counts, (labels, found), 1)
    errors = np.where(np.eye(10, dtype=bool), 0, counts)
    axes.imshow(np.where(counts > 0, counts, np.nan), cmap="Greens", vmin=0, vmax=60)
    for true, taken in np.argwhere(counts > 0):
        wrong = errors[true, taken] > 0
        axes.text(
            taken,
            true,
            str(counts[true, taken]),
            ha="center",
            va="center",
            color=BAD if wrong else INK,
            fontweight="bold" if wrong else "normal",
        )
    axes.set(xticks=range(10), yticks=range(10), xlabel="predicted", ylabel="true digit")
    axes.set_title("confusion matrix")


def draw_loss(axes: Axes, history: list[float]) -> None:
    """Draw the mean loss of each epoch."""
    axes.plot(range(1, len(history) + 1), history, color=GOOD, linewidth=2)
    axes.set(xlabel="epoch", ylabel="loss (log scale)", yscale="log", xlim=(1, len(history)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:.0e}"[0] in "235" else "")
    axes.set_title("training loss")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def show(axes: Axes, image: np.ndarray) -> None:
    """Show one image of 8 x 8 pixels without ticks."""
    axes.imshow(image, cmap="gray_r", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[])
