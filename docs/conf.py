"""Settings of Sphinx for the documentation site: ``make docs``."""

import importlib.metadata
import re
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.highlighting import lexers

project = "fedsim"
author = "The fedsim maintainers"
release = version = importlib.metadata.version("fedsim-jax")
REPOSITORY = importlib.metadata.metadata("fedsim-jax")["Project-URL"].partition(", ")[2]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]

# Notebooks are shown with the outputs that are committed, which tests/test_notebooks.py compares with new ones.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 4

# The docstrings are in Google's style. A name in single backquotes is a link.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autosummary_generate = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "sphinx_book_theme"
html_title = "fedsim"
html_theme_options = {
    "repository_url": REPOSITORY,
    "repository_branch": "main",
    "use_repository_button": True,
    "use_download_button": False,
    "show_navbar_depth": 1,
    "home_page_in_toc": True,
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
}
html_copy_source = False
html_show_sourcelink = False
# A table that is wider than the page scrolls by itself, and not the page with it.
html_css_files = ["site.css"]
html_static_path = ["_static"]


NAMES = set((Path(__file__).parent / "names.txt").read_text(encoding="utf-8").split())


def _marked_up(app, what, name, obj, options, lines):
    """Makes code of single-quoted names that are not public, such as fields; leaves out a docstring that Python wrote."""
    if what == "class" and lines and lines[0].startswith(f"{getattr(obj, '__name__', '')}("):
        lines.clear()
    # Sphinx takes all but the last of several names for a type, so they are joined without a space.
    lines[:] = [
        re.sub(r"^(:(?:ivar|param) )(.*?):(?= |$)", lambda found: found[1] + found[2].replace(", ", ",\u200b") + ":", line)
        for line in lines
    ]
    lines[:] = [
        _BACKQUOTED.sub(lambda found: found[0] if _last(found[1]) in NAMES else f"``{found[1]}``", line) for line in lines
    ]


_BACKQUOTED = re.compile(r"(?<![`:\w])`([\w.]+)`(?![`_])")


def _last(name):
    return name.rpartition(".")[2]


def setup(app):
    lexers["csv"] = TextLexer()  # Pygments has none
    app.connect("autodoc-process-docstring", _marked_up)
