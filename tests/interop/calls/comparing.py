"""Both libraries called with the same arguments, and what differs.

    python -m tests.interop.calls.comparing [--kind lazy] [--method update] [--pairs]
        [--list 50] [--json F]

Knows which calls there are; must not know which differences are allowed.
"""

import argparse
import collections
import inspect
import json
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tensordict
import tensordict.nn
import torch
from tests.interop.calls.arguments import LEFT_ALONE, OPERATORS, Call, Given, calls
from tests.interop.calls.outcomes import difference, outcome
from tests.interop.calls.subjects import KINDS, Library

import kd_core
import kd_nn

OURS = Library("kd", kd_core, kd_nn)
PEER = Library("peer", tensordict, tensordict.nn)


class Compared(NamedTuple):
    """One call of both libraries, and what differs; `None` if nothing does."""

    kind: str
    call: str
    method: str
    found: str | None
    ours: str
    theirs: str


def methods(peer: type) -> list[str]:
    """Return the public methods and properties of a class of the peer, and its operators."""
    names = [name for name in dir(peer) if not name.startswith("_") and name not in LEFT_ALONE]
    return [*names, *(name for name in OPERATORS if hasattr(peer, name))]


def compare(kind: str, call: Call, tmp: Path) -> Compared | None:
    """Return what both libraries do; `None` where arguments cannot be made for this kind."""
    seen: list[dict[str, Any]] = []
    for lib in (OURS, PEER):
        torch.manual_seed(0)
        td = KINDS[kind](lib)
        given = Given(lib, td, tmp)
        try:
            args = call.positional(given)
            kwargs = {name: value(given) for name, value in call.keywords.items()}
        except Exception as error:
            seen.append({"error": ("unmade",), "text": f"arguments: {error!r}"})
            continue
        seen.append(outcome(partial(run, td, call, args, kwargs), td, lib))
    if call.method == "densify":  # of the peer the order differs from run to run
        for each in seen:
            if isinstance(each.get("result"), tuple):
                each["result"][1].sort(key=lambda entry: entry[0])
    ours, theirs = seen
    if theirs.get("error") == ("unmade",):
        return None
    found = difference(ours, theirs)
    return Compared(
        kind, call.name, call.method, found, str(ours.get("text", ours.get("result")))[:300],
        str(theirs.get("text", theirs.get("result")))[:300],
    )  # fmt: skip


def run(td: Any, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method, or read a property."""
    if call.method in ("__delitem__", "__setitem__"):  # statements, whose results nobody sees
        getattr(type(td), call.method)(td, *args, **kwargs)
        return None
    if call.method.startswith("__"):
        return getattr(type(td), call.method)(td, *args, **kwargs)
    owner = getattr(td, call.method)
    return (
        owner(*args, **kwargs)
        if callable(owner) and not isinstance(owner, torch.nn.Module)
        else owner
    )


def every(kinds: list[str], chosen: list[str] | None, pairs: bool, tmp: Path) -> Iterator[Compared]:
    """Yield every call of the product."""
    for kind in kinds:
        cls = type(KINDS[kind](PEER))
        for method in methods(cls):
            if chosen and method not in chosen:
                continue
            for call in calls(cls, method, pairs):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    result = compare(kind, call, tmp)
                if result is not None:
                    yield result


def family(method: str) -> str:
    """Return what kind of call a method is: the folder or module of kd that it is written in."""
    member = inspect.getattr_static(OURS.TensorDict, method, None)
    member = getattr(member, "fget", member)
    code = getattr(inspect.unwrap(getattr(member, "__func__", member)), "__code__", None)
    path = Path(code.co_filename) if code else Path()
    return (path if path.parent.name == "kd_core" else path.parent).stem.strip("_") or "other"


def table(found: Iterable[Compared]) -> str:
    """Return how many calls were compared: a row for each kind of container, a column of call."""
    cells = collections.Counter((one.kind, family(one.method)) for one in found)
    kinds, families = ({pair[at]: None for pair in sorted(cells)} for at in (0, 1))
    rows = [["", *families, "all"]]
    for kind in kinds:
        numbers = [cells[kind, each] for each in families]
        rows.append([kind, *map(str, [*numbers, sum(numbers)])])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def report(found: list[Compared], longest: int) -> None:
    """Print how many calls hold for each kind, and the most frequent differences."""
    for kind in [*KINDS, "ALL"]:
        of_kind = [one for one in found if kind in (one.kind, "ALL")]
        differ = sum(one.found is not None for one in of_kind)
        hold = 100 * (1 - differ / max(len(of_kind), 1))
        if of_kind:
            print(f"{kind:12s} {len(of_kind):6d} calls {differ:6d} differ {hold:5.1f} % hold")
    print(table(found))
    groups = collections.Counter((one.method, one.found) for one in found if one.found)
    for (method, what), count in groups.most_common(longest):
        one = next(one for one in found if (one.method, one.found) == (method, what))
        print(f"{count:5d} {method}: {what}\n        {one.kind}: {one.call}")
        print(f"        ours   {one.ours}\n        theirs {one.theirs}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="")
    parser.add_argument("--method", default="")
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--list", type=int, default=40)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [name for name in options.kind.split(",") if name] or list(KINDS)
    chosen = [name for name in options.method.split(",") if name] or None
    with tempfile.TemporaryDirectory() as folder:
        found = list(every(kinds, chosen, options.pairs, Path(folder)))
    report(found, options.list)
    if options.json:
        Path(options.json).write_text(json.dumps([one._asdict() for one in found if one.found]))


if __name__ == "__main__":
    main()
