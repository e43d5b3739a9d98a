"""`simulate` from its options to its files, in this process."""

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.simulator.command import Asked, Mistake, read_plan, simulate
from gateway.simulator.comparison import Comparison, Estimate, render
from gateway.simulator.many_trials import run_jobs
from gateway.simulator.report_files import write_report
from tests.simulator.test_experiment import DEFAULTS
from tests.support.logged_traffic import LoggedTraffic

TRACE = "arrival_s,input_tokens,output_tokens,tenant\n" + "".join(
    f"{n / 4},{200 + 37 * (n % 11)},{5 + n % 7},{'abc'[n % 3]}\n" for n in range(120)
)
SHORT = {"seconds": 20.0, "preset": "a100_llama3_8b"}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, object], Path]:
    def write(name: str, content: object) -> Path:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
        return path

    return write


Write = Callable[[str, object], Path]


def compared(asked: Asked, processes: int = 1) -> Comparison:
    plan = read_plan(asked)
    return Comparison(plan.contenders, run_jobs(plan.jobs, processes, lambda number, part: None))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------- the report


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, write: Write) -> None:
    """Table and files, also when the runs are spread over processes; another seed gives others."""
    asked = Asked(
        configs=(write("a.yaml", {}), write("b.yaml", {"capacity": {"tokens_per_second": 6000}})),
        seeds=2,
        straight=True,
        retries=1,
        **SHORT,
    )
    folders = [tmp_path / name for name in ("one", "other")]
    for folder, processes in zip(folders, (1, 2), strict=True):
        write_report(folder, compared(asked, processes), {})
    names = sorted(path.name for path in folders[0].iterdir())
    assert len(names) == 6
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    table = render(compared(asked))
    assert table == (folders[0] / "report.txt").read_text(encoding="utf-8")
    assert table != render(compared(Asked(**{**vars(asked), "seed": 7})))


def test_configurations_stand_side_by_side(tmp_path: Path, write: Write) -> None:
    """At the same arrivals; a tight budget refuses what a wide one serves, and no gateway refuses nobody."""
    tight, wide = ({"capacity": {"tokens_per_second": tokens}} for tokens in (2000, 50_000))
    asked = Asked(configs=(write("tight.yaml", tight), write("wide.yaml", wide)), straight=True, **SHORT)
    write_report(tmp_path / "out", compared(asked), {"seconds": 20})
    tree = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert list(tree["configurations"]) == ["no gateway", "tight", "wide"]
    assert tree["configurations"]["tight"]["engines"]["gpu0"] == {
        "preset": "a100_llama3_8b",
        "tokens_per_second": 2000,
    }
    offered, completed = (
        {title: told["mean"] for title, told in tree["classes"]["all"][name].items()}
        for name in ("offered", "completed")
    )
    assert len(set(offered.values())) == 1
    assert completed["tight"] < completed["wide"] <= completed["no gateway"] == offered["tight"]


def test_the_files_hold_what_the_readme_says(tmp_path: Path, write: Write) -> None:
    """Every figure with mean, spread and seeds; a line of history a second; quantiles that rise."""
    asked = Asked(configs=(write("a.yaml", {"controller": {"law": "severity"}}),), seeds=2, **SHORT)
    folder = tmp_path / "out"
    write_report(folder, compared(asked), {})
    figures = {(row["class"], row["figure"]): row for row in rows(folder / "report.csv")}
    told = figures["P0", "slo_met_of_offered"]
    seeds = [float(told["seed_1"]), float(told["seed_2"])]
    assert float(told["mean"]) == pytest.approx(sum(seeds) / 2, abs=1e-5)
    assert {"ttft_p99_ms", "tpot_p50_ms", "max_gap_p99_ms", "goodput_tokens_per_second"} <= {
        figure for name, figure in figures if name == "P1"
    }
    history = rows(folder / "history.csv")
    assert len(history) == 2 * 20 * 3
    assert history[0]["bucket_rate_tokens_per_second"] == "7200"
    changes = rows(folder / "rate_changes.csv")
    assert all(change["law"] == "severity" and change["reason"] and change["inputs"] for change in changes)
    quantiles = [
        float(row["milliseconds"])
        for row in rows(folder / "latencies.csv")
        if (row["seed"], row["class"], row["latency"]) == ("1", "P0", "ttft")
    ]
    assert len(quantiles) == 102
    assert quantiles == sorted(quantiles)


