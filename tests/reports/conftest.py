"""Real runs to report on, and a real browser to open the page in."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stratafl.experiment.experiment import Experiment
from stratafl.reports.page import page as page_of
from stratafl.reports.page_data import page_data
from stratafl.runs.groups import collect_runs
from stratafl.runs.session import RunSession

METHODS = {"HFedAvg": "hfedavg", "MTGC": "mtgc"}
SETTINGS = len(METHODS)
SEEDS = (0, 1)
ROUNDS = 4


def experiment(method: str = "mtgc", seed: int = 0, **sections: Any) -> Experiment:
    """Handwritten digits, 2 groups of 2 clients."""
    return Experiment(
        tree="2x2",
        data={"source": "digits", "partition": [{"name": "classes", "k": 6}, {"name": "classes", "k": 3}]},
        model={"name": "mlp", "hidden": [8]},
        method=method,
        schedule=[2, 3],
        client={"lr": 0.1, "batch_size": 20, "clip_norm": 1.0},
        seed=seed,
        **{"rounds": ROUNDS, **sections},
    )


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two methods of two seeds each."""
    folder = tmp_path_factory.mktemp("stored") / "runs"
    for title, method in METHODS.items():
        for seed in SEEDS:
            RunSession.start(experiment(method, seed), title, folder).run()
    return folder


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> Path:
    """The same runs, to be changed."""
    return Path(shutil.copytree(runs, tmp_path / "runs"))


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change what a JSON file says."""
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def write(folders: Path | Sequence[Path], to: Path) -> Path:
    """The page over these folders' runs, in a file."""
    result, unreadable = collect_runs([folders] if isinstance(folders, Path) else folders)
    to.write_text(page_of(page_data(result, None, unreadable)), encoding="utf-8")
    return to


@pytest.fixture(scope="session")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page over the stored runs."""
    return write(runs, tmp_path_factory.mktemp("page") / "report.html")


FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1280,900",
    # whatever tried to leave the machine would end at a port where nobody listens
    "--proxy-server=127.0.0.1:9",
)  # fmt: skip


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("Chromium and its driver are not installed: the page is not tested in a browser")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(driver)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        browser = webdriver.Chrome(options=options, service=service)
        browser.set_script_timeout(30)
        yield browser
        browser.quit()


class Page:
    """A page in the browser, and what is asked of it in the tests."""

    def __init__(self, browser: Any):
        self.browser = browser

    def open(self, url: str | Path) -> Page:
        self.browser.get(url.as_uri() if isinstance(url, Path) else url)
        self.until("document.querySelector('#summary > *') && document.querySelector('#drift > *')")
        return self

    def js(self, expression: str) -> Any:
        return self.browser.execute_script(f"return {expression}")

    def until(self, condition: str, seconds: float = 20) -> None:
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.browser, seconds, poll_frequency=0.05).until(
            lambda browser: browser.execute_script(f"return Boolean({condition})"), condition
        )

    def click(self, selector: str) -> None:
        self.browser.find_element("css selector", selector).click()

    def choose(self, id: str, value: str) -> None:
        """Choose an entry of a list."""
        self.click(f'#{id} option[value="{value}"]')

    def press(self, selector: str, *keys: str) -> None:
        self.browser.find_element("css selector", selector).send_keys(*keys)

    def text(self, id: str) -> str:
        return self.js(f"document.getElementById('{id}').textContent")

    def drawn(self, figure: str) -> list[dict[str, Any]]:
        """The lines of a chart as they were given to it."""
        return self.js(f"document.querySelector('#{figure} .plot').chart.lines")

    def lines(self, figure: str, expected: int) -> int:
        """Curves drawn in a chart, paths that have more than one point, when they are as many as
        expected or have had time enough."""
        from selenium.common.exceptions import TimeoutException

        paths = f"[...document.querySelectorAll('#{figure} .lines path.line')]"
        count = f"{paths}.filter((path) => path.getAttribute('d').includes('L')).length"
        with suppress(TimeoutException):
            self.until(f"{count} === {expected}")
        return self.js(count)

    def errors(self) -> list[str]:
        """Messages of the browser's console."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.browser.get_log("browser")]

    def requests(self) -> list[str]:
        """Every address asked for since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def size(self, width: int, height: int = 900, phone: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.fixture
def page(chromium: Any) -> Iterator[Page]:
    """A page with nothing in its logs yet, as wide as a desk's screen, and light."""
    made = Page(chromium)
    made.browser.get("about:blank")
    made.errors(), made.requests()
    made.prefer("light")
    made.size(1280)
    yield made
    made.browser.get("about:blank")
