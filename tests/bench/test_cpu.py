"""The parts of `make bench-cpu` that compute its figures, without timing."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import mlx.core as mx
import pytest

from tests.bench import cpu_http, cpu_models, cpu_plot
from tests.bench.cpu_backends import BackendProcess, make_environment
from tests.bench.cpu_breakdown import ModuleTimer, format_rows
from tests.bench.cpu_cells import (
    FORMATS,
    PREFILL,
    SHAPES,
    Cell,
    CellRounds,
    Format,
    Measurement,
    ModelShape,
    Workload,
    format_table,
    format_verdicts,
    get_group_size,
)
from tests.bench.cpu_http import HttpTimings

TINY = ModelShape(
    kind="qwen3", width=64, layers=2, heads=2, kv_heads=1, head_dim=32, inner=128, vocab=96
)


def cell(
    work: Workload = PREFILL, *, size: str = "110M", form: str = "q4", threads: int = 1
) -> Cell:
    return Cell(size=size, form=form, threads=threads, workload=work)


def rounds(count: int = 16, **rates: list[float]) -> CellRounds:
    cell_rounds = CellRounds()
    for backend, values in rates.items():
        for rate in values:
            cell_rounds.add(backend, Measurement(rate=rate, cores=1.0, count=count, seconds=1.0))
    return cell_rounds


def test_a_ratio_is_the_median_of_the_rounds_and_not_the_ratio_of_medians():
    drifting = rounds(ours=[10, 30, 200], llama=[10, 20, 400])
    assert drifting.ratios("llama") == [1.0, 1.5, 0.5]
    assert drifting.ratio("llama") == 1.0
    assert drifting.rate("ours") / drifting.rate("llama") == 1.5


def test_a_ratio_uses_the_rounds_in_which_both_backends_were_measured():
    assert rounds(ours=[8, 16, 24], stock=[2]).ratios("stock") == [4.0]
    assert rounds(ours=[8]).ratio("stock") is None


def test_a_verdict_counts_cells_and_lists_those_below_target_worst_first():
    found = {
        cell(Workload(4)): rounds(ours=[130], llama=[100]),
        cell(Workload(8)): rounds(ours=[110], llama=[100]),
        cell(Workload(8), threads=2): rounds(ours=[90], llama=[100]),
    }
    [line] = format_verdicts(found)
    assert "1 of 3 cells" in line
    assert line.endswith("Short: 110M q4, 2 thr., decode 8 0.9; 110M q4, 1 thr., decode 8 1.1")


def test_a_cell_at_its_target_passes():
    [line] = format_verdicts({cell(Workload(1)): rounds(ours=[100], llama=[100])})
    assert "1 of 1 cells" in line
    assert "Short" not in line


@pytest.mark.parametrize("form", ["bf16", "q4-bf16", "q4-g32"])
def test_formats_without_a_target_get_no_verdict_against_llama(form):
    assert format_verdicts({cell(Workload(1), form=form): rounds(ours=[1], llama=[100])}) == []


def test_the_published_format_has_a_second_target_against_stock():
    lines = format_verdicts({cell(Workload(1), form="q4-bf16"): rounds(ours=[50], stock=[1])})
    assert [line.partition(": ")[2][:6] for line in lines] == ["1 of 1", "0 of 1"]


def test_a_table_has_prefill_last_and_omits_unmeasured_cells():
    found = {
        cell(PREFILL): rounds(ours=[300], llama=[200]),
        cell(Workload(1)): rounds(ours=[60, 62], llama=[50, 40]),
        cell(Workload(1), form="f32"): rounds(ours=[20]),
    }
    head, _, row = format_table(found, "llama")
    assert head == "| shape | format | threads | decode 1 | prefill 512 |"
    assert row == ("| 110M | q4 | 1 | 61 / 45 = **1.38** (1.2 to 1.55) | 300 / 200 = **1.5** |")
    assert format_table(found, "stock") == []


def test_a_table_marks_figures_measured_on_fewer_steps():
    short = rounds(ours=[80, 80])
    short.add("stock", Measurement(rate=2, cores=1, count=3, seconds=9))
    assert format_table({cell(Workload(1)): short}, "stock")[-1].endswith(
        "80 / 2 = **40** [3, 1] |"
    )


def test_groups_divide_every_width():
    for shape in SHAPES.values():
        for form in FORMATS.values():
            group = get_group_size(shape, form)
            assert shape.width % group == shape.inner % group == 0
    assert get_group_size(SHAPES["110M"], FORMATS["q4"]) == 64
    assert get_group_size(SHAPES["15M"], FORMATS["q4"]) == 32


def test_weights_have_the_format_of_the_cell():
    plain = cpu_models.make_weights(TINY, FORMATS["bf16"])
    assert {array.dtype for array in plain.values()} == {mx.bfloat16}
    packed = cpu_models.make_weights(TINY, Format(dtype="bfloat16", gguf="Q4_0", bits=4))
    path = "model.layers.1.mlp.up_proj"
    assert packed[f"{path}.weight"].shape == (128, 64 * 4 // 32)
    assert packed[f"{path}.scales"].dtype == mx.bfloat16
    assert packed["model.norm.weight"].shape == (64,)


def test_a_backend_inherits_no_variables_that_would_change_it(monkeypatch):
    monkeypatch.setenv("MLXRUNNER_KERNELS", "off")
    monkeypatch.setenv("LD_PRELOAD", "")
    environment = make_environment({"MLXRUNNER_THREADS": "1"})
    assert environment["MLXRUNNER_THREADS"] == "1"
    assert "MLXRUNNER_KERNELS" not in environment
    assert "LD_PRELOAD" not in environment
    assert "PATH" in environment


def test_a_backend_measures_on_request():
    work = (
        "from tests.bench.cpu_backends import serve_measurements\n"
        "serve_measurements(lambda ask: (ask['streams'] * ask['budget'], ask['prompt']), 'a test')"
    )
    with BackendProcess("ours", [sys.executable, "-c", work]) as backend:
        assert backend.runs_on == "a test"
        first, second = backend.measure(Workload(4), 2.0), backend.measure(Workload(8), 2.0)
    assert (first.rate, second.rate, first.count) == (8, 16, 512)


def test_the_error_for_a_backend_that_exits_has_its_log():
    with pytest.raises(RuntimeError, match=r"ours ended by itself:\n.*no such model"):
        BackendProcess("ours", [sys.executable, "-c", "raise SystemExit('no such model')"])


def test_a_module_timer_counts_each_second_once(monkeypatch):
    clock = iter(float(i) for i in range(100))
    monkeypatch.setattr("tests.bench.cpu_breakdown.time.perf_counter", lambda: next(clock))
    timer = ModuleTimer(lambda value: None, eval_overhead=0.0)
    inner = timer.wrap("inner", lambda: None)
    timer.wrap("outer", inner)()
    # entered 0, begun 1; inner entered 2, begun 3, ended 4; ended 5
    assert timer.by_kind["inner"].seconds == 1.0
    assert timer.by_kind["outer"].seconds == 2.0
    assert format_rows(timer, turns=2)[0] == "| outer | 0.5 | 1000.000 | 67% |"


def test_the_longest_bar_of_each_chart_panel_has_the_full_width():
    names = ("ours & theirs", "theirs")
    chart = cpu_plot.draw_bars(
        "tokens/s",
        [
            cpu_plot.Panel(title="f32", values=dict(zip(names, (40.0, 10.0), strict=True))),
            cpu_plot.Panel(title="q4", values={"theirs": 7.0}),
        ],
    )
    root = ElementTree.fromstring(chart)
    bars = [element for element in root if element.tag.endswith("rect")]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths[0] == 4 * widths[1] == widths[2]
    # one series, one colour
    assert bars[1].attrib["fill"] == bars[2].attrib["fill"] != bars[0].attrib["fill"]
    assert "ours & theirs" in [element.text for element in root]


def test_the_table_of_servers_compares_each_with_ours():
    found = {
        ("q4", 8, "mlxrunner"): HttpTimings(rates=[100, 120], ttfts=[0.1]),
        ("q4", 8, "mlx-lm"): HttpTimings(rates=[10], ttfts=[2.0]),
    }
    _, _, ours, theirs = cpu_http.format_table(found)
    assert "| mlxrunner | 110 (100 to 120) |  |" in ours
    assert "| mlx-lm | 10 (10 to 10) | **10** | 2 (2 to 2) |" in theirs
    assert Path(cpu_http.PLOT).suffix == ".svg"
