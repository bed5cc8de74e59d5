"""The suite saturation, with few clients and little time."""

from __future__ import annotations

import os
import time

from benchmarks.saturation_rig import Clock
from benchmarks.suites.saturation import measure


def test_a_curve_has_throughput_and_latency_of_each_number_of_clients_beside_the_echo() -> None:
    """Each number has figures of both servers, and only the ratio at saturation has a target."""
    results = {each.metric: each for each in measure(1, 0.02, (1, 6))}
    for case in ("short_managed", "short_offload_miss"):
        for clients in (1, 6):
            figures = [results[f"{case}_{clients}_clients_{metric}"] for metric in ("per_s", "p50_us", "p99_us")]
            assert all(each.value > 0 and each.floor for each in figures)
            assert figures[1].value <= figures[2].value
        most = max(results[f"{case}_{clients}_clients_per_s"].value for clients in (1, 6))
        assert results[f"{case}_saturated_per_s"].value == most
        assert results[f"{case}_daemon_cpu_us"].value > 0
        for server in ("daemon", "echo"):
            assert results[f"{case}_{server}_saturating_clients"].value in {1, 6}
            assert 0 < results[f"{case}_{server}_awake_ratio"].value <= 1.1
    promised = {name: each.target for name, each in results.items() if each.target}
    assert promised == dict.fromkeys(
        ("short_managed_saturated_per_s", "short_offload_miss_saturated_per_s"), "ratio >= 0.5"
    )


def test_the_account_of_a_process_is_the_time_that_its_threads_ran_and_waited() -> None:
    """Whether clients or a server were the limit is read from the kernel's account of the server's threads.

    Processor time, not time on the clock, is what this thread spends here: a busy machine may stop it for any while.
    """
    clock = Clock(os.getpid())
    time.sleep(0.1)
    asleep = clock.stop()
    clock = Clock(os.getpid())
    end_ns = time.thread_time_ns() + 100_000_000
    start_ns = time.perf_counter_ns()
    while time.thread_time_ns() < end_ns:
        pass
    wall_ns = time.perf_counter_ns() - start_ns
    busy = clock.stop()
    assert asleep.cpu_ns < 50_000_000 < busy.cpu_ns
    assert busy.awake * wall_ns > 50_000_000
