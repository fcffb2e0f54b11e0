"""Sphinx: the API reference, from the docstrings. `make docs`; warnings are errors."""

from moe_a2a import __version__

project = "moe_a2a"
copyright = "the moe_a2a authors"
release = __version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": False}
# Defaults as the source writes them, instead of reprs.
autodoc_preserve_defaults = True
html_theme = "alabaster"
html_theme_options = {"description": "Expert parallelism for Mixture-of-Experts models", "page_width": "1100px"}
nitpicky = False
