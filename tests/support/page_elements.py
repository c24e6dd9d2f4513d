"""Read the elements of an HTML page in tests."""

from __future__ import annotations

from html.parser import HTMLParser


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text of its scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs), []))

    def handle_data(self, data):
        if self.found and self.cdata_elem:
            self.found[-1][2].append(data)

    def texts(self, tag):
        return ["".join(data) for name, _, data in self.found if name == tag]
