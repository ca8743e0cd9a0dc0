"""One HTML page about many runs, which needs nothing but a browser."""

from probmask.analysis.report.page import render_page, write_page

__all__ = ["render_page", "write_page"]
