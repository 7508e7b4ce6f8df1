"""Comparison of stored runs: tables, figures, and a page that opens offline."""

from stratafl.base.callable_package import make_callable

make_callable(__name__, "reporting")
