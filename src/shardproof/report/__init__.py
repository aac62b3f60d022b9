"""The page of a run: everything in its folder as one HTML file, live in a browser, or beside other runs."""

from shardproof.report.page import write_report

__all__ = ["write_report"]