def test_mean_and_spread() -> None:
    """2, 4 and 9 have the mean 5 and the sample deviation √13; what a run does not have does not count."""
    estimate = Estimate((2.0, 4.0, None, 9.0))
    assert (estimate.mean, estimate.spread) == (pytest.approx(5), pytest.approx(13**0.5))
    assert estimate.shown(1) == "5.0 ± 3.6"
    assert Estimate((1234.5,)).shown(0) == "1,234"
    assert Estimate((None,)).shown(3) == "-"


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "gateway.yaml").write_text("", encoding="utf-8")
    paths = tuple(tmp_path / folder / "gateway.yaml" for folder in ("x", "y"))
    assert [c.title for c in read_plan(Asked(configs=paths)).contenders] == ["x/gateway", "y/gateway"]
    same = read_plan(Asked(configs=(paths[0], paths[0]))).contenders
    assert [contender.title for contender in same] == ["gateway (1)", "gateway (2)"]


# ---------------------------------------------------------------------- traffic


def test_a_trace_is_replayed_as_fast_as_asked(write: Write) -> None:
    """All of it, each tenant in one class, and what is left out of the options inherits the defaults."""
    asked = Asked(trace=write("t.csv", TRACE), scale=3.0, classes_by="tenant")
    plan = read_plan(asked)
    assert plan.traffic.seconds == pytest.approx(119 / 12, abs=0.01)
    (trial,) = run_jobs(plan.jobs, 1, lambda number, part: None)
    assert sum(of.offered for of in trial.classes.values()) == 120
    assert [of.offered for of in trial.classes.values()] == [40, 40, 40]
    assert "120 requests in 10 s" in plan.notes[0]


def test_a_decision_log_is_asked_again(tmp_path: Path, write: Write) -> None:
    """Every request that came to the logging gateway comes to the simulated one."""
    traffic = LoggedTraffic(DEFAULTS, 3, models="m")
    traffic.book(requests=80, seconds=20)
    traffic.run(60)
    log = write("decisions.jsonl", "\n".join(traffic.lines))
    config = {"capacity": {"tokens_per_second": 3000}}
    plan = read_plan(Asked(decision_log=log, configs=(write("new.yaml", config),)))
    (trial,) = run_jobs(plan.jobs, 1, lambda number, part: None)
    assert sum(of.offered for of in trial.classes.values()) == 80
    assert any("got no answer" in note for note in plan.notes)


def test_clients_wait_for_their_answers() -> None:
    """With a second to think, ten clients ask at most ten times a second."""
    plan = read_plan(Asked(clients=10, think=1.0, seconds=30.0))
    assert plan.traffic.open is None
    (trial,) = run_jobs(plan.jobs, 1, lambda number, part: None)
    offered = sum(of.offered for of in trial.classes.values())
    assert 30 < offered < 300


# ---------------------------------------------------------------------- mistakes

GOOD = "arrival_s,input_tokens,output_tokens\n0,5,5\n1,5,5\n"


