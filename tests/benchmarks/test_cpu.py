"""The parts of `make bench-cpu` that compute its figures, without timing."""

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection
from dataclasses import replace

import mlx.core as mx
import pytest

from app.runners.spawn import request_huge_pages
from benchmarks import cpu_limits, cpu_models, cpu_plot, cpu_report, cpu_tables
from benchmarks.cpu import PEERS, Plan, make_parser
from benchmarks.cpu_backends import (
    BackendError,
    BackendProcess,
    WorkerCommand,
    make_environment,
)
from benchmarks.cpu_breakdown import ModuleTimer, format_rows
from benchmarks.cpu_cells import (
    FORMATS,
    LONG_DECODE,
    SHAPES,
    WORKLOADS,
    Cell,
    CellRounds,
    Format,
    Measurement,
    ModelShape,
    Workload,
    decode,
    get_group_size,
    prefill,
)
from benchmarks.cpu_limits import Limit
from benchmarks.cpu_llama import LlamaPrograms
from benchmarks.cpu_rounds import BareResults, find_server_variables, measure_rounds
from benchmarks.cpu_tables import format_table, format_verdicts, make_baseline_targets
from models import kernels
from tests.manual.tables import read_part
from tests.rows import rows
from tests.server_process import ROOT

pytestmark = pytest.mark.exhaustive  # a tool of developers

TINY = ModelShape(
    kind="qwen3", width=64, layers=2, heads=2, kv_heads=1, head_dim=32, inner=128, vocab=96
)


PROMPT = prefill(512)


def cell(
    work: Workload = PROMPT, *, size: str = "110M", form: str = "q4", threads: int = 1
) -> Cell:
    return Cell(size=size, form=form, threads=threads, workload=work)


def make_measurement(rate: float, count: int = 16, seconds: float = 1.0) -> Measurement:
    return Measurement(rate=rate, cores=1.0, count=count, seconds=seconds)


def rounds(by_backend: dict[str, list[float]] | None = None, **rates: list[float]) -> CellRounds:
    names = {"ours": cpu_tables.OURS, "llama": cpu_tables.LLAMA, "stock": cpu_tables.STOCK}
    cell_rounds = CellRounds()
    for backend, values in ((by_backend or {}) | rates).items():
        for rate in values:
            cell_rounds.add(names.get(backend, backend), make_measurement(rate))
    return cell_rounds


class ScriptedBackend:
    """A backend with fixed measurements. measured: the requested workloads."""

    runs_on = "a script"

    def __init__(
        self,
        name: str,
        *,
        seconds: float = 1.0,
        patience: float = 10.0,
        works: Collection[Workload] | None = None,
        dies: bool = False,
    ) -> None:
        self.name, self.patience, self.works = name, patience, works
        self._seconds, self._dies = seconds, dies
        self.measured: list[Workload] = []

    def measure(self, work: Workload, budget: float) -> Measurement:
        if self._dies:
            raise BackendError(f"{self.name} ended by itself with status -8:\nlog")
        self.measured.append(work)
        return make_measurement(1.0, seconds=self._seconds)

    def __enter__(self):
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def test_a_ratio_is_the_median_of_the_rounds_and_not_the_ratio_of_medians():
    drifting = rounds(ours=[10, 30, 200], llama=[10, 20, 400])
    assert drifting.ratios(cpu_tables.LLAMA) == [1.0, 1.5, 0.5]
    assert drifting.ratio(cpu_tables.LLAMA) == 1.0
    assert drifting.rate("ours") / drifting.rate(cpu_tables.LLAMA) == 1.5


def test_a_ratio_uses_the_rounds_in_which_both_backends_were_measured():
    assert rounds(ours=[8, 16, 24], stock=[2]).ratios(cpu_tables.STOCK) == [4.0]
    assert rounds(ours=[8]).ratio(cpu_tables.STOCK) is None


