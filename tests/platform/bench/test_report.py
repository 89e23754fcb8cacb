"""Reports: verdicts, JSON lines and their fields."""

import json
from io import StringIO
from pathlib import Path

from rich.console import Console

from loraplex.platform.bench.report import Case, Ratio, Report, write_lines


def make_report() -> Report:
    report = Report("demo", ("speed",))
    report.cases.append(Case("one [row]", {"rows": 1}, {"speed": 2.5}))
    report.ratios += [Ratio("fast", 2.0, 3.0), Ratio("cheap", 2.0, 3.0, "at most"), Ratio("shown", 1.0)]
    return report


def test_verdicts() -> None:
    assert [ratio.holds for ratio in make_report().ratios] == [False, True, None]


def test_every_line_is_whole_and_names_hardware_and_versions(tmp_path: Path) -> None:
    path = write_lines(make_report(), tmp_path / "results")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["case"] for line in lines] == ["one [row]", "fast", "cheap", "shown"]
    assert lines[0]["shape"] == {"rows": 1} and lines[0]["figure"] == {"speed": 2.5}
    assert lines[1]["figure"] == {"ratio": 2.0, "kind": "at least", "required": 3.0, "holds": False}
    for line in lines:
        assert {"benchmark", "at", "commit", "hardware", "versions"} <= set(line)
        assert set(line["hardware"]) == {"cpu", "cores", "memory_bytes", "gpu"}
        assert {"python", "loraplex", "torch", "transformers"} <= set(line["versions"])


def test_people_get_every_figure() -> None:
    console = Console(width=100, record=True, file=StringIO())
    make_report().print(console)
    shown = console.export_text()
    assert "one [row]" in shown and "2.50" in shown and "at most 3" in shown


def test_many_cases_stand_below_each_other() -> None:
    report = Report("demo", ("speed", "size"))
    report.cases += [Case(f"case {number}", {}, {"speed": number + 0.25}) for number in range(12)]
    console = Console(width=60, record=True, file=StringIO())
    report.print(console)
    lines = console.export_text().splitlines()
    assert sum("│ case " in line for line in lines) == 12
    assert any("case 11" in line and "11.25" in line and " - " in line for line in lines)
