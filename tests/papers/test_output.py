"""Tables of `stratafl reproduce` at the widths of a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from papers.harness import reproduce
from papers.harness.estimate import Rate, Rates
from papers.harness.report import describe
from papers.harness.series import Options
from papers.mtgc.paper import MTGC
from tests.cli.test_widths import WIDTHS, check, invoke
from tests.papers.histories import reaching, results
from tests.slow import slow_unless

WIDTHS_OF_A_TERMINAL = pytest.mark.parametrize("width", slow_unless(lambda width: width in (40, 80), WIDTHS))


@WIDTHS_OF_A_TERMINAL
@pytest.mark.parametrize("name", ["table1", "fig4", "fig7a"])
def test_results_fit_a_terminal(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    measured = results(name, lambda case: reaching(7, 12, 0.95), seeds=2, scale="quick")
    options = Options(scale="quick")
    request = reproduce.Request.of(MTGC, [MTGC.find(name)], options, 2, ())
    reproduce.print_results(request, [describe(MTGC, measured, 2)], reproduce.Training(), Path("out"), False)
    shown = capsys.readouterr().out
    check(shown, width, "Local correction", "Group correction", "non-i.i.d." if name == "table1" else "accuracy")
    if name == "table1":
        check(shown, width, "client E2H40", "7.0 ± 0.0", "95 %")
        assert "80 %" not in shown


@WIDTHS_OF_A_TERMINAL
def test_the_list_fits_a_terminal(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("STRATAFL_DATA", str(tmp_path))
    monkeypatch.setattr(Rates, "seconds", lambda *arguments: 12_345.0)
    monkeypatch.setattr(Rates, "of", lambda *arguments: Rate(1234.0, "measured here just now, 2 workers"))
    check(
        invoke("reproduce", "--list"), width, "three_level", "stratafl data prepare NAME", "emnist_letters *", "10.3 h"
    )
