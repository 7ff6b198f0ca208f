"""The report picture: predictions, reconstructions, the confusion matrix and the loss."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.gridspec import GridSpec
from matplotlib.lines import Line2D

from kd_core import TensorDict
from shipping import Shipped

GOOD, BAD, INK, MUTED = "#2a7f62", "#c8443b", "#22333b", "#6b7a80"


def draw_report(path: Path, scans: TensorDict, shipped: Shipped, history: list[float]) -> None:
    """Draw the report of one shipped file to `path`."""
    images, labels = scans["image"].numpy(), scans["label"].numpy()
    shares = np.exp(shipped.logits - shipped.logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    plt.rcParams.update({"font.size": 9.5, "text.color": INK, "axes.labelcolor": INK})
    plt.rcParams.update({"axes.titlesize": 12, "xtick.color": INK, "ytick.color": INK})
    figure = plt.figure(figsize=(13, 10.6))
    figure.text(0.05, 0.955, "Digits, scored from the file alone", fontsize=18, weight="bold")
    figure.text(
        0.05,
        0.932,
        f"{shipped.form}, in a process without kd: {shipped.accuracy:.1%} of {len(labels)} "
        "held-out scans right",
        color=MUTED,
        fontsize=11,
    )
    figure.add_artist(Line2D([0.05, 0.96], [0.918, 0.918], color="#d5dcdf", linewidth=1))
    top = {"bottom": 0.475, "top": 0.845}
    predictions = figure.add_gridspec(4, 8, left=0.05, right=0.61, wspace=0.16, hspace=0.42, **top)
    pairs = figure.add_gridspec(5, 2, left=0.685, right=0.96, wspace=0.3, hspace=0.16, **top)
    bottom = figure.add_gridspec(
        1, 2, left=0.075, right=0.96, bottom=0.065, top=0.385, width_ratios=[1, 1.62], wspace=0.2
    )
    draw_scans(predictions, images, labels, shares)
    draw_pairs(pairs, images, shipped.pictures, labels)
    draw_confusion(figure.add_subplot(bottom[0]), labels, shares.argmax(-1))
    draw_loss(figure.add_subplot(bottom[1]), history)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def headline(grid: GridSpec, title: str, note: str) -> None:
    """Write a title and a note above a grid."""
    assert grid.figure is not None
    left = grid.left
    grid.figure.text(left, grid.top + 0.044, title, fontsize=12)
    grid.figure.text(left, grid.top + 0.026, note, fontsize=9, color=MUTED)


def draw_scans(grid: GridSpec, images: np.ndarray, labels: np.ndarray, shares: np.ndarray) -> None:
    """Draw scans with prediction and confidence, the wrong ones first."""
    found = shares.argmax(-1)
    order = np.argsort(found == labels, kind="stable")
    wrong = int((found != labels).sum())
    headline(
        grid, "Prediction and confidence", f"{wrong} wrong, in red, the true digit in brackets"
    )
    for cell, i in zip(grid, order, strict=False):
        right = found[i] == labels[i]
        colour = GOOD if right else BAD
        axes = grid.figure.add_subplot(cell)
        show(axes, images[i], colour, 1 if right else 2.5)
        truth = "" if right else f" ({labels[i]})"
        title = f"{found[i]}{truth}  {shares[i].max():.0%}"
        axes.set_title(title, color=colour, fontsize=9, pad=4)


def draw_pairs(
    grid: GridSpec, images: np.ndarray, pictures: np.ndarray, labels: np.ndarray
) -> None:
    """Draw one scan of each digit beside what the network reconstructs from it."""
    headline(grid, "Scan and reconstruction", 'left: image, right: ("out", "image")')
    for digit in range(10):
        i = int(np.flatnonzero(labels == digit)[0])
        pair = grid[digit % 5, digit // 5].subgridspec(1, 2, wspace=0.04)
        scan, picture = (
            grid.figure.add_subplot(cell, anchor=side)
            for cell, side in zip(pair, "EW", strict=True)
        )
        show(scan, images[i], MUTED)
        show(picture, pictures[i], GOOD)


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
    axes.set_title("Confusion matrix", loc="left", pad=10)


def draw_loss(axes: Axes, history: list[float]) -> None:
    """Draw the mean loss of each epoch."""
    axes.plot(range(1, len(history) + 1), history, color=GOOD, linewidth=2)
    axes.set(xlabel="epoch", ylabel="loss (log scale)", yscale="log", xlim=(1, len(history)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:.0e}"[0] in "235" else "")
    axes.set_title("Training loss", loc="left", pad=10)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def show(axes: Axes, image: np.ndarray, colour: str, width: float = 1) -> None:
    """Show one image of 8 x 8 pixels in a frame, without ticks."""
    axes.imshow(image, cmap="gray_r", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[])
    for side in axes.spines.values():
        side.set(color=colour, linewidth=width)
