"""The HTML page that shows many runs. It is one file and needs only a browser."""

from probmask.report.page import render_page, write_page

__all__ = ["render_page", "write_page"]
