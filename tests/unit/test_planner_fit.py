"""What fits: placement, refusals one byte below the plan, largest context and concurrency, times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cedar.config import preset
from cedar.errors import UsageError
from cedar.planner.flows import FlowPlan, Planner, Site
from cedar.planner.hardware import Machine, find_machine, machines, this_machine
from cedar.planner.modes import ced_modes
from cedar.planner.request import Request

REQUEST = Request(input_tokens=3_000, output_tokens=100, concurrency=3)


def box(memory: int, **fields: object) -> Machine:
    """A CPU machine of that much RAM and nothing else."""
    values: dict[str, object] = dict(
        name="box", title="a box", memory_bytes=memory, bandwidth=4e10, flops=4e11,
        accelerator=False, kind="given", source="test",
    )  # fmt: skip
    return Machine(**{**values, **fields})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def nano() -> Planner:
    return Planner(preset("nano"))


def on(planner: Planner, machine: Machine, request: Request = REQUEST) -> FlowPlan:
    return planner.plan(request, "ced+csa2", Site(machine))


def needed(planner: Planner, request: Request = REQUEST) -> int:
    return int(on(planner, box(10**12), request).ledger["fit.required_bytes"])


def test_it_fits_at_the_plan_and_is_refused_one_megabyte_below(nano: Planner) -> None:
    plan = needed(nano)
    assert on(nano, box(plan)).fits
    below = on(nano, box(plan - 10**6))
    assert below.fits is False
    message = str(below.refusal())
    for part in ("does not fit", "1.000 MB short", "3 x sequence", "scratch", "allowance",
                 "What would help"):  # fmt: skip
        assert part in message


def test_what_is_needed_is_the_sum_of_what_is_listed(nano: Planner) -> None:
    ledger = on(nano, box(10**12)).ledger
    parts = ("fit.weights_bytes", "sequences_bytes", "scratch.total_bytes", "allowance_bytes")
    assert ledger["fit.required_bytes"] == sum(ledger[name] for name in parts)
    assert ledger["fit.weights_bytes"] == ledger["weights.total_bytes"]


@pytest.mark.parametrize("memory", [1_100 * 10**6, 2 * 10**9, 40 * 10**9])
@pytest.mark.parametrize("name", ["nano", "article-thin"])
def test_the_largest_concurrency_fits_and_one_more_does_not(name: str, memory: int) -> None:
    planner = Planner(preset(name))
    most = int(on(planner, box(memory)).ledger["fit.largest_concurrency"])
    assert most > 0
    assert on(planner, box(memory), replace(REQUEST, concurrency=most)).fits
    assert not on(planner, box(memory), replace(REQUEST, concurrency=most + 1)).fits


@pytest.mark.parametrize("memory", [1_100 * 10**6, 1_300 * 10**6])
def test_the_largest_context_fits_and_one_block_more_does_not(memory: int) -> None:
    planner = Planner(preset("article-thin"))
    longest = int(on(planner, box(memory)).ledger["fit.largest_context"])
    assert 3_100 < longest < 1_048_576
    assert longest % 128 == 0
    at = replace(REQUEST, input_tokens=longest - 100)
    assert on(planner, box(memory), at).fits
    assert not on(planner, box(memory), replace(at, input_tokens=longest + 28)).fits


def test_the_largest_context_stops_at_the_models_own(nano: Planner) -> None:
    assert on(nano, box(10**13)).ledger["fit.largest_context"] == 1_048_576


def test_longer_contexts_leave_room_for_fewer_sequences(nano: Planner) -> None:
    ledger = on(nano, box(8 * 10**9)).ledger
    at = [ledger[f"fit.concurrency_at.t{tokens}"] for tokens in (8_192, 131_072, 1_048_576)]
    assert at == sorted(at, reverse=True)
    request = Request(input_tokens=131_071, output_tokens=1)
    assert at[1] == on(nano, box(8 * 10**9), request).ledger["fit.largest_concurrency"]


def test_experts_then_tables_go_to_the_fastest_tier_with_room() -> None:
    planner = Planner(preset("v4.1-flash"))
    homes = {}
    for ram, ssd in ((0, 0), (512, 0), (320, 2_000), (128, 2_000)):
        machine = replace(
            find_machine("rtx5090"), host_memory_bytes=ram * 2**30, disk_bytes=ssd * 10**9
        )
        placement = planner.plan(REQUEST, "ced+csa2", Site(machine)).placement
        assert placement is not None
        homes[ram] = (placement.homes["routed_experts"], placement.homes["engram_tables"])
    assert homes == {
        0: (None, None), 512: ("ram", "ram"), 320: ("ram", "ssd"), 128: ("ssd", "ssd"),
    }  # fmt: skip


def test_ram_left_over_caches_experts_on_the_ssd_and_shortens_the_step() -> None:
    planner = Planner(preset("v4.1-flash"))
    shares, steps = [], []
    for ram in (64, 128, 256):
        machine = replace(
            find_machine("rtx5090"), host_memory_bytes=ram * 2**30, disk_bytes=2 * 10**12
        )
        plan = planner.plan(REQUEST, "ced+csa2", Site(machine))
        shares.append(plan.ledger["cache.routed_experts_share"])
        steps.append(plan.ledger["roofline.decode.step_seconds"])
        assert plan.bounds["decode"] == "SSD reads"
    assert shares == sorted(shares)
    assert steps == sorted(steps, reverse=True)


def test_a_class_can_be_sent_to_one_place_and_only_to_one_that_exists() -> None:
    planner = Planner(preset("v4.1-flash"))
    machine = find_machine("dgx-h200")
    plan = planner.plan(REQUEST, "ced+csa2", Site(machine, {"engram_tables": "ssd"}))
    assert plan.placement is not None
    assert plan.placement.homes["engram_tables"] == "ssd"
    with pytest.raises(UsageError, match="cannot live in ssd"):
        planner.plan(REQUEST, "ced+csa2", Site(find_machine("h200"), {"engram_tables": "ssd"}))
    with pytest.raises(UsageError, match="cannot live in ssd"):
        planner.plan(REQUEST, "ced+csa2", Site(machine, {"resident": "ssd"}))


def test_times_are_the_slower_of_bytes_and_arithmetic() -> None:
    planner = Planner(preset("article"))
    plan = planner.plan(Request(input_tokens=30_000, output_tokens=1_000), "ced+csa2",
                        Site(find_machine("dgx-h200")))  # fmt: skip
    ledger = plan.ledger
    assert ledger["roofline.decode.step_seconds"] == max(
        ledger["roofline.decode.gpu_seconds"], ledger["roofline.decode.compute_seconds"]
    )
    assert plan.bounds["decode"] == "GPU bandwidth"
    many = planner.plan(
        Request(input_tokens=30_000, output_tokens=1_000, concurrency=2_048), "ced+csa2",
        Site(find_machine("dgx-h200")),
    )  # fmt: skip
    assert (
        many.ledger["roofline.decode.tokens_per_second"]
        > 50 * (ledger["roofline.decode.tokens_per_second"])
    )


def test_a_decode_step_reads_all_resident_weights_and_the_experts_of_one_token() -> None:
    ledger = on(Planner(preset("article")), box(10**12), replace(REQUEST, concurrency=1)).ledger
    assert ledger["traffic.decode.resident_bytes"] == ledger["weights.resident_bytes"]
    assert ledger["traffic.decode.routed_experts_bytes"] == pytest.approx(
        ledger["experts.bytes_per_token"]
    )


def test_prompt_rows_of_the_n_gram_memory_take_minutes_one_by_one_and_seconds_batched() -> None:
    request = Request(input_tokens=48 * 1_024, output_tokens=1)
    ledger = Planner(preset("v4.1-flash")).plan(
        request, "ced+csa2", Site(find_machine("dgx-h200"))
    ).ledger  # fmt: skip
    assert ledger["engram.prompt_rows"] == 2_359_296
    assert ledger["engram.prompt_serial_seconds"] == pytest.approx(189, abs=1)
    assert ledger["engram.prompt_batched_seconds"] == pytest.approx(2.4, abs=0.1)


def test_ced_saves_nothing_up_to_one_window_and_most_of_the_decoder_beyond() -> None:
    planner = Planner(preset("v4.1-flash"))
    request = Request(input_tokens=30_000, output_tokens=1)
    modes = {m.mode: m for m in ced_modes(planner, request, "ced+csa2", None, overhead_seconds=0)}
    assert {m.no_gain_up_to for m in modes.values() if m.mode != "full"} == {128}
    assert modes["full"].flops_share == 1
    assert 0.5 < modes["report"].flops_share < modes["cut"].flops_share
    assert modes["cut"].flops_share < modes["exact"].flops_share < 0.55
    assert modes["report"].tenth_saved_from is not None
    assert modes["exact"].tenth_saved_from is not None
    assert 128 < modes["report"].tenth_saved_from < modes["exact"].tenth_saved_from < 2_541


def test_a_fixed_overhead_moves_the_length_from_which_ced_pays() -> None:
    planner = Planner(preset("v4.1-flash"))
    request = Request(input_tokens=30_000, output_tokens=1)
    site = Site(find_machine("dgx-h200"))
    lengths = []
    for overhead in (0.0, 0.005, 0.0124, 1e6):
        modes = ced_modes(planner, request, "ced+csa2", site, overhead_seconds=overhead)
        lengths.append(next(m.pays_from for m in modes if m.mode == "report"))
    assert lengths[0] == 129
    assert lengths[1] is not None
    assert lengths[2] is not None
    assert 129 < lengths[1] < lengths[2]
    assert lengths[3] is None


def test_the_tail_can_be_longer_than_one_window() -> None:
    planner = Planner(preset("v4.1-flash"))
    rows = [
        planner.plan(
            Request(input_tokens=9_000, output_tokens=1, replay_windows=windows), "ced+csa2"
        ).ledger["decoder_token_layers"]
        for windows in (1, 2, 8)
    ]
    assert rows == [128 * 20, 256 * 20, 1_024 * 20]


def test_every_named_machine_has_numbers_and_a_source() -> None:
    for name, machine in machines().items():
        assert machine.name == name
        assert min(machine.memory_bytes, machine.bandwidth, machine.flops) > 0
        assert "20" in machine.source  # a year


def test_devices_can_be_counted_and_unknown_names_list_the_known() -> None:
    eight = find_machine("8xh200")
    assert (eight.devices, eight.memory_bytes) == (8, 141 * 10**9)
    for name in ("h300", "2xdgx-h200", "0xh200", "4xepyc-9654x2"):
        with pytest.raises(UsageError, match="like 8xh200"):
            find_machine(name)


CPUINFO = "".join(
    f"processor\t: {n}\ncpu MHz\t\t: 3000.000\nflags\t\t: fma avx2 avx512f avx512_bf16\n\n"
    for n in range(2)
)


def test_this_machine_is_read_from_proc_and_its_container_limit(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       16000000 kB\nMemFree: 1 kB\n")
    (tmp_path / "proc/cpuinfo").write_text(CPUINFO)
    machine = this_machine(tmp_path, bandwidth=3e10)
    assert machine.memory_bytes == 16_000_000 * 1024
    assert machine.flops in {cores * 3e9 * 64 for cores in (1, 2)}
    assert (machine.kind, machine.accelerator) == ("measured", False)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("2000000000\n")
    assert this_machine(tmp_path, bandwidth=3e10).memory_bytes == 2 * 10**9
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert this_machine(tmp_path, bandwidth=3e10).memory_bytes == 16_000_000 * 1024


def test_a_machine_without_proc_asks_for_the_numbers(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match="--memory, --bandwidth and --flops"):
        this_machine(tmp_path)
