"""Sphinx settings: MyST pages, furo, and the reference from docstrings.

The pages build without a network. Set DOCS_ONLINE=1 to have names of torch and Python linked.
"""

import os
import subprocess
import sys
from pathlib import Path

from sphinx.application import Sphinx

project = "kd"
author = "The kd authors"
copyright = "The kd authors"
ROOT = Path(__file__).resolve().parents[1]
release = (ROOT / "VERSION").read_text(encoding="utf-8").strip()

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"kd {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88

if os.environ.get("DOCS_ONLINE"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }
# What is not ours has no target offline; what is ours and private has none by intent.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!kd_).*"),
    (r"py:.*", r"kd_\w+\.(.*\.)?_.*"),
    (r"py:class", r"kd_\w+\.(.*\.)?[A-Z]"),  # type variables
]


def keep_asterisks(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Show an asterisk of a docstring as itself: shapes are written `(*batch, n)`, code or not."""
    in_example = False
    for number, line in enumerate(lines):
        in_example = bool(line.strip()) and (in_example or line.lstrip().startswith(">>>"))
        if not in_example:
            parts = line.split("`")
            parts[::2] = [part.replace("*", r"\*") for part in parts[::2]]
            lines[number] = "`".join(parts)


def show_fragments(app: object, docname: str, source: list[str]) -> None:
    """Put the fragments of the next release on the changelog page, above the releases."""
    if docname != "changelog" or not any((ROOT / "changelog.d").glob("*/*.md")):
        return
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--name", "kd"]
    command += ["--version", release, "--date", "unreleased"]
    draft = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    written = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    marker = "<!-- towncrier release notes start -->\n"
    source[0] = written.replace(marker, f"{marker}\n{draft}")


def setup(app: Sphinx) -> None:
    """Connect what Sphinx calls; before napoleon, which writes markup of its own."""
    app.connect("source-read", show_fragments)
    app.connect("autodoc-process-docstring", keep_asterisks, priority=100)
