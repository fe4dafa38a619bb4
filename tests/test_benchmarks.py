"""Reading the benchmarks' lines, and that the head's figures belong together."""

import json
from pathlib import Path

import pytest

from memlab.errors import MemlabError
from memlab.experiments.benchmarks import FILE, benchmarks


def line(name: str, date: str, **measured: object) -> str:
    named = {"benchmark": name, "device": "NVIDIA H200", "date": date, "versions": {}}
    return json.dumps(named | measured) + "\n"


def test_runs_of_one_benchmark_newest_last(tmp_path: Path) -> None:
    file = tmp_path / FILE
    dates = ("2026-11-29", "2026-11-30", "2026-11-29")
    lines = [line("head", date, at=at) for at, date in enumerate(dates)]
    file.write_text(line("liger", "2026-12-01") + "".join(lines), encoding="utf-8")
    assert [run["at"] for run in benchmarks("head", file)] == [0, 2, 1]
    assert benchmarks("packing", file) == []
    assert benchmarks("head", tmp_path / "missing.jsonl") == []


@pytest.mark.parametrize("bad", ["{", '{"benchmark": "head", "date": "2026-11-29"}', "7"])
def test_a_corrupt_line_is_named(bad: str, tmp_path: Path) -> None:
    file = tmp_path / FILE
    file.write_text(line("head", "2026-11-29") + bad + "\n", encoding="utf-8")
    with pytest.raises(MemlabError, match=rf"^{FILE}, line 2: corrupt"):
        benchmarks("head", file)


def test_a_heads_ratio_is_near_that_of_its_times() -> None:
    """The median of rounds' ratios, while `ms` are medians themselves."""
    runs = benchmarks("head")
    assert runs
    for run in runs:
        for shape in run["shapes"].values():
            bare = shape["sides"]["products"]["ms"]
            for side in shape["sides"].values():
                assert side["ratio"] == pytest.approx(side["ms"] / bare, rel=0.05)
