"""Read the page's files in `static/`: for the server one by one, for the report as one text."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

__all__ = ["HTML", "inline", "read_assets"]

HTML = "page.html"

_STYLE = re.compile(r'<link rel="stylesheet" href="static/([\w.]+)">')
_SCRIPT = re.compile(r'<script src="static/([\w.]+)"></script>')


@functools.cache
def read_assets() -> dict[str, str]:
    """Return name → text of every file of the page."""
    folder = resources.files("clusterenv.monitor.page") / "static"
    return {entry.name: entry.read_text("utf-8") for entry in folder.iterdir() if entry.is_file()}


def inline(data: bytes) -> str:
    """Return the page as one text: styles, scripts and this JSON in it, and nothing loaded from anywhere.

    Its policy allows only these scripts, by their hashes: whatever an environment wrote into a traceback, none of it
    runs.
    """
    assets = read_assets()
    html = assets[HTML]
    styles = [assets[name] for name in _STYLE.findall(html)]
    scripts = [assets[name] for name in _SCRIPT.findall(html)]
    policy = (
        f"default-src 'none'; style-src {_hashes(styles)}; script-src {_hashes(scripts)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    html = html.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">', 1)
    html = _STYLE.sub(lambda found: f"<style>{assets[found[1]]}</style>", html)
    # Without "<", no text can end the element, nor begin a comment in it.
    text = data.decode().replace("<", "\\u003c")
    block = f'<script type="application/json" id="data">{text}</script>\n'
    parts = _SCRIPT.split(html)  # text, name, text, name, ..., text
    parts[1::2] = [f"<script>{assets[name]}</script>" for name in parts[1::2]]
    return parts[0] + block + "".join(parts[1:])


def _hashes(texts: list[str]) -> str:
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
