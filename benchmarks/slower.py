"""The table of rows in which the peer is faster, and why."""

from typing import Final

from benchmarks.figures import Peer, area_rows, figure, is_slower, number

SLOWER_HEAD: Final = """
## Slower than the peer

Where *floor/peer* is above 1, the shortest correct code is slower than the peer, too.

| slower than the peer | peer | kd | kd/peer | floor/peer | because |
| --- | ---: | ---: | ---: | ---: | --- |
"""

CHECKED = "all leaves are checked before the first write: an error changes nothing"
ASKED = "it is asked first whether a step changed, and each call returns a list of its own"
RESOLVED = "keys are resolved and checked at once: calls and compiled code need not do it"

REASONS: Final = {
    ("access", "batch_size"): "the size is an attribute of the shared descriptor, one read more",
    ("math", "update_, 16"): CHECKED,
    ("math", "copy_, 16"): CHECKED,
    ("nn", "in_keys of a module"): "each call returns a list, whose edits reach the module",
    ("nn", "in_keys of 3 layers"): ASKED,
    ("nn", "in_keys of 10 layers"): ASKED,
    ("nn", "build 3 layers"): RESOLVED,
    ("nn", "build 10 layers"): RESOLVED,
    ("export", "saved size"): "torch saves the source line of each frame: it is not the program",
    ("io", "safetensors round trip, 16 x 256 KB"): (
        "the file is on the disk before it has its name, and each tensor has a checksum"
    ),
}


def table_of_slower(peer: Peer) -> list[str]:
    """Return the lines of the table of rows in which the peer is faster."""
    lines = []
    for area, rows in area_rows(peer).items():
        for row in filter(is_slower, rows):
            slower, over = row["kd_td"], row.get("kd_floor")
            floor = None if slower is None or over is None else slower / over
            cells = [f"{area}: `{row['row']}`", figure(row, "tensordict"), figure(row, "kd")]
            cells += [number(slower), number(floor), REASONS.get((area, row["row"]), "")]
            lines.append("| " + " | ".join(cells) + " |")
    return lines
