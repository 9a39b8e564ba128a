"""The HTML file and the terminal summary: offline, safe, whole, and there even for half a run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest

from staleflow.errors import RunFolderError
from staleflow.reporting import bars, figures
from staleflow.reporting.groups import group_runs
from staleflow.reporting.load import load_run
from staleflow.reporting.report import comparison, terminal_summary, write_report

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Checker(HTMLParser):
    """Collects tags, ids and text, and fails on a tag closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self._attributes(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._attributes(attrs)

    def _attributes(self, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check(path: Path) -> Checker:
    checker = Checker()
    checker.feed(path.read_text(encoding="utf-8"))
    checker.close()
    assert checker.open == []
    return checker


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, run_writer: Callable[..., Path]) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [run_writer(root / f"eta{bound}", bound=bound, steps=35, seed=bound) for bound in range(4)]


@pytest.fixture(scope="module")
def page_of_four(four: list[Path]) -> Path:
    output = four[0].parent / "four.html"
    write_report(four, output)
    return output


def test_four_runs_stand_side_by_side_in_one_whole_page(page_of_four: Path) -> None:
    page = check(page_of_four)
    for needle in (
        "4 runs compared",
        "Trained tokens/s",
        "Comparison",
        "Trainer time",
        "Instance time",
        "Response length, sampled and trained",
        "Bottlenecks",
        "Learning",
        "Staleness",
        "Time",
        "Tokens",
        "Instances over time · eta3",
        "Buffers · eta2",
        "staleness.bound",
        "✓ balanced",
        "0 violations",
        "1 event · eta0",
    ):
        assert needle in page.text, needle
    assert "not measured" not in page.text
    assert page.tags.count("svg") == 12 + 4 + 4


def test_the_page_refers_to_nothing_outside_itself(page_of_four: Path) -> None:
    page = check(page_of_four)
    text = page_of_four.read_text(encoding="utf-8")
    assert "http" not in text
    assert "@import" not in text
    assert "script" not in page.tags
    assert all(link.startswith("#") for link in page.links)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))


def test_ids_are_unique_and_every_reference_has_its_target(page_of_four: Path) -> None:
    page = check(page_of_four)
    text = page_of_four.read_text(encoding="utf-8")
    assert len(page.ids) == len(set(page.ids))
    used = set(re.findall(r"url\(#([^)]*)\)", text)) | {link[1:] for link in page.links}
    assert used <= set(page.ids)