def test_a_verdict_counts_cells_and_lists_those_below_target_worst_first():
    found = {
        cell(decode(4)): rounds(ours=[130], llama=[100]),
        cell(decode(8)): rounds(ours=[110], llama=[100]),
        cell(decode(8), threads=2): rounds(ours=[90], llama=[100]),
    }
    [line] = format_verdicts(found, {})
    assert "1 of 3 cells" in line
    assert line.endswith("Short: 110M q4, 2 thr., decode 8 0.9; 110M q4, 1 thr., decode 8 1.1")


def test_a_cell_at_its_target_passes():
    [line] = format_verdicts({cell(decode(1)): rounds(ours=[100], llama=[100])}, {})
    assert "1 of 1 cells" in line
    assert "Short" not in line


@pytest.mark.parametrize("form", ["q4-bf16", "q4-g32"])
def test_formats_without_a_target_get_no_verdict_against_llama(form):
    assert format_verdicts({cell(decode(1), form=form): rounds(ours=[1], llama=[100])}, {}) == []


def test_a_target_may_name_ours_with_activations_of_8_bits():
    found = {cell(): rounds({cpu_tables.OURS_8_BITS: [85.0], cpu_tables.OPENVINO: [100.0]})}
    [line] = format_verdicts(found, {})
    assert "ours, 8-bit activations, at least 0.8 times OpenVINO: 1 of 1 cells" in line
    assert format_verdicts({cell(): rounds({"ours": [1], cpu_tables.OPENVINO: [100]})}, {}) == []


def test_the_targets_of_an_old_commit_are_others_than_those_of_the_previous_one():
    found = {cell(LONG_DECODE): rounds({"ours": [15.0], "75f9f04": [10.0], "8b51e97": [10.0]})}
    [previous] = format_verdicts(found, {}, make_baseline_targets("75f9f04"))
    [old] = format_verdicts(found, {}, make_baseline_targets("8b51e97"))
    assert "at least 1 times 75f9f04: 1 of 1 cells" in previous
    assert "at least 1.8 times 8b51e97: 0 of 1 cells" in old


def test_a_verdict_compares_with_the_limit():
    found = {cell(decode(1), form=form): rounds(ours=[80]) for form in ("q8", "q4")}
    q8, q4 = format_verdicts(found, dict.fromkeys(found, 100.0))
    assert "at least 85% of the limit: 0 of 1 cells" in q8
    assert "at least 75% of the limit: 1 of 1 cells" in q4


def test_a_table_has_prefill_last_and_omits_unmeasured_cells():
    found = {
        cell(): rounds(ours=[300], llama=[200]),
        cell(decode(1)): rounds(ours=[60, 62], llama=[50, 40]),
        cell(decode(1), form="f32"): rounds(ours=[20]),
    }
    head, _, row = format_table(found, cpu_tables.LLAMA)
    assert head == "| shape | format | threads | decode 1 | prefill 512 |"
    assert row == ("| 110M | q4 | 1 | 61 / 45 = **1.38** (1.2 to 1.55) | 300 / 200 = **1.5** |")
    assert format_table(found, cpu_tables.STOCK) == []


def test_a_table_marks_figures_measured_on_fewer_steps():
    short = rounds(ours=[80, 80])
    short.add(cpu_tables.STOCK, make_measurement(2, count=3, seconds=9))
    assert format_table({cell(decode(1)): short}, cpu_tables.STOCK)[-1].endswith(
        "80 / 2 = **40** [3, 1] |"
    )


def test_the_table_of_ours_has_percentages_of_the_limit():
    found = {cell(decode(1)): rounds(ours=[40, 60]), cell(): rounds(ours=[300])}
    *_, row = cpu_tables.format_limit_table(found, {cell(decode(1)): 200.0})
    assert row == "| 110M | q4 | 1 | 50 (25%) | 300 |"


def make_limits(*rates: tuple[str, float]) -> dict[tuple[int, str], Limit]:
    return {(1, name): Limit(name=name, instruction="", unit="", rate=rate) for name, rate in rates}


SLOW_MEMORY = make_limits(("read", 1.0), ("float32", 1e6), ("int8", 1e6))


