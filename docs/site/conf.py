# SPDX-License-Identifier: Apache-2.0
"""How ci/docs makes the documentation site: Sphinx, from the pages of docs/ and the docstrings."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import bps_rdma

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))

project = "bps_rdma"
author = "The bps_rdma contributors"
project_copyright = author
release = version = bps_rdma.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "generated",
]
exclude_patterns = ["site"]

# Links such as settings.md#settings, as they work where the source is read, too.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

default_role = "code"  # docstrings write `name` for code
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = "bps_rdma"
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
html_js_files = ["tables.js"]
html_show_sourcelink = False
html_copy_source = False
html_permalinks_icon = "#"
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

# Files of the repository's root that are pages of the site. The page in docs/ only says where the text is.
ROOT_PAGES = {
    "README.md": "readme",
    "CONTRIBUTING.md": "contributing",
    "SECURITY.md": "security-policy",
    "CHANGELOG.md": "changelog",
}


def read_page(app: Any, docname: str, source: list[str]) -> None:
    """Takes the text of a page of the root from there, and turns links to files outside of docs/ to pages."""
    text = source[0]
    for file, page in ROOT_PAGES.items():
        if docname == page:
            text = (ROOT / file).read_text()
            if file == "README.md":
                text = text.replace(f"# {project}\n", "# At a glance\n", 1)
            # Of the root, docs/x.md is x.md here, and LICENSE is ../LICENSE.
            text = re.sub(r"\]\((?!https?:|#|docs/)", "](../", text).replace("](docs/", "](")
            app.env.note_dependency(ROOT / file)
    for file, page in ROOT_PAGES.items():
        text = text.replace(f"](../{file}", f"]({page}.md")
    text = text.replace("](../docs/", "](")
    # A link whose text is a file's name gets the page's title instead.
    source[0] = re.sub(r"\[[\w./-]+\.md\]\(", "[](", text)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", read_page)