def test_figures_have_no_colour_of_their_own(page_of_four: Path) -> None:
    """Else they would not follow light, dark and print."""
    svgs = re.findall(r"<svg.*?</svg>", page_of_four.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert set(re.findall(r"#[0-9a-f]{6}\b", "".join(svgs))) == set()
    assert "var(--run3)" in "".join(svgs)


def test_a_single_run_opens_with_its_numbers(four: list[Path], tmp_path: Path) -> None:
    write_report([four[1]], tmp_path / "report.html")
    page = check(tmp_path / "report.html")
    assert "policy staleflow · η = 1 · completed" in page.text
    assert "max staleness, η = 1" in page.text
    assert "Differences" not in page.text


def test_the_same_runs_give_the_same_bytes(make_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_run("demo", steps=6)
    write_report([folder], tmp_path / "a.html")
    write_report([folder], tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


@pytest.mark.parametrize("missing", [("ledger.jsonl",), ("metrics.jsonl",), ("ledger.jsonl", "config.yaml")])
def test_half_a_run_makes_a_whole_page(
    make_run: Callable[..., Path], tmp_path: Path, missing: tuple[str, ...]
) -> None:
    folder = make_run("demo", steps=4)
    for name in missing:
        (folder / name).unlink()
    write_report([folder], tmp_path / "report.html")
    assert "not measured in this run" in check(tmp_path / "report.html").text


def test_a_run_of_one_step_makes_a_whole_page(make_run: Callable[..., Path], tmp_path: Path) -> None:
    write_report([make_run("demo", steps=1, instances=40, bound=0)], tmp_path / "report.html")
    assert "not measured" not in check(tmp_path / "report.html").text


def test_what_comes_from_a_run_is_escaped(make_run: Callable[..., Path], tmp_path: Path) -> None:
    names = ["<script>alert(1)<", "a$x_1$ & 'b'"]
    folders = [make_run(name, steps=2) for name in names]
    write_report(folders, tmp_path / "report.html")
    page = check(tmp_path / "report.html")
    assert "script" not in page.tags
    for name in names:
        assert name in page.text


def test_tokens_that_do_not_balance_are_shown(make_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_run("demo", steps=2)
    path = folder / "metrics.jsonl"
    path.write_text(
        path.read_text() + '{"kind": "summary", "tokens/generated": 1000, "tokens/trained": 900}\n'
    )
    write_report([folder], tmp_path / "report.html")
    assert "✗ 100 missing" in check(tmp_path / "report.html").text
    assert "tokens do not balance: +100" in terminal_summary([folder])


def test_a_folder_that_is_no_run_leaves_an_existing_report_alone(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    output = tmp_path / "report.html"
    output.write_text("before")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunFolderError, match="is not a run folder"):
        write_report([make_run("demo", steps=1), tmp_path / "empty"], output)
    with pytest.raises(RunFolderError, match="give at least one"):
        write_report([], output)
    assert output.read_text() == "before"


def test_an_unwritable_output_is_the_user_s_error(make_run: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot write the report"):
        write_report([make_run("demo", steps=1)], tmp_path / "absent" / "report.html")


def test_the_terminal_summary_has_every_run_within_80_columns(four: list[Path]) -> None:
    text = terminal_summary(four, width=80)
    assert max(len(line) for line in text.splitlines()) <= 80
    for needle in ("eta0", "eta3", "staleness max", "accuracy, last", "0 violations", "trainer waited"):
        assert needle in text
    assert len(re.findall(r"0\.\d{3}", next(x for x in text.splitlines() if "accuracy, last" in x))) == 4


def test_more_runs_than_fit_side_by_side_are_rows(four: list[Path]) -> None:
    lines = terminal_summary([*four, *four[:2]], width=160).splitlines()
    assert sum(line.lstrip().startswith("eta") and "violations" in line for line in lines) == 6


POLICIES = {"sync": 0, "strict": 1, "staleflow": 1}


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory, run_writer: Callable[..., Path]) -> list[Path]:
    """Two seeds of three policies; η differs, too, for sync keeps 0. The trainer waits for other things."""
    root = tmp_path_factory.mktemp("policies")
    return [
        run_writer(
            root / f"policy={policy},seed={seed}",
            policy=policy,
            bound=bound,
            seed=seed,
            steps=8,
            cause="longest" if policy == "strict" else "rollout",
        )
        for policy, bound in POLICIES.items()
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def page_of_policies(policies: list[Path]) -> Path:
    output = policies[0].parent / "policies.html"
    write_report(policies, output)
    return output


def test_seeds_of_a_setting_are_one_column_with_median_and_spread(page_of_policies: Path) -> None:
    page = check(page_of_policies)
    for needle in (
        "3 settings compared, 6 runs",
        "strict, η=1",
        "2 of 2 clean",
        "throughput against sync, η=0",
        "latency-bound",
        "rollout-bound",
        "Median over the seeds; below it, minimum and maximum.",
        "Buffers · staleflow, η=1",
        "Shown: policy=sync,seed=0, the first seed.",
        "Sums over the seeds; the check is per run.",
        "1 event · policy=strict,seed=1",
    ):
        assert needle in page.text, needle
    assert "not measured" not in page.text
    assert "run.seed" not in re.sub(r"<pre>.*?</pre>", "", page.text)


def test_every_seed_has_a_row_of_its_own_values(policies: list[Path], page_of_policies: Path) -> None:
    text = page_of_policies.read_text()
    rows = re.findall(r"</span>(policy=[^<]*)</td><td>([\d.,]+)</td>", text)
    rates = [
        rate
        for group in comparison(policies)["groups"]
        for rate in group["figures"]["trained_tokens_per_s"]["runs"]
    ]
    assert rows == [
        (folder.name, f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}")
        for folder, rate in zip(policies, rates, strict=True)
    ]


def test_the_terminal_shows_the_same_groups(policies: list[Path]) -> None:
    lines = terminal_summary(policies, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split("  ")[-1].strip() == "staleflow, η=1"
    waited = next(line for line in lines if line.startswith("trainer waited"))
    assert waited.count("%") == 3
    assert sum("latency-bound" in line for line in lines) == 1
    assert "2 of 2 clean" in next(line for line in lines if line.startswith("audit"))


def test_json_has_the_same_figures_and_those_of_each_run(policies: list[Path]) -> None:
    found = json.loads(json.dumps(comparison(policies)))
    assert found["throughput_against"] == "sync, η=0"
    sync, strict, staleflow = found["groups"]
    assert (strict["label"], strict["bottleneck"]["kind"]) == ("strict, η=1", "latency-bound")
    assert staleflow["keys"] == {"staleness.bound": "1", "coordination.policy": "staleflow"}
    assert [run["seed"] for run in sync["runs"]] == [0, 1]
    assert [run["violations"] for run in sync["runs"]] == [0, 0]
    rate = sync["figures"]["trained_tokens_per_s"]
    assert rate["min"] == min(rate["runs"])
    assert rate["median"] == sum(rate["runs"]) / 2
    assert sync["throughput_ratio"] == 1.0
    assert sync["figures"]["staleness_bound"]["median"] == 0
    shares = [sync["figures"][f"tokens_{fate}_share"]["median"] for fate in ("trained", "filtered")]
    assert 0.9 < sum(shares) < 1.0
    assert sync["bottleneck"]["split_now"] == [2.0, 1.0]


def test_the_best_throughput_is_marked_once(page_of_policies: Path) -> None:
    lines = re.findall(r"<tr><td>([^<]*)</td>(.*?)</tr>", page_of_policies.read_text())
    marked = {title: cells.count('class="best"') for title, cells in lines if 'class="best"' in cells}
    assert marked.items() <= {"trained tokens/s": 1, "accuracy, last": 1}.items()


def test_runs_of_before_time_was_recorded_are_still_read(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    folders = [make_run(f"old{seed}", steps=8, seed=seed, recorded=False) for seed in (0, 1)]
    write_report(folders, tmp_path / "report.html")
    text = check(tmp_path / "report.html").text
    assert "Idle time" in text
    assert "rollout-bound: the trainer waited" in text
    assert "instances idle" in terminal_summary(folders)


def test_smoothing_leaves_short_curves_and_constants_alone() -> None:
    assert figures.smooth([1.0, 5.0, 2.0]) == [1.0, 5.0, 2.0]
    assert figures.smooth([2.0] * 100) == [2.0] * 100


def test_a_figure_without_data_is_none(make_run: Callable[..., Path]) -> None:
    folder = make_run("demo", steps=1)
    (folder / "ledger.jsonl").unlink()
    (folder / "metrics.jsonl").write_text("")
    groups = group_runs([load_run(folder)])
    for draw in (
        figures.reward,
        figures.staleness,
        figures.response_lengths,
        figures.sampled_and_trained,
        figures.signals,
        bars.throughput,
        bars.trainer_time,
        bars.instance_time,
        bars.timings,
        partial(bars.token_fates, half=True),
    ):
        assert draw(groups) is None