@pytest.mark.parametrize(
    ("form", "bytes_per_weight", "bytes_per_number"),
    [("f32", 4, 4), ("bf16", 2, 2), ("q8", 1 + 8 / 64, 4), ("q4", 0.5 + 8 / 64, 4)],
)
def test_the_limit_of_a_decode_step_is_reading_weights_and_caches(
    form, bytes_per_weight, bytes_per_number
):
    shape = SHAPES["110M"]
    matrices = 12 * (4 * 768 * 768 + 3 * 768 * 2048) + 32000 * 768
    weights = matrices * bytes_per_weight
    caches = 2 * 12 * 768 * 64 * bytes_per_number
    assert sum(cpu_limits.count_weights(shape)) == matrices
    for streams in (1, 8):
        limit = cpu_limits.compute_limit(cell(decode(streams), form=form), SLOW_MEMORY)
        assert limit == pytest.approx(1e9 * streams / (weights + streams * caches))


def test_the_limit_of_a_prompt_uses_the_fastest_instructions_for_its_format():
    vnni = make_limits(("read", 1e6), ("float32", 100.0), ("int8", 400.0))
    tiles = vnni | make_limits(("int8 tiles", 3200.0), ("bfloat16 tiles", 1600.0))

    def seconds(form: str, limits) -> float:
        limit = cpu_limits.compute_limit(cell(prefill(128), form=form), limits)
        assert limit is not None
        return 128 / limit

    layers, head = cpu_limits.count_weights(SHAPES["110M"])
    products = 2 * (layers * 128 + head) / 1e9
    attention = 4 * 12 * 768 * 128**2 / 2 / 1e9
    assert seconds("f32", tiles) == pytest.approx((products + attention) / 100)
    assert seconds("bf16", vnni) == seconds("f32", vnni)
    assert seconds("bf16", tiles) == pytest.approx((products + attention) / 1600)
    assert seconds("q4", vnni) == pytest.approx(products / 400 + attention / 100)
    assert seconds("q8", tiles) == pytest.approx(products / 3200 + attention / 100)
    assert cpu_limits.compute_limit(cell(), {}) is None


def test_the_limits_of_this_machine_are_measured(monkeypatch):
    limits = cpu_limits.measure_limits([1])
    if not limits:
        pytest.skip("there is no C++ compiler")
    assert all(limit.rate > 0 for limit in limits.values())
    lines = cpu_limits.format_limits(limits)
    assert lines[0] == "| limit | 1 thread |"
    assert any(line.startswith("| read (loads), GB/s | ") for line in lines)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cpu_limits.measure_limits([1]) == {}
    assert cpu_limits.format_limits({}) == [
        "The limits were not measured: there is no C++ compiler."
    ]


def test_of_two_measurements_of_limits_the_larger_counts():
    before, after = make_limits(("read", 10.0), ("int8", 30.0)), make_limits(("read", 20.0))
    assert {limit.name: limit.rate for limit in cpu_limits.take_most(before, after).values()} == {
        "read": 20.0,
        "int8": 30.0,
    }


def test_limits_are_parsed_by_threads_and_name():
    line = (
        '{"name": "int8 tiles", "instruction": "AMX", "unit": "GOP/s", "threads": 2, '
        '"median": 12000.0, "least": 11000.0, "most": 12383.0}\n'
    )
    [(key, limit)] = cpu_limits.parse_limits(line).items()
    assert key == (2, "int8 tiles")
    assert (limit.instruction, limit.rate) == ("AMX", 12383.0)


def test_backends_alternate_and_reverse_every_other_round():
    backends = [ScriptedBackend("ours"), ScriptedBackend("theirs")]
    cells = [cell(decode(1)), cell()]
    order = [name for _, name, _ in measure_rounds(backends, cells, 2, 0.1, [])]
    assert order == ["ours", "theirs"] * 2 + ["theirs", "ours"] * 2


def test_a_slow_backend_is_measured_once_and_only_in_its_workloads():
    slow = ScriptedBackend("slow", seconds=11.0, works=[decode(1)])
    ours = ScriptedBackend("ours", seconds=11.0, patience=12.0)
    list(measure_rounds([ours, slow], [cell(decode(1)), cell()], 3, 0.1, []))
    assert slow.measured == [decode(1)]
    assert len(ours.measured) == 6


