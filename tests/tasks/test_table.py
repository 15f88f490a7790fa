"""The table in the terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from tasks import conditions_table
from tasks.report import ordered, row
from tasks.table import markdown, show

MARKDOWN: dict[str, Any] = {
    "target": {"name": "a machine", "cores": 2, "python": "3.11", "libraries": {"torch": "2"}},
    "git_commit": "abc",
    "params_sha256": "1" * 64,
    "data_sha256": {"test": "2" * 64},
}
BY_HEADING = {
    "change": "accuracy_change",
    "at batch 32": "speedup_32",
    "precision": "precision",
    "engine": "size",
    "memory": "memory",
    "energy": "energy",
}


def variant(name: str, verdict: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "lineage": ["base", name],
        "also": [],
        "backend": "onnxruntime",
        "accuracy": {"value": 0.9, "low": 0.88, "high": 0.92, "n": 300},
        "accuracy_change": {"value": 0.0, "low": -0.01, "high": 0.01},
        "latency_ms": {"p50": 1.0, "p90": None, "p99": None, "n": 30, "batch": 1},
        "speedup": {"value": 2.0, "low": 1.9, "high": 2.1, "versus": "base"},
        "speedup_at": {},
        "size_bytes": {"engine": 2048},
        "evidence": {
            "device": "cpu",
            "precision_asked": "int8",
            "precision_found": {"int8": 5, "fp32": 1},
            "parity": [],
            "nodes": 9,
            "kernels": 6,
        },
        "verdict": verdict,
        "reasons": [f"reason of {name}"],
        **changes,
    }


@pytest.fixture
def summary() -> dict[str, Any]:
    return {
        "workload": "tiny",
        "target": {"name": "a machine"},
        "metric": "accuracy",
        "baseline": "base",
        "champion": {
            "variant": "best",
            "version": 4,
            "model": "tiny",
            "alias": "champion-here",
            "promoted": "best",
            "reasons": [],
        },
        "variants": [
            variant(
                "broken",
                "failed",
                accuracy=None,
                accuracy_change=None,
                latency_ms=None,
                speedup=None,
                size_bytes={},
                evidence=None,
            ),
            variant("best", "promoted", also=["twin"]),
            variant("odd[red]", "unstable"),
        ],
    }


@pytest.fixture
def full(summary: dict[str, Any]) -> dict[str, Any]:
    """As of a GPU: every column, names of usual lengths, and reasons longer than any line."""

    def interval(value: float) -> dict[str, float]:
        return {"value": value, "low": value * 0.97, "high": value * 1.03}

    long = {
        "speedup_at": {"32": {**interval(2.0), "versus": "base-graph"}},
        "size_bytes": {"engine": 5052 << 10},
        "evidence": {**variant("v", "passed")["evidence"], "precision_asked": "fp16", "precision_found": {"fp16": 6}},
        "memory_bytes": 735 << 20,
        "energy_mj": interval(6.63),
        "reasons": ["speedup 0.90× [0.81×, 0.99×] is not above 1.00× with its whole interval", "slower than " * 20],
    }
    names = {"slim-kd-inductor-fp16": "passed", "base-graph": "rejected", "two-four-eager-fp16": "unstable"}
    variants = [variant(name, verdict, **long) for name, verdict in names.items()]
    return {**summary, "baseline": "base-graph", "variants": variants}


def printed(summary: dict[str, Any], width: int = 200) -> str:
    stream = io.StringIO()
    show(summary, Console(file=stream, width=width))
    return stream.getvalue()


def parts(summary: dict[str, Any], width: int) -> tuple[list[str], list[str], str]:
    """What is printed, which is nowhere wider than `width`: the lines of headings, of variants, and the reasons."""
    table, reasons, _champion = printed({**summary, "champion": None}, width).split("\n\n")
    lines = [line.rstrip() for line in table.splitlines()]
    assert max(map(len, (*lines, *reasons.splitlines()))) <= width
    ruler = next(i for i, line in enumerate(lines) if set(line) == {"─"})
    return lines[1:ruler], lines[ruler + 1 :], " ".join(reasons.split())


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (80, "change, at batch 32, precision, engine, memory, energy"),
        (120, "change, memory, energy"),
        (150, "memory, energy"),
        (250, ""),
    ],
)
def test_a_variant_is_a_line_of_whole_cells_and_what_has_no_room_is_named(
    full: dict[str, Any], width: int, left_out: str
) -> None:
    headings, lines, reasons = parts(full, width)
    for one, line in zip(ordered(full["variants"]), lines, strict=False):
        whole = row(one)
        keys = [key for heading, key in BY_HEADING.items() if heading not in left_out]
        assert line.startswith(f"{one['name']}  ") and line.endswith(one["verdict"])
        assert all(whole[key] in line for key in ("accuracy", "speedup", *keys))
        assert f"{one['name']}: {' '.join(whole['reason'].split())}" in reasons
    assert headings[0].strip() == "speed-up over" and "accuracy" in headings[1] and "base-graph" in headings[1]
    told = " ".join(lines[len(full["variants"]) :])
    assert told.startswith(f"no room here for {left_out}: ") and "show --markdown" in told if left_out else not told


def test_where_names_are_long_intervals_have_a_line_of_their_own(full: dict[str, Any]) -> None:
    full["variants"][0]["name"] = "short-slim-kd-inductor-fp16"
    _, lines, _ = parts(full, 80)
    assert lines[0].split()[:3] == ["short-slim-kd-inductor-fp16", "90.0%", "2.00×"]
    assert [cell.strip() for cell in lines[1].split("  ")][-2:] == ["[88.0%, 92.0%]", "[1.90×, 2.10×]"]
    _, lines, _ = parts(full, 120)
    assert "short-slim-kd-inductor-fp16  90.0% [88.0%, 92.0%]  2.00× [1.90×, 2.10×]" in lines[0]


def test_a_variant_of_several_names_breaks_between_them_and_only_without_room(full: dict[str, Any]) -> None:
    full["variants"][1]["also"] = ["base-eager", "base-eager-fp16"]
    _, lines, _ = parts(full, 80)
    assert any(line.startswith("base-graph =") for line in lines)
    assert any(line.endswith("base-eager-fp16") for line in lines)
    _, lines, reasons = parts(full, 250)
    assert any(line.startswith("base-graph = base-eager = base-eager-fp16  90.0%") for line in lines)
    assert "base-graph = base-eager = base-eager-fp16: speedup 0.90×" in reasons


def test_every_variant_has_its_numbers_verdict_and_reason(summary: dict[str, Any]) -> None:
    lines = printed(summary).splitlines()
    best = next(line for line in lines if "best = twin" in line)
    assert "best = twin: reason of best" in lines
    for part in (
        "90.0% [88.0%, 92.0%]",
        "2.00× [1.90×, 2.10×]",
        "int8: 5 int8, 1 fp32",
        "2 KiB",
        "promoted",
    ):
        assert part in best
    broken = next(line for line in lines if "broken" in line)
    assert "failed" in broken
    assert "–" in broken


def test_further_batch_sizes_have_columns_of_their_own(summary: dict[str, Any]) -> None:
    gain = {"value": 6.0, "low": 5.5, "high": 6.5, "versus": "base"}
    summary["variants"][1]["speedup_at"] = {"32": gain}
    text = printed(summary)
    assert "at batch 32" in text and "6.00× [5.50×, 6.50×]" in text


def test_the_champion_is_named_with_its_address(summary: dict[str, Any]) -> None:
    assert "champion: best, version 4 of models:/tiny@champion-here" in printed(summary)


def test_no_champion_is_said_as_plainly(summary: dict[str, Any]) -> None:
    champion = {"variant": None, "version": None, "model": "tiny", "alias": "a"}
    assert "no champion: nothing here should be deployed" in printed({**summary, "champion": champion})


def test_a_promotion_that_did_not_run_is_not_called_no_champion(summary: dict[str, Any]) -> None:
    text = printed({**summary, "champion": None})
    assert "promotion did not run" in text and "no champion" not in text


def test_a_champion_of_elsewhere_is_told_from_this_tree_s(summary: dict[str, Any]) -> None:
    champion = {**summary["champion"], "promoted": None, "reasons": ["nothing [here] passes"]}
    assert "it is not of this tree; nothing [here] passes" in printed({**summary, "champion": champion})


def test_square_brackets_in_a_reason_are_printed(summary: dict[str, Any]) -> None:
    summary["variants"][0]["reasons"] = ["prune@slim failed: got [a], expected [/b]"]
    assert "got [a], expected [/b]" in printed(summary)


def test_markdown_has_the_environment_and_every_variant(summary: dict[str, Any]) -> None:
    summary["target"] |= {"cores": 2, "python": "3.11", "libraries": {"torch": "2", "onnxruntime": "1"}}
    summary |= {"git_commit": "abc", "params_sha256": "1" * 64, "data_sha256": {"test": "2" * 64}}
    summary["variants"][1]["speedup_at"] = {"32": {"value": 6.0, "low": 5.5, "high": 6.5, "versus": "base"}}
    text = markdown(summary)
    assert "a machine, 2 cores, Python 3.11, torch 2, onnxruntime 1; commit abc, settings sha256 111111111111…" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert "int8: 5 int8, 1 fp32" in rows[1]
    assert len(rows) == 4 and len({line.count("|") for line in rows}) == 1
    assert "6.00× [5.50×, 6.50×]" in rows[1] and "- `odd[red]`: reason of odd[red]" in text


def test_markdown_of_a_gpu_names_its_driver_and_the_libraries_that_are_there(summary: dict[str, Any]) -> None:
    libraries = {"torch": "2", "onnxruntime-gpu": "1.24"}
    summary["target"] |= {"cores": 16, "python": "3.12", "libraries": libraries, "driver": "580.1"}
    summary |= {"git_commit": "abc", "params_sha256": "1" * 64, "data_sha256": {"test": "2" * 64}}
    assert "a machine, driver 580.1, 16 cores, Python 3.12, torch 2, onnxruntime-gpu 1.24; commit" in markdown(summary)


def test_without_a_meter_one_line_says_why_and_there_is_no_column(summary: dict[str, Any]) -> None:
    for one in summary["variants"]:
        one |= {"energy_mj": None, "energy_reason": "no RAPL [here]" if one["latency_ms"] else "not run"}
    summary |= MARKDOWN
    text = printed(summary)
    assert "no energy: no RAPL [here]" in text and "not run" not in text
    assert not [line for line in text.splitlines() if "variant" in line and "energy" in line]
    assert "No energy: no RAPL [here]." in markdown(summary) and "| energy |" not in markdown(summary)


def test_the_scatter_over_openings_is_told_where_it_is_known(summary: dict[str, Any]) -> None:
    summary |= MARKDOWN
    assert "openings" not in printed(summary) + markdown(summary)
    sd = {"value": 0.056, "low": 0.038, "high": 0.102}
    summary["openings"] = {"1": {"sd": sd, "noise": 0.001, "trials": 10, "assumed": 0.034}}
    told = "peed-ups scatter over openings of the engines by 5.6% [3.8%, 10.2%] at batch 1 (standard deviation"
    assert told in " ".join(printed(summary).split()) and f"S{told}" in markdown(summary)
    assert "and for 3.4% (reopen_sd) at least" in markdown(summary)
    none = {"value": 0.0, "low": 0.0, "high": 0.0}
    summary["openings"]["32"] = {"sd": none, "noise": 0.05, "trials": 9, "assumed": 0.034}
    assert "and no more than their rounds do (5.0%) at batch 32 (standard deviation" in markdown(summary)


def test_markdown_has_each_scorecard_its_roofline_and_its_engines_digest(summary: dict[str, Any]) -> None:
    summary |= MARKDOWN
    assert "PLASTER" not in markdown(summary)
    summary["variants"][1] |= {
        "plaster": {
            "programmability": {"steps": 3, "settings": 9, "backends": ["eager"]},
            "latency": {"p50_ms": 1.5, "p99_ms": None, "batch": 1},
            "accuracy": None,
            "size": {"engine_bytes": 2048, "memory_bytes": None},
            "throughput": {"1": 700.0, "32": 9000.0},
            "energy_efficiency": {"inferences_per_joule": {"value": 9.0, "low": 8.0, "high": 10.0}, "reason": None},
            "rate_of_learning": {"seconds": 65.0, "at_least": False, "reason": None, "by_stage": {}},
        },
        "latency_bounds_ms": {"p50": {"value": 1.0, "low": 0.9, "high": 1.25}},
        "energy_net_mj": {"value": 2.0, "low": 1.9, "high": 2.1},
        "roofline": {"bound_ms": 0.5, "over": 3.0, "limit": "bytes", "batch": 1},
        "engine_sha256": "abcdef0123456789",
    }
    lines = markdown(summary).splitlines()
    (row,) = [line for line in lines if "abcdef01" in line]
    for told in ("1.000 ms [0.900, 1.250]", "9,000/s", "2 mJ [1.9 mJ, 2.1 mJ]", "65 s", "3.0 × of 0.5 ms, bytes"):
        assert f"| {told} |" in row
    head = next(line for line in lines if "over its roofline" in line)
    assert head.count("|") == row.count("|")


def test_markdown_tells_what_the_machine_was_like_beside_each_benchmark(summary: dict[str, Any]) -> None:
    assert conditions_table.rows(summary) == []
    cpu = [{"cpu": {"load_average": load}} for load in (0.5, 1.25)]
    on_cpu = {"before": cpu[0], "after": cpu[1], "steal_share": 0.021, "gpu_name": None}
    summary["variants"][0]["conditions"] = on_cpu
    page = "\n".join(conditions_table.rows(summary))
    assert f"| {summary['variants'][0]['name']} | 0.50 to 1.25 | 2.1% |" in page and "SM clock" not in page
    summary["variants"][1]["conditions"] = {
        **on_cpu,
        "steal_share": None,
        "gpu_name": "NVIDIA H200",
        "sm_mhz": [1950, 1980],
        "memory_mhz": None,
        "temperature_c": [33, 56],
        "power_w": [118.4, 671.7],
        "reasons": ["idle", "software power cap"],
        "held_back_ms": {"power": 3085.8, "thermal": 0.0},
        "others": 1,
        "others_busy": 0.0,
    }
    summary["variants"][0]["conditions"] = {**summary["variants"][1]["conditions"], "reasons": [], "held_back_ms": None}
    page = "\n".join(conditions_table.rows(summary))
    told = "0.50 to 1.25 | – | 1950 to 1980 | – | 33 to 56 | 118 to 672"
    assert f"{told} | software power cap, power 3.1 s | 1, busy 0% |" in page
    assert f"{told} | never | 1, busy 0% |" in page


def test_energy_and_memory_have_columns_where_they_are_known(summary: dict[str, Any]) -> None:
    summary["variants"][1] |= {"energy_mj": {"value": 2.0, "low": 1.9, "high": 2.1}, "memory_bytes": 3 << 20}
    summary |= MARKDOWN
    text = printed(summary)
    best = next(line for line in text.splitlines() if "best" in line)
    assert "2 mJ [1.9 mJ, 2.1 mJ]" in best and "3.0 MiB" in best
    assert "no energy" not in text and "disturbed" not in text
    summary["variants"][1]["energy_disturbed"] = "power limit"
    assert "2 mJ [1.9 mJ, 2.1 mJ] (disturbed)" in printed(summary)
    summary["variants"][1]["energy_disturbed"] = None
    rows = [line for line in markdown(summary).splitlines() if line.startswith("| ")]
    assert "| memory | energy |" in rows[0] and "| 3.0 MiB | 2 mJ [1.9 mJ, 2.1 mJ] |" in rows[1]
    assert len({line.count("|") for line in rows}) == 1
