"""The hook of `mkdocs build` that makes pages of what lies outside of docs/.

The README, the changelog and others become pages as they are. A notebook's cells become one page;
with EXECUTE_NOTEBOOKS=1 it runs first, and the page shows what it printed and drew. Links that lead
to files of the repository lead to their pages.
"""

from __future__ import annotations

import base64
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "tests/others/README.md": "other_suites.md",
}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES |= {f"notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in NOTEBOOKS}
SOURCES = {page: source for source, page in PAGES.items()}
# Code, which has no links, or a link.
LINK = re.compile(r"```.*?```|`[^`\n]*`|(\]\()([^)#\s]+)(#[^)\s]*)?(?=\))", re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    for source, page in PAGES.items():
        path = ROOT / source
        if path.suffix == ".md":
            files.append(File.generated(config, page, content=path.read_text()))
            continue
        text, pictures = as_page(path)
        files.append(File.generated(config, page, content=text))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    here = page.file.src_uri
    source = SOURCES.get(here, f"docs/{here}")

    def of_site(link: re.Match[str]) -> str:
        opening, target, anchor = link[1], link[2], link[3] or ""
        if not target or "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        found = PAGES.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(found) is None:
            raise PluginError(f"{source}: {target} is no page of the site")
        return opening + posixpath.relpath(found, posixpath.dirname(here) or ".") + anchor

    return LINK.sub(of_site, markdown)


def as_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Returns a notebook as Markdown, and its pictures by name."""
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    if os.environ.get("EXECUTE_NOTEBOOKS"):
        import nbclient

        resources = {"metadata": {"path": path.parent}}
        nbclient.NotebookClient(notebook, kernel_name="python3", resources=resources).execute()
    parts, pictures = [], {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![](../notebooks/{name})")
            elif text := output.get("text") or data.get("text/plain"):
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures
