"""Figures in sentences, and those of tables that nobody generates, are those of the committed records.

The other tables are in tests/benchmarks/test_readme_tables.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import cp_fast
from benchmarks import long_context_page as long
from benchmarks.cost_model.choices import WITHIN, cases
from benchmarks.parts.performance_tables import record
from cp_fast.passes import PASSES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text()
SCHEDULES = ("p2p", "all_gather", "a2a", "a2a+p2p")
Row = dict[str, str]


def span(values: Iterable[float], digits: int = 0) -> str:
    """
    >>> span([1.04, 1.06], 2), span([7.3, 7.4])
    ('1.04 to 1.06', '7')
    """
    texts = [f"{v:.{digits}f}" for v in sorted(values)]
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def figures(rows: list[Row], sep: str = " to ") -> str:
    """Microseconds, times the copy and percent of the limit: of all rows together, or one by one."""
    columns = [
        ([float(r["us"]) for r in rows], 0),
        ([float(r["ratio_to_copy"]) for r in rows], 2),
        ([100 * float(r["share_of_limit"]) for r in rows], 0),
    ]
    if sep == " to ":
        us, ratio, share = (span(*column) for column in columns)
    else:
        us, ratio, share = (sep.join(f"{v:.{digits}f}" for v in values) for values, digits in columns)
    return f"| {us} | {ratio} | {share} % |"


@pytest.mark.parametrize("gpus", [2, 4])
def test_ours_is_ahead_on_h100s(gpus: int) -> None:
    """The best of ours, of every other library in every case."""
    rows = record(f"speed_peers_{gpus}x_h100.csv")
    best: dict[tuple[str, ...], dict[bool, float]] = {}
    for row in rows:
        of = best.setdefault(tuple(row[name] for name in ("lengths", "window", "d_qk")), {})
        ours = row["library"] == "cp_fast"
        of[ours] = max(of.get(ours, 0.0), float(row["forward_backward_efficiency"]))
    assert all(of[True] > of[False] for of in best.values())
    assert len(rows) == sum(row["commit"].startswith("84e7a97f") for row in rows)


def test_host() -> None:
    """Milliseconds of a pass, and the largest parts of one."""
    rows = record("host_time_1x_h200.csv")

    def parts(case: str, schedule: str, direction: str) -> dict[str, float]:
        wanted = [case, schedule, direction]
        return {r["part"]: float(r["us"]) for r in rows if [r["case"], r["schedule"], r["pass"]] == wanted}

    def cell(case: str, schedule: str) -> str:
        return "; ".join(f"{parts(case, schedule, one)['whole'] / 1000:.2f}" for one in ("forward", "backward"))

    one_sequence = "one sequence, 4,096 a rank"
    for case in (one_sequence, "sixteen documents"):
        assert f"| {case} | {cell(case, 'p2p')} | {cell(case, 'a2a')} |" in PAGE
    found = parts(one_sequence, "p2p", "forward")
    total = sum(us for part, us in found.items() if part not in ("whole", "messages", "library"))
    launch, post, edge = (f"{100 * found[part] / total:.0f}" for part in ("launch", "post", "edge"))
    assert f"launches take {launch} %, messages {post} %, checks and autograd {edge} %." in " ".join(PAGE.split())


def test_kernels() -> None:
    rows = record("kernels_h200.csv")
    native = [r for r in rows if r["implementation"] == "native"]

    def of(kernel: str, *words: str) -> list[Row]:
        return [r for r in native if r["kernel"] == kernel and all(word in r["case"] for word in words)]

    reorders = [r for r in of("reorder") if "K and V" not in r["case"]]
    assert len(reorders) == 18
    exchange = of("heads_to_front") + of("heads_to_back_")
    indices = span(float(r["us"]) for r in of("partition_indices"))
    for line in (
        f"| reorder, 65,536 x 16 x 64 bf16, 16 to 10,000 sequences, cp 2 to 8 {figures(reorders)}",
        f"| copy valid tokens, 65,536 {figures(of('copy_valid_', '65536'))}",
        f"| merge bf16 into float32, 16,384 x 32 x 128 {figures(of('merge_'))}",
        f"| a2a pack, unpack with reorder, 16,384 x 32 x 128, cp 8 {figures(exchange, ', ')}",
        f"| indices of 1,000,000 tokens, 10,000 sequences | {indices} | | |",
    ):
        assert line in PAGE
    time = {(r["kernel"], r["case"]): float(r["us"]) for r in native}
    numba = [float(r["us"]) / time[r["kernel"], r["case"]] for r in rows if r["implementation"] == "numba"]
    assert f"Numba is at most {max(numba):.1f} times these" in PAGE


def test_problems_that_were_right_on_a_gpu() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "conformance_1x.json").read_text())
    played = [backend for run in record["runs"] for backend in run["backends"].values()]
    failures = [failure for backend in played for failure in backend["failures"]]
    assert all("did not finish within 20 s" in str(failure["findings"]) for failure in failures)
    problems = sum(backend["problems"] for backend in played)
    said = f"none found in {problems:,} random problems on an H200 ({len(failures)} ran into the time limit)"
    for page in ("README.md", "docs/conformance/comparison.md"):
        assert said in " ".join((ROOT / page).read_text().split())


CHOOSING = " ".join((ROOT / "docs" / "how_to" / "choosing.md").read_text().split())


def test_how_many_predictions_are_near() -> None:
    rows = record("predictions.csv")
    near = sum(row["within_10_percent"] == "True" for row in rows)
    assert f"with {len(rows)} measured rows: {near} of {len(rows)} are within 10 %" in CHOOSING
    assert all(row["why_not"] for row in rows if row["within_10_percent"] != "True")
    gpus = max(int(re.match(r"(\d+) x ", row["what"])[1]) for row in rows)  # type: ignore[index]
    assert f"We measured up to {gpus} GPUs" in CHOOSING


def test_what_auto_loses() -> None:
    found = list(cases())
    losses = [one.loss(one.chosen()) for one in found]
    near = sum(loss <= WITHIN for loss in losses)
    assert f"In {near} of the {len(found)} measured cases" in CHOOSING
    assert f"in the other one within {max(losses):.1%}".replace("%", " %") in CHOOSING
    assert len(found) - near == 1


def test_the_rows_that_layouts_receive() -> None:
    [lengths] = re.findall(r"plan --compare --cp-size 8 --seqlens ([\d,]+)", CHOOSING)
    costs = cp_fast.compare_layouts(map(int, lengths.split(",")), cp_size=8, cp_comm_types=["all_gather"])
    rows = {cost.layout: f"{cost.kv_rows:,.0f}" for cost in costs}
    said = f"receives at most {rows['balanced']} rows under `balanced`, and {rows['dual_chunk']} under `dual_chunk`"
    assert said in CHOOSING


def test_what_all_keys_at_once_are_worth() -> None:
    """The table of docs/performance.md: its figures are those of lines of the record, in one run each."""
    page, runs = (ROOT / "docs" / "performance.md").read_text(), _runs_by_heads()
    lines = {  # run, lengths and kv heads, layout: the ways
        "one sequence": (2, "(32768,) kv8", "", "()"),
        "five documents, `balanced`": (1, "[16384, 8192, 4096, 2048,  kv8", "balanced", "model"),
        "sixteen documents, `balanced`": (1, "[1024, 512, 2048, 256, 409 kv8", "balanced", "model"),
        "one sequence, 32 kv heads in chunks of 4 and 28": (0, "[32768] kv32", "dual_chunk", "(4, 28)"),
    }
    for name, (run, lengths, layout, way) in lines.items():
        starts = [f"{lengths} {middle}{wanted} " for wanted in ("today", way) for middle in ("", "w-1 ")]
        found = [
            " ".join(line.split())
            for start in starts
            for line in runs[run]
            if layout in line and " ".join(line.split()).startswith(" ".join(start.split()))
        ]
        said = [re.search(r" f (0\.\d+) .*?fb (0\.\d+)", line) for line in found]
        cells = " | ".join(f"{one[1]}, {one[2]}" for one in said if one)
        assert f"| {name} | {cells} |" in page
    graph = {
        (row["library"], row["schedule"], row["messages"]): row["forward_efficiency"]
        for row in record("attention_by_heads_2x_h200.csv")
        if row["lengths"] == "8192"
    }
    for figure in (("cp_fast", "all_gather", "graph"), ("cp_fast", "all_gather", "peer_memory")):
        assert graph[figure] in page
    for figure in (("cp_fast", "a2a", "peer_memory"), ("cp_fast", "a2a", "graph"), ("ring_flash_attn", "p2p", "group")):
        assert graph[figure] in page


def _runs_by_heads() -> list[list[str]]:
    """The lines of each run."""
    text = (ROOT / "benchmarks" / "results" / "by_heads_2x_h200.txt").read_text()
    return [
        [line for line in part.split("\n") if line.startswith(("[", "("))]
        for part in text.split("\n\n")
        if "fb 0." in part
    ]


def test_what_head_chunks_are_worth() -> None:
    """Four GPUs: of one document in calls in a row, and of five documents in turns."""
    text = (ROOT / "benchmarks" / "results" / "head_chunks_4x_h200.txt").read_text()
    row, turn = (r"^ +{} f +ms ([\d.]+) ", r"^4 GPUs \[32768, 16384.*balanced +{} +f ([\d.]+)")

    def found(pattern: str, way: str) -> float:
        matches = re.findall(pattern.format(re.escape(way)), text, re.M)
        return float(matches[0])

    in_chunks, at_once = found(row, "(1, 7)"), found(row, "()")
    said = " ".join((ROOT / "docs" / "performance.md").read_text().split())
    assert f"{in_chunks:.2f} ms forward in place of {at_once:.2f}, in 120 calls in a row" in said
    assert f"{found(turn, '()'):.3f} in place of {found(turn, 'model'):.3f} forward, in the same turns" in said


def test_what_it_is_worth_to_hide_the_messages_of_a_window() -> None:
    """The means of the turns, before and after."""
    page = " ".join((ROOT / "docs" / "performance.md").read_text().split())
    rows = record("windows_hidden_2x_h200.csv")
    before, after = dict.fromkeys(row["commit"] for row in rows)

    def gain(layout: str, figure: str) -> str:
        of = [[float(r[figure]) for r in rows if (r["commit"], r["layout"]) == (n, layout)] for n in (after, before)]
        now, then = (sum(turns) / len(turns) + 1e-9 for turns in of)  # Halves are rounded up.
        return f"{now:.3f} in place of {then:.3f}"

    both = "forward_backward_efficiency"
    assert f"has {gain('dual_chunk', 'forward_efficiency')} forward and {gain('dual_chunk', both)} for both" in page
    assert f"`balanced` {gain('balanced', 'forward_efficiency')} and {gain('balanced', both)}." in page


def test_each_compiler_pass_was_measured() -> None:
    files = "passes_1x_h200.csv", "passes_by_heads_1x_h200.csv"
    names = {row["without"] for file in files for row in record(file)}
    gone = {"hoist_copies", "prepend_keys", "split_queries"}  # they saved less than 1 %
    assert names - gone - {"-", "all"} == {one.name for one in PASSES}


def test_random_problems_with_scores_of_places() -> None:
    """The numbers of docs/how_to/scores.md: of each kind, by schedule, layout and size."""
    page = " ".join((ROOT / "docs" / "how_to" / "scores.md").read_text().split())
    found = json.loads((ROOT / "benchmarks" / "results" / "scores_random_1x_h200.json").read_text())
    kinds = [found["backends"][f"fa4, {kind}"] for kind in ("alibi", "score_mod", "dropout")]
    for kind in kinds:
        assert not kind["failures"]
        assert kind["right"] == {"probes": kind["problems"], "budget": kind["problems"]}
        assert kind["by_schedule"].keys() == set(SCHEDULES)
        assert kind["by_layout"].keys() == {"dual_chunk", "contiguous", "balanced"}
    alibi, score_mod, dropout = (kind["problems"] for kind in kinds)
    of_each = f"{alibi} random problems of ALiBi, {score_mod} of a `score_mod` and {dropout} of dropout were right"
    assert of_each in page
    assert f"at cp {', '.join(map(str, found['cp_sizes'][:-1]))} and {found['cp_sizes'][-1]} " in page


def test_what_offload_costs() -> None:
    runs = json.loads((ROOT / "benchmarks" / "results" / "long_context_2x_h200.json").read_text())["runs"]
    offloaded, kept = runs[:2]
    page = " ".join((ROOT / "docs" / "how_to" / "long_context.md").read_text().split())
    assert offloaded["losses"] == kept["losses"]
    fewer = f"{100 - 100 * offloaded['tokens_per_s'] / kept['tokens_per_s']:.1f} %"
    assert f"{offloaded['peak_gib']} GiB a GPU instead of {kept['peak_gib']}, at {fewer} fewer tokens" in page


def test_whole_steps_beside_accelerate() -> None:
    page = " ".join((ROOT / "docs" / "how_to" / "long_context.md").read_text().split())

    def rows(name: str) -> dict[tuple[str, int], Any]:
        """The first row of each library and length: ours with the plain kernel."""
        found = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["rows"]
        return {(row["library"], row["tokens"]): row for row in reversed(found) if "tokens_per_s" in row}

    turns, four = rows("long_context_turns_2x_h100.json"), rows("long_context_libraries_4x_h200.json")
    assert turns["cp_fast", 65536]["kernel_under_checkpointing"] == "plain"
    for tokens, words in ((65536, " tokens/s at 65,536 tokens"), (131072, " at 131,072"), (262144, " at 262,144")):
        ours, theirs = (turns[library, tokens]["tokens_per_s"] for library in ("cp_fast", "accelerate"))
        assert f"{ours:,} against {theirs:,}{words}" in page
    newest = rows("long_context_step_2x_h200.json")
    for tokens, words in ((65536, " tokens/s at 65,536 tokens"), (131072, " at 131,072 on two H200s")):
        ours, theirs = (newest[library, tokens]["tokens_per_s"] for library in ("cp_fast", "accelerate"))
        assert f"{ours:,} against {theirs:,}{words}" in page
    alone = rows("long_context_2x_h100.json")
    rates = [f"{alone['cp_fast', tokens]['tokens_per_s']:,}" for tokens in (65536, 131072, 262144, 524288)]
    assert "{} tokens/s at 65,536 tokens, {} at 131,072, {} at 262,144.".format(*rates) in page
    assert f"524,288 tokens and four layers ran at {rates[3]} tokens/s" in page
    ours, theirs = (four[library, 1048576] for library in ("cp_fast", "accelerate"))
    rates, memory = (f"{row['tokens_per_s']:,}" for row in (ours, theirs)), f"{ours['peak_gib']:.1f} GiB a GPU each"
    assert f"1,048,576 tokens and two layers: {' against '.join(rates)} tokens/s, in {memory}" in page
    assert f"{ours['peak_gib']:.1f}" == f"{theirs['peak_gib']:.1f}"


def test_whole_models_on_a_gpu() -> None:
    page = " ".join((ROOT / "docs" / "support.md").read_text().split())
    results = ROOT / "benchmarks" / "results"
    all_models, one = (
        json.loads((results / f"whole_models_{name}.json").read_text())["counts"]
        for name in ("2x_h200", "qwen3_next_1x_h100")
    )
    reached = sum(all_models.values()) - all_models["not reached"]
    others = {"refused": 22, "skipped": 1}
    assert all_models == {"right": all_models["right"], **others, "not reached": all_models["not reached"]}
    assert f"{all_models['right']} of the {reached} cases" in page
    assert f"{one['right']} of {sum(one.values())} of Qwen3-Next were right" in page


def test_the_speed_of_convolutions() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "convolution_1x_h200.json").read_text())
    page, times = (ROOT / "docs" / "how_to" / "hybrid.md").read_text(), record["ms"]
    assert f"A copy of x takes {times['copy'][0]:.3f} ms" in page
    assert f"copies, {times['copy'][1]:.3f} ms" in page
    turns = record["kernels in turns"]["us"]
    short, one = (turns[name]["now"][0][1] for name in ("320 documents of 102, dual_chunk", "one document, contiguous"))
    assert f"the backward pass takes {short / one:.1f} times as long" in page


def test_the_speed_of_scans() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "selective_scan_1x_h200.json").read_text())
    page = " ".join((ROOT / "docs" / "how_to" / "hybrid.md").read_text().split())
    mamba, lru = (record[name]["ms"]["copy"][1] for name in ("mamba", "rg-lru"))
    assert f"take {mamba:.2f} ms for Mamba and {lru:.2f} ms for the RG-LRU" in page
    longest = record["mamba"]["kernels"]["cp_fast, contiguous"][0].split()
    assert f"Most of its time, {float(longest[0]):.1f} ms, goes into one kernel of the backward pass" in page
    rows = (ROOT / "benchmarks" / "results" / "README.md").read_text()
    ours, plain = (record["mamba"]["ms"][f"cp_fast, contiguous{name}"] for name in ("", ", torch"))
    assert f"**{plain[0] / ours[0]:.0f} and {plain[1] / ours[1]:.0f} times**" in rows
    turns = (ROOT / "benchmarks" / "results" / "selective_scan_turns_1x_h200.txt").read_text()
    lru, mamba = (tuple(map(float, times)) for times in re.findall(r"^after +([\d.]+) ([\d.]+) ", turns, re.M))
    said = "Mamba's scan takes {:.2f} and {:.2f} ms, the RG-LRU's {:.2f} and {:.2f}."
    assert said.format(*mamba, *(x + 1e-9 for x in lru)) in page  # Halves are rounded up.


def test_documents_that_stay_at_home() -> None:
    page = " ".join((ROOT / "docs" / "performance.md").read_text().split())

    def shares(name: str) -> str:
        row = next(r for r in record(name) if r["schedule"] == "a2a" and r["lengths"].startswith("2048 2048"))
        return ", ".join(f"{float(row[f'{way}_efficiency']):.2f}" for way in ("forward", "forward_backward"))

    before, two, four = (shares(f"a2a_{name}x_h100.csv") for name in ("before_2", "home_2", "home_4"))
    assert f"on two H100s: {before} before and {two} after. 32 of them on four: {four} (" in page


def test_sparse_attention() -> None:
    """Milliseconds of the page on sparse attention."""
    page = " ".join((ROOT / "docs" / "how_to" / "sparse.md").read_text().split())
    one, two, eighth = (
        json.loads((ROOT / "benchmarks" / "results" / f"sparse_{name}.json").read_text())
        for name in ("1x_h200", "2x_h200", "rank_of_8_1x_h200")
    )
    long, short, last = one["sizes"]["65536"], one["sizes"]["16384"], eighth["sizes"]["65536"]
    for size in (last, long):
        ms, dense = size["ms"], size["dense_ms"]
        chosen = ms["select"] + ms["rows_of"], ms["forward"], ms["backward"]
        for name, numbers in (("chosen keys |", chosen), ("all keys | |", (dense["forward"], dense["backward"]))):
            assert f"| {name} {' | '.join(f'{x:,.0f}' for x in (*numbers, sum(numbers)))} |" in page
    assert f"That is {last['dense_over_sparse']['both passes']:.1f} times as fast" in page
    ratios = [size["dense_over_sparse"]["both passes"] for size in (long, short)]
    assert [round(1 / x, 1) for x in ratios] == [0.7, 2.1], "two thirds of the time, and twice the time"
    assert two["same_indices"]
    assert f"Two ranks reach {two['share']:.2f} of twice the speed of one" in page
    order = f"Deterministic gradients take {ms['backward_in_order']:.0f} ms in place of {ms['backward']:.0f}"
    assert order in page


def test_compressed_keys() -> None:
    """Milliseconds of the page on compressed keys."""
    page = " ".join((ROOT / "docs" / "how_to" / "compressed.md").read_text().split())
    eighth, played = (
        json.loads((ROOT / "benchmarks" / "results" / f"compressed_{name}_1x_h200.json").read_text())
        for name in ("rank_of_8", "check")
    )
    closed, chosen, dense = (eighth[name] for name in ("rate 128", "rate 4", "dense"))
    select = chosen["ms"]["select"] + chosen["ms"]["rows_of"]
    rows = (("rate 128, all closed entries", "", closed), ("rate 4, chosen entries", f"{select:,.0f} ", chosen))
    for name, selection, part in (*rows, ("all tokens", "", dense)):
        ms = part["ms"]
        assert (
            f"| {name} | {selection}| {ms['forward']:,.0f} | {ms['backward']:,.0f} | {sum(ms.values()):,.0f} |" in page
        )
    times = [part["dense_over_it"] for part in (closed, chosen)]
    fewer = [dense["pairs"] / part["pairs"] for part in (closed, chosen)]
    assert f"a layer is {times[0]:.1f} and {times[1]:.1f} times as fast" in page
    assert f"Its operations are {fewer[0]:.0f} and {fewer[1]:.0f} times fewer" in page
    rates = [
        round(part["operations"][way] / part["ms"][way] / 1e9, -1)
        for part in (closed, dense)
        for way in ("forward", "backward")
    ]
    assert rates == [250, 200, 550, 600]
    assert round(select / chosen["layer_ms"], 1) == 0.6, "three fifths"
    assert (played["problems"], played["wrong"]) == (200, {})
    two = json.loads((ROOT / "benchmarks" / "results" / "compressed_2x_h200.json").read_text())
    for name in ("rate 128", "rate 4"):
        assert f"reach {two[name]['share']:.2f} of twice the speed of one" in page
        assert two[name]["errors"][0] == 0.0, "the bits of one process"


# ---- the tables of docs/how_to/long_context.md are what `benchmarks/long_context_page.py` makes of the record


ROWS: list[dict[str, Any]] = [
    {"library": "cp_fast", "tokens": 65536, "layers": 4, "tokens_per_s": 80000, "peak_gib": 9.96},
    {"library": "cp_fast", "tokens": 524288, "layers": 2, "tokens_per_s": 31234, "peak_gib": 70.0},
    {"library": "accelerate", "tokens": 65536, "layers": 4, "tokens_per_s": 60000, "peak_gib": 10.0},
    {"library": "accelerate", "tokens": 524288, "layers": 2, "error": "torch.OutOfMemoryError: CUDA out of memory"},
    {"library": "ring_flash_attn", "tokens": 65536, "layers": 4, "error": "ImportError: no module"},
    {"library": "cp_fast+liger", "tokens": 65536, "layers": 4, "error": "TimeoutError: not done in 27 s"},
]
LONGEST: list[dict[str, Any]] = [
    {
        "library": "cp_fast",
        "layers": 36,
        "predicted": 700000,
        "bytes_per_token": 180000,
        "below": {"tokens": 665600, "not_run": "a step would take about 900 s"},
        "above": {"tokens": 755712, "error": "torch.OutOfMemoryError: CUDA"},
    },
    {"library": "accelerate", "layers": 36, "error": "RuntimeError: no kernel"},
]


def test_the_page_has_what_the_record_says() -> None:
    text = long.PAGE.read_text()
    assert long.page_of(text, json.loads(long.RECORD.read_text())) == text


def test_each_row_of_a_record_is_a_cell() -> None:
    assert long.speed_table(ROWS).splitlines()[2:] == [
        "| 65,536 | 4 | 80,000, 10.0 GiB | 60,000, 10.0 GiB | failed |",
        "| 524,288 | 2 | 31,234, 70.0 GiB | out of memory | - |",
    ]
    assert long.longest_table(LONGEST).splitlines()[2:] == [
        "| cp-attention | 700,000 | 180,000 | not tried | 755,712: out of memory |",
        "| accelerate | - | - | failed | - |",
    ]
    again = long.page_of(long.PAGE.read_text(), {"rows": ROWS, "longest": LONGEST})
    assert again.count(long.speed_table(ROWS)) == again.count(long.longest_table(LONGEST)) == 1


def test_memory_over_a_step_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[bench]'")
    memory = [["begin", 1.0, 1.0], ["0 mlp begins", 2.0, 2.5], ["0 mlp ends", 3.0, 4.0], ["end", 1.0, 5.0]]
    long.picture([{**ROWS[0], "memory": memory}], tmp_path / "memory.svg")
    assert "cp-attention, 65,536 tokens, 4 layers" in (tmp_path / "memory.svg").read_text().replace("<!-- ", "")


def test_diffusers_own_paths_beside_ours() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "diffusers_paths.json").read_text())
    page = (ROOT / "docs" / "conformance" / "comparison.md").read_text()
    names = {"cp-attention, `p2p`": "cp_fast, p2p", "cp-attention, `a2a`": "cp_fast, a2a"}
    names |= {"diffusers, ring": "diffusers, ring", "diffusers, Ulysses": "diffusers, ulysses"}
    for name, way in names.items():
        parts = [found["counts"][way][part] for part in ("training", "inference")]
        cells = [", ".join(str(part.get(verdict, 0)) for verdict in ("right", "wrong", "refused")) for part in parts]
        assert f"| {name} | {' | '.join(cells)} |" in page.replace("**", "")
    assert f"{len(found['cases']) // len(names)} cases" in page
    cases = {(case["family"], case["case"], case["way"]): case for case in found["cases"]}

    def differs(family: str, case: str) -> str:
        return f"{100 * cases[family, case, 'diffusers, ring']['outputs']:.0f} %"

    words = (ROOT / "docs" / "conformance" / "findings.md").read_text()
    masked = "even lengths, a padded text"
    assert f"QwenImage by {differs('qwen_image', masked)}, and of LTX by {differs('ltx', masked)}" in words
    assert f"differ by {differs('helios, amplified', 'odd lengths')}" in words


def test_the_speed_of_attention_at_wans_shape() -> None:
    page = (ROOT / "docs" / "how_to" / "video.md").read_text()
    ways = json.loads((ROOT / "benchmarks" / "results" / "diffusers_speed_2x_h200.json").read_text())["ways"]
    titles = {
        "cp_fast, p2p": "this package, `p2p`",
        "cp_fast, all_gather": "`all_gather`",
        "cp_fast, a2a": "`a2a`",
        "diffusers, ring, cudnn": "diffusers, ring",
        "diffusers, ulysses, cudnn": "diffusers, Ulysses",
    }
    for way, title in titles.items():
        assert f"| {title} | {ways[way]['forward_ms']:.0f} | {ways[way]['both_ms']:.0f} |" in page


def test_what_sharing_images_saves() -> None:
    page = " ".join((ROOT / "docs" / "how_to" / "images.md").read_text().split())
    found = json.loads((ROOT / "benchmarks" / "results" / "images_2x_h200.json").read_text())
    time, memory = ([found[way][of] for way in ("whole", "ranks")] for of in ("seconds", "bytes"))
    whole, ranks = (f"{1e3 * min(s):.0f} ms and {of / 2**30:.0f} GiB" for s, of in zip(time, memory, strict=True))
    assert f"{ranks} in place of {whole}" in page
