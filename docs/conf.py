"""Sphinx settings: MyST pages, furo, and the reference from docstrings.

The pages build without a network. Set DOCS_ONLINE=1 to have names of torch and Python linked.
"""

import os
from pathlib import Path

from sphinx.application import Sphinx

project = "kd"
author = "The kd authors"
copyright = "The kd authors"
release = (Path(__file__).parents[1] / "VERSION").read_text(encoding="utf-8").strip()

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


def setup(app: Sphinx) -> None:
    """Connect what Sphinx calls; before napoleon, which writes markup of its own."""
    app.connect("autodoc-process-docstring", keep_asterisks, priority=100)
