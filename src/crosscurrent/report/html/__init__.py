"""One HTML page that holds a whole report: no outside assets, nothing fetched, readable on a phone."""

from crosscurrent.report.html.page import render, write

__all__ = ["render", "write"]
