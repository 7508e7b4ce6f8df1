"""Write the reference of all options in docs/config.md: `python docs/hooks/options.py`."""

from __future__ import annotations

from pathlib import Path

from stratafl.experiment.experiment import SECTIONS, all_options, shown_default
from stratafl.experiment.fields import Option

PAGE = Path(__file__).parents[1] / "config.md"
BEGIN, END = "<!-- options: written by docs/hooks/options.py -->", "<!-- end of options -->"


def reference() -> str:
    """All options, section by section, as Markdown."""
    options = all_options()
    parts = ["### At the top of the file", "", *_table([o for key, o in options.items() if "." not in key])]
    for name, section in SECTIONS.items():
        about = (section.__doc__ or "").partition("\n\n")[0].replace("\n    ", " ")
        inside = [option for key, option in options.items() if key.startswith(f"{name}.")]
        parts += ["", f"### [{name}]", "", about, "", *_table(inside)]
    return "\n".join(parts)


def _table(options: list[Option]) -> list[str]:
    rows = ["| option | accepts | default | meaning |", "|---|---|---|---|"]
    for option in options:
        meaning = " ".join(option.meaning.split()).replace("|", "\\|")
        rows.append(f"| `{option.key.rpartition('.')[2]}` | {option.accepts} | {shown_default(option)} | {meaning} |")
    return rows


def with_reference(text: str) -> str:
    """The page with the reference of the present options."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{reference()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_reference(PAGE.read_text()))
