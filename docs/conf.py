"""How the documentation is built: ``tox -e docs``, or ``python -m sphinx -W -b dirhtml docs site``."""

from __future__ import annotations

from crosscurrent import __version__

project = "crosscurrent"
author = "the crosscurrent authors"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
default_role = "code"

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "exclude-members": "abandon, tracer, training"}

copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["console.css"]
html_title = f"crosscurrent {version}"