def test_a_peer_that_ends_is_reported_and_left_out_and_ours_raises():
    dead, ours = ScriptedBackend("OpenVINO", dies=True), ScriptedBackend("ours")
    failures: list[str] = []
    found = list(measure_rounds([ours, dead], [cell(), cell(decode(1))], 2, 0.1, failures))
    assert {name for _, name, _ in found} == {"ours"}
    assert failures == ["110M q4, 1 thr., prefill 512: OpenVINO ended by itself with status -8"]
    with pytest.raises(BackendError):
        list(measure_rounds([ScriptedBackend("ours", dies=True)], [cell()], 1, 0.1, []))


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


ECHO = (
    "import os\n"
    "from benchmarks.cpu_backends import serve_measurements\n"
    "serve_measurements(lambda ask: (ask['streams'] * ask['budget'], os.getpid() "
    "if ask['streams'] else ask['prompt']), 'a test')"
)


def test_a_backend_measures_on_request():
    with BackendProcess("ours", WorkerCommand([sys.executable, "-c", ECHO])) as backend:
        assert backend.runs_on == "a test"
        first, second = backend.measure(decode(4), 2.0), backend.measure(decode(8), 2.0)
        prompt = backend.measure(prefill(2048), 2.0)
        longer = backend.measure(LONG_DECODE, 2.0)
    assert (first.rate, second.rate, prompt.count) == (8, 16, 2048)
    # one process
    assert first.count == second.count == longer.count


def test_a_worker_of_an_older_commit_is_restarted_for_another_context():
    worker = WorkerCommand([sys.executable, "-c", ECHO], one_context=True)
    with BackendProcess("8b51e97", worker) as backend:
        works = (decode(1), decode(8), prefill(512), LONG_DECODE, decode(1))
        pids = [backend.measure(work, 1.0).count for work in works if work.streams]
    short, again, longer, last = pids
    assert short == again
    assert len({short, longer, last}) == 3


def test_the_error_for_a_backend_that_exits_has_its_log():
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(BackendError, match=r"ours ended by itself with status 1:\n.*no such model"):
        BackendProcess("ours", WorkerCommand(command))


def test_a_module_timer_counts_each_second_once(monkeypatch):
    clock = iter(float(i) for i in range(100))
    monkeypatch.setattr("benchmarks.cpu_breakdown.time.perf_counter", lambda: next(clock))
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


def make_plan(**fields) -> Plan:
    llama = LlamaPrograms(folder=ROOT, system_info="")
    known = {
        "sizes": ["110M", "Qwen3-0.6B"],
        "forms": ["f32", "bf16", "q8", "q4"],
        "files": [],
        "threads": [1, 2],
        "works": list(WORKLOADS.values()),
        "peers": PEERS,
        "rounds": 3,
        "budget": 1.0,
        "llama": llama,
        "openvino": "python",
        "torch": None,
        "checkouts": {},
    }
    return Plan(**(known | fields))


def test_an_older_commit_gets_huge_pages_if_its_server_requested_them(tmp_path):
    package = tmp_path / "app/runners"
    package.mkdir(parents=True)
    assert find_server_variables(tmp_path) == {}
    (package / "memory.py").write_text("def request_huge_pages(environment):\n")
    assert find_server_variables(tmp_path) == find_server_variables(ROOT) == request_huge_pages({})


