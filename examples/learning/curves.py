"""What a run says: the task and its time, and a picture with one curve for each figure."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

OUT = Path(__file__).parent / "out"
CURVE, INK, PALE = "#2a7f62", "#22333b", "#d5dcdf"


@contextmanager
def told(about: str | None, usual: str) -> Iterator[None]:
    """Print what a program does and how long that takes on one core, and then how long it took.

    Args:
        about: the docstring of the program, whose first line is printed.
        usual: how long it usually takes.
    """
    print(f"{(about or '').partition(chr(10))[0]} Takes about {usual}.", flush=True)
    start = time.perf_counter()
    yield
    print(f"took {time.perf_counter() - start:.0f} s")


def report(
    name: str,
    title: str,
    history: Mapping[str, Sequence[float]],
    limit: tuple[str, float] | None = None,
) -> None:
    """Draw a history to `out/{name}.svg` and print its last figures.

    Args:
        name: name of the file.
        title: what the picture says.
        history: figures of each round.
        limit: a figure and the value that is best, drawn as a dashed line.
    """
    import matplotlib  # heavy, and only for the picture

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kd", "text.color": INK})
    plt.rcParams.update({"font.family": "sans-serif", "font.size": 10})
    figure, panels = plt.subplots(
        1, len(history), figsize=(4.1 * len(history), 2.9), layout="tight", squeeze=False
    )
    figure.suptitle(title, x=0.02, ha="left", fontsize=12)
    for axes, (figure_name, values) in zip(panels[0], history.items(), strict=True):
        axes.plot(values, color=CURVE)
        if limit is not None and limit[0] == figure_name:
            axes.axhline(limit[1], color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_title(figure_name, fontsize=10, loc="left")
        axes.grid(visible=True, alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(PALE)
        axes.tick_params(length=0, colors=INK)
        print(f"{figure_name}: from {values[0]:.3g} to {values[-1]:.3g}")
    OUT.mkdir(exist_ok=True)
    figure.savefig(OUT / f"{name}.svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    print(f"wrote {OUT / name}.svg")