@pytest.mark.parametrize(
    ("files", "asked", "says"),
    [
        (
            {"t.csv": "arrival_s,tokens\n0,1\n"},
            {"trace": "t.csv"},
            "t.csv: no column input_tokens, output_tokens",
        ),
        (
            {"t.csv": GOOD + "0.5,5,5\n"},
            {"trace": "t.csv"},
            "t.csv, line 4: arrival_s goes back from 1 to 0.5",
        ),
        ({"t.csv": GOOD.replace("0,5", "-1,5", 1)}, {"trace": "t.csv"}, "line 2: arrival_s is negative: -1"),
        ({"t.csv": ""}, {"trace": "t.csv"}, "t.csv: no column"),
        ({"t.csv": "arrival_s,input_tokens,output_tokens\n"}, {"trace": "t.csv"}, "t.csv: no requests"),
        ({}, {"trace": "none.csv"}, "none.csv: No such file"),
        ({"t.csv": GOOD}, {"trace": "t.csv", "classes_by": "tenant"}, "t.csv: not every row has a tenant"),
        (
            {"t.csv": GOOD},
            {"trace": "t.csv", "classes_by": "size"},
            "--classes-by: found 'size', expected one",
        ),
        ({"t.csv": GOOD}, {"trace": "t.csv", "rate": 5.0}, "--trace and --rate were given"),
        ({"l.jsonl": "{}\n"}, {"decision_log": "l.jsonl"}, "l.jsonl, line 1"),
        ({"l.jsonl": ""}, {"decision_log": "l.jsonl"}, "l.jsonl: no request"),
        ({}, {"mix": "30/45"}, "--mix: found '30/45', expected three numbers"),
        ({}, {"rate": 0.0}, "--rate: found 0, expected a number above 0"),
        ({}, {"scale": float("inf")}, "--scale: found inf"),
        ({}, {"clients": -1}, "--clients: found -1, expected a number from 0 on"),
        ({}, {"seeds": 0}, "--seeds: found 0"),
        ({}, {"preset": "h900"}, "unknown GPU preset 'h900'; known presets: seed_32k"),
        (
            {"a.yaml": {"classes": {"P0": {"share": 0.5}}}},
            {"configs": "a.yaml"},
            "a.yaml: classes: found P0.share 0.5 + P1.share 0.35 + P2.share 0.05 = 0.9",
        ),
        (
            {"a.yaml": {"controller": {"class_floor": {"P2": 0.3}}}},
            {"configs": "a.yaml"},
            "controller.class_floor.P2: found 0.3, expected a floor not above classes.P2.share",
        ),
        (
            {"a.yaml": {"classes": {"P2": {"ceiling_share": 0.01}}}},
            {"configs": "a.yaml"},
            "classes.P2.ceiling_share: found 0.01",
        ),
        (
            {"a.yaml": {"classes": {"P0": {"slo": {"ttft_seconds": 0}}}}},
            {"configs": "a.yaml"},
            "classes.P0.slo.ttft_seconds: found 0",
        ),
        (
            {"a.yaml": {"upstreams": [{"name": "x", "url": "http://engine:8000"}]}},
            {"configs": "a.yaml"},
            "upstreams[0].url: found http://engine:8000, the simulator has no engine there; give --preset",
        ),
    ],
)
def test_a_mistake_is_named(
    files: dict[str, object], asked: dict[str, Any], says: str, tmp_path: Path, write: Write
) -> None:
    """The option, the file and its line, or the key: before anything runs."""
    for name, content in files.items():
        write(name, content)
    for option in ("trace", "decision_log", "configs"):
        if option in asked:
            path = tmp_path / asked[option]
            asked = {**asked, option: (path,) if option == "configs" else path}
    with pytest.raises(Mistake) as caught:
        read_plan(Asked(**asked))
    assert says in str(caught.value)


def test_a_model_that_nobody_serves_is_named(write: Write) -> None:
    """A log asks for its own models; what has none asks for the first that the configuration names."""
    traffic = LoggedTraffic(DEFAULTS, 3, models="m")
    traffic.book(requests=5, seconds=5)
    traffic.run(30)
    log = write("decisions.jsonl", "\n".join(traffic.lines))
    config = write("a.yaml", {"upstreams": [{"name": "x", "url": "mock://seed_32k", "models": ["llama"]}]})
    with pytest.raises(Mistake, match="asks for the model m, which no upstream of a serves"):
        read_plan(Asked(decision_log=log, configs=(config,)))
    (trial,) = run_jobs(read_plan(Asked(configs=(config,), seconds=5.0)).jobs, 1, lambda number, part: None)
    assert sum(of.completed for of in trial.classes.values()) > 5


# ---------------------------------------------------------------------- pictures


def test_pictures_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    simulate(Asked(straight=True, seeds=2, out=tmp_path, processes=1, **SHORT))
    for name in ("rates_and_attainment.png", "latencies.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr()
    assert "latencies.png" in told.err
    assert told.out == (tmp_path / "report.txt").read_text(encoding="utf-8")


def test_without_matplotlib_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything else is written."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    simulate(Asked(out=tmp_path, processes=1, **SHORT))
    assert "pip install 'qos-gateway[plots]'" in capsys.readouterr().err
    assert (tmp_path / "report.json").exists()
    assert not list(tmp_path.glob("*.png"))


def test_the_factor_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    simulate(Asked(processes=1, **SHORT))
    assert "1 run, 20 s of traffic in" in capsys.readouterr().err