@pytest.mark.parametrize(
    "fields",
    [
        {"sizes": ["110M"]},
        {"forms": ["q4"]},
        {"works": [decode(1)]},
        {"peers": ["llama", "http"]},
        {"rounds": 2},
        {"llama": None},
        {"openvino": None},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_only_a_complete_run_can_replace_the_published_report(fields):
    assert make_plan().is_complete
    assert not make_plan(**fields).is_complete


def test_the_sections_of_bare_loops_name_backends_failures_and_targets():
    results = BareResults(
        cells={
            cell(work): rounds({"ours": [100], cpu_tables.LLAMA: [50], "75f9f04": [80]})
            for work in (decode(1), prefill(512))
        },
        runs_on={"ours: tiles on": None},
        failures=["110M bf16, 1 thr.: OpenVINO ended by itself with status -8"],
    )
    limits = make_limits(("read", 10.0), ("float32", 100.0))
    bare, llama, commit, targets = cpu_report.format_bare_loops(results, limits, ["75f9f04"])
    assert "- ours: tiles on\n- failed: 110M bf16" in bare
    assert "100 / 50 = **2**" in llama
    assert commit.startswith("### Against 75f9f04")
    assert "at least 1 times 75f9f04: 2 of 2 cells" in targets
    assert "of the limit: " in targets
    chart = ElementTree.fromstring(cpu_report.draw_bare_loops(results.cells, "110M", 1))
    texts = [element.text for element in chart]
    assert {"q4, decode 1", "q4, prefill 512", "llama.cpp"} <= set(texts)


def test_a_run_names_the_processor_the_peers_and_a_busy_machine(monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (0.2, 0.0, 0.0))
    llama = LlamaPrograms(folder=ROOT, system_info="system_info: | CPU : AMX_INT8 = 1 | ")
    text = cpu_report.describe_run("--rounds 1", 1, 2.0, llama, ["OpenVINO (OPENVINO)"])
    assert text.startswith(f"**{cpu_limits.describe_processor()}, ")
    assert "- mlxrunner: MLX " in text
    assert "- llama.cpp: tiles on (AMX_INT8)" in text
    assert "- not measured: OpenVINO (OPENVINO) is not set" in text
    assert "1 round, " in text
    assert "busy" not in text
    monkeypatch.setattr("os.getloadavg", lambda: (3.0, 0.0, 0.0))
    assert "**The machine was busy**" in cpu_report.describe_run("", 1, 2.0, None, [])


@rows("kind", ["tiles", "vnni", "avx2", "arm"])
def test_a_report_replaces_the_part_of_its_kind_of_processor_and_the_plots(
    kind, tmp_path, monkeypatch
):
    monkeypatch.setattr(cpu_limits, "find_processor_kind", lambda: kind)
    docs, output = tmp_path / kind / "docs", tmp_path / kind / "output"
    docs.mkdir(parents=True)
    output.mkdir()
    for plot in (f"cpu-{kind}-bare.svg", f"cpu-{kind}-http.svg"):
        (output / plot).write_text(f"<svg>{plot}</svg>")
    published = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    (docs / "benchmarks.md").write_text(published, "utf-8")
    cpu_report.write_document(docs, output, "new figures\n")
    written = (docs / "benchmarks.md").read_text("utf-8")
    assert read_part(written, f"cpu-{kind}") == "new figures\n"
    marker = f"<!-- generated: cpu-{kind} -->"
    before, after = (text.partition(marker)[0] for text in (published, written))
    assert before == after
    plot = f"cpu-{kind}-bare.svg"
    assert (docs / plot).read_text() == f"<svg>{plot}</svg>"


@rows(
    ("isa", "kind"),
    [
        ("avx512-amx-bf16", "tiles"),
        ("avx512-amx", "tiles"),
        ("avx512-vnni", "vnni"),
        ("avx512", "avx2"),
        ("avx2", "avx2"),
        ("neon-i8mm", "arm"),
        (None, "avx2"),
    ],
)
def test_the_kind_of_a_processor_is_that_of_the_kernels(isa, kind, monkeypatch):
    info = replace(kernels.describe(), isa=isa)
    monkeypatch.setattr(kernels, "describe", lambda: info)
    assert cpu_limits.find_processor_kind() == kind


def test_an_older_commit_can_be_the_only_peer():
    arguments = make_parser().parse_args(["--against", "--baseline", "8b51e97", "75f9f04"])
    assert (arguments.against, arguments.baseline) == ([], ["8b51e97", "75f9f04"])
    assert make_plan(peers=[], checkouts={"8b51e97": ROOT}).has_bare_loops
    assert not make_plan(peers=["http"]).has_bare_loops
