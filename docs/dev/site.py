"""What the site needs beside the pages: files that lie outside of `docs/`, and examples of docstrings as code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
ALSO = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/RESULTS.md")
EXAMPLE = re.compile(r"^>>> .*?(?=^\s*$|\Z)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Pages and examples that the repository keeps elsewhere belong to the site too."""
    for path in (*(ROOT / name for name in ALSO), *ROOT.glob("examples/**/*.py"), *ROOT.glob("examples/**/*.ipynb")):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave `docs/`, and those of pages that lie outside of it."""
    if page.file.src_uri in ALSO:
        return re.sub(r"\]\((\.\./)?docs/", r"](\1", markdown)
    return markdown.replace("](../", "](") if "/" not in page.file.src_uri else markdown.replace("](../../", "](../")


class Examples(griffe.Extension):
    """Examples in docstrings are code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
