"""What mkdocs does with this repository: pages from outside docs/, generated pages, links between both, and a check."""

from __future__ import annotations

import logging
from pathlib import Path

import check
import commands
import links
import notebook
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.site")  # below mkdocs' own logger, so that --strict counts warnings

ROOT = Path(__file__).parents[2]
PACKAGES = ("langchain", "llama-index", "haystack", "qdrant", "milvus", "lancedb", "pgvector", "chroma")
# Pages that are files of the repository outside docs/.
OUTSIDE = {
    **{f"integrations/{name}.md": f"integrations/{name}/README.md" for name in PACKAGES},
    "benchmarks.md": "benchmarks/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in docs/."""
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "reference/commands.md", content=commands.page()))
    if (index := ROOT / "notebooks" / "README.md").is_file():
        files.append(File.generated(config, "notebooks/index.md", content=index.read_text(encoding="utf-8")))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        executed = ROOT / "build" / "notebooks" / path.name  # by `make notebooks`
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebook.page(path, executed)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages."""
    sources = _sources(files)
    pages = {path: uri for uri, path in sources.items()}
    pages["README.md"] = "index.md"
    source = sources[page.file.src_uri]
    return links.rewrite(markdown, source=source, page=page.file.src_uri, pages=pages, root=ROOT, warn=log.warning)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link files of the repository that are no pages to the repository, if its address is known."""
    return links.to_repository(html, config.extra["repository"], root=ROOT)


def on_post_build(config: MkDocsConfig) -> None:
    """Check the files as a browser would read them."""
    for problem in check.problems(Path(config.site_dir)):
        log.warning(problem)


def _sources(files: Files) -> dict[str, str]:
    """The path in the repository of every page and image, by its address on the site."""
    sources = {}
    for file in files:
        if file.src_uri in OUTSIDE:
            sources[file.src_uri] = OUTSIDE[file.src_uri]
        elif file.src_uri == "notebooks/index.md":
            sources[file.src_uri] = "notebooks/README.md"
        elif file.src_uri.startswith("notebooks/"):
            sources[file.src_uri] = str(Path(file.src_uri).with_suffix(".ipynb").as_posix())
        else:
            sources[file.src_uri] = f"docs/{file.src_uri}"
    return sources
