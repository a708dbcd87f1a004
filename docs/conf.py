"""The settings of the site that bin/docs makes: Sphinx reads them, with the root of the repository as the source."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_site")]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "tensorflow"  # with it ringtrain.keras has all its names

project = "ringtrain"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "contents", "public"]
root_doc = "README"
# Pages are where they are in the repository, so each link between them is right in both.
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md", "docs/*/*.md"]
exclude_patterns = [".*", "build", "deploy", "dist", "examples", "native", "ringtrain", "tests", "**/__pycache__"]

html_theme = "furo"  # follows the reader's choice of light or dark
html_title = "ringtrain"
html_static_path: list[str] = []
html_copy_source = False
html_show_sphinx = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # GitHub's, which the pages link to
suppress_warnings = ["misc.highlighting_failure"]  # of output that is no program
pygments_dark_style = "monokai"

autodoc_mock_imports = ["pyspark"]  # which the tests of --long alone install
autodoc_preserve_defaults = True  # process_set=global_process_set, as it is written
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # the attributes of a docstring, which are those that :members: finds, too
