"""The table of figures in README.md."""

from benchmarks.figures import CONTENDERS, Peer, Programs, Row, found, is_slower, number, ratios_of

# Row of the README: what it is called there, and its area and name in the benchmark.
README_ROWS = (
    ("import of core, nn and probabilistic, beyond torch", "import", "import beyond torch, wall"),
    ('`td["a"]`', "access", "td['a']"),
    ("build a container of 3 leaves", "construct", "3 leaves"),
    ("`td[0]`, nested", "index", "td[0]"),
    ("`td.reshape(24)`, nested", "shape", "reshape"),
    ("`torch.stack` of 8", "combine", "stack 8"),
    ("`td + 1`, 128 leaves", "math", "td + 1, 128"),
    ("a sequence of four modules, by keyword", "nn", "tutorial Sequential(x=x)"),
    ("the same, by container", "nn", "tutorial Sequential(td)"),
    ("a module with other parameters", "functional", "call with params"),
    ("an exported model, in the runner of kd", "export", "exported model, own runner, per call"),
    ("memory of 100 000 containers", "memory", "RSS of 100k, 3 shared leaves"),
)
TABLE_BEGINS = "<!-- The table is written by `nox -s bench`. -->"
TABLE_ENDS = "<!-- End of the table. -->"


def readme_line(label: str, row: Row) -> str:
    """Return the line of one row in the table of the README."""
    cells = [label, *(readme_figure(row, contender) for contender in CONTENDERS)]
    return "| " + " | ".join([*cells, number(row["kd_td"])]) + " |"


def readme_figure(row: Row, contender: str) -> str:
    """Return a figure with three digits, or nothing where raw has no such work."""
    result = row["results"].get(contender)
    if not result or not result["min"]:
        return ""
    value = result["min"]
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:.{digits}f} {row['unit']}"


def readme_table(peer: Peer, programs: Programs) -> str:
    """Return the table of the README and the sentences below it."""
    lines = ["| | raw | peer | kd | kd / peer |", "| --- | ---: | ---: | ---: | ---: |"]
    for label, area, name in README_ROWS:
        row = found(peer, area, name)
        lines += [readme_line(label, row)] if row else []
    counted = [row for row in peer["rows"] if row["area"] in peer["geomeans"]]
    td_raw, kd_raw, kd_td = (number(mean) for mean in peer["overall"])
    lines.append(
        f"| geometric mean of {len(counted)} rows | 1.00 | {td_raw} | {kd_raw} | {kd_td} |"
    )
    slower = list(filter(is_slower, counted))
    missing = [row["area"] for row in counted if not row["results"].get("kd")]
    named = ", ".join(f"`{row['row']}` ({number(row['kd_td'])})" for row in slower)
    by_hand, by_peer, hand_by_peer = map(number, ratios_of(programs))
    whole = f"Whole programs ({', '.join(programs)}) take {by_hand} of the time of code by hand. "
    whole += f"Of the time of the peer they take {by_peer}, and code by hand {hand_by_peer}."
    sentence = f"Slower than the peer: {named}." if slower else "No row is slower than the peer."
    if missing:
        areas = ", ".join(f"`{area}`" for area in dict.fromkeys(missing))
        sentence += f" kd does not offer yet: {len(missing)} rows of {areas}."
    return "\n".join([*lines, "", whole, sentence])


def readme(text: str, peer: Peer, programs: Programs) -> str:
    """Return the README with its table written anew."""
    before, begins, rest = text.partition(TABLE_BEGINS)
    _, ends, after = rest.partition(TABLE_ENDS)
    if not (begins and ends):
        raise ValueError(f"README.md must hold `{TABLE_BEGINS}` and `{TABLE_ENDS}`")
    return f"{before}{begins}\n\n{readme_table(peer, programs)}\n\n{ends}{after}"
