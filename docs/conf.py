"""Sphinx settings: MyST pages, furo, and the reference from docstrings.

The pages build without a network. Set DOCS_ONLINE=1 to have names of torch and Python linked.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.notebook import notebook  # needs the line above

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
html_static_path = ["_static"]
html_css_files = ["kd.css"]
html_js_files = ["kd.js"]
html_logo = html_favicon = "_static/logo.svg"
# The colours of the pictures: see `tools/picture.py`.
_fonts = {
    "font-stack": "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
    "font-stack--monospace": "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace",
}
html_theme_options = {
    "light_css_variables": {
        **_fonts,
        "color-brand-primary": "#047857",
        "color-brand-content": "#1d4ed8",
        "color-background-secondary": "#f8fafc",
        "color-background-border": "#e2e8f0",
        "color-code-background": "#f8fafc",
        "color-inline-code-background": "#f1f5f9",
    },
    "dark_css_variables": {
        "color-brand-primary": "#34d399",
        "color-brand-content": "#7dabff",
        "color-brand-visited": "#a5b4fc",
        "color-background-primary": "#0b1120",
        "color-background-secondary": "#0f172a",
        "color-background-hover": "#1e293b",
        "color-background-border": "#26334a",
        "color-foreground-primary": "#e2e8f0",
        "color-foreground-secondary": "#94a3b8",
        "color-code-background": "#0f172a",
        "color-inline-code-background": "#1e293b",
    },
    "footer_icons": [],
    "top_of_page_buttons": [],
}
pygments_style, pygments_dark_style = "friendly", "github-dark"

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
            parts = re.split("(``.*?``|`[^`]*`)", line)
            parts[::2] = [part.replace("*", r"\*") for part in parts[::2]]
            lines[number] = "".join(parts)


def name_options(
    app: object,
    what: str,
    name: str,
    obj: object,
    options: object,
    signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Show options and examples by their names: their type variables say nothing to a reader."""
    if signature is None:
        return None, returned
    return re.sub(r"(Options|Example)\[[^\[\]]*\]", r"\1", signature), returned


def show_source(
    app: object, what: str, name: str, obj: object, skip: bool, options: object
) -> None:
    """Show what the source of a `forward` declares, without the defaults that tensors allow.

    Sphinx looks up every default in the source.
    """
    if hasattr(obj, "_kd_call"):
        vars(obj).pop("__signature__", None)


def prepare_page(app: object, docname: str, source: list[str]) -> None:
    """Trim fences; put the fragments of the next release on the changelog page."""
    # A doctest needs a blank line after its result, which readers need not see.
    fence = re.compile(r"^(```\w+\n.*?)\n+```$", re.DOTALL | re.MULTILINE)
    source[0] = fence.sub(r"\1\n```", source[0])
    if docname != "changelog" or not any((ROOT / "changelog.d").glob("*/*.md")):
        return
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--name", "kd"]
    command += ["--version", release, "--date", "unreleased"]
    draft = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    written = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    marker = "<!-- towncrier release notes start -->\n"
    source[0] = written.replace(marker, f"{marker}\n{draft}")


def add_notebook(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, object], doctree: object
) -> None:
    """Write the notebook of a page beside it, and put a button that downloads it above the page."""
    source = ROOT / "docs" / f"{pagename}.md"
    if doctree is None or app.builder.format != "html" or not source.exists():
        return
    text = notebook(source)
    if text is None:
        return
    target = Path(app.outdir) / f"{pagename}.ipynb"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    button = f'<a class="kd-notebook" href="{target.name}" download>Open as notebook</a>'
    context["body"] = f"{button}{context['body']}"


def setup(app: Sphinx) -> None:
    """Connect what Sphinx calls; before napoleon, which writes markup of its own."""
    app.connect("html-page-context", add_notebook)
    app.connect("source-read", prepare_page)
    app.connect("autodoc-skip-member", show_source)
    app.connect("autodoc-process-signature", name_options)
    app.connect("autodoc-process-docstring", keep_asterisks, priority=100)
