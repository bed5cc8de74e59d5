"""Mistakes of metrics, and of the pages over HTTP."""

from __future__ import annotations

import asyncio
from ipaddress import IPv4Address

import pytest

from kvcached.core.insight import picture
from kvcached.monitoring import assets, families, pages, tree
from kvcached.monitoring.counters import Total
from kvcached.monitoring.pages import DaemonPages, Shared
from kvcached.monitoring.timing import CopyTimes, RequestTimes
from kvcached.server import http
from kvcached.server.connections import Connections
from kvcached.server.http import HttpServer
from kvcached.service.service import Service
from tests.mutants.mutant import caught_by, rewrite


@caught_by("tests/config/test_config_http.py::test_listen_elsewhere_is_refused")
def metrics_for_other_machines(patch: pytest.MonkeyPatch) -> None:
    """Whoever reaches the machine reads names of models and health."""
    patch.setattr(IPv4Address, "is_loopback", property(lambda _: True))


@caught_by("tests/rpc/test_http.py::test_request_that_does_not_end_is_dropped")
def half_open_peer_kept(patch: pytest.MonkeyPatch) -> None:
    """A peer that sends its request byte by byte keeps its place for ever."""
    patch.setattr(Connections, "_drop_expired", lambda _: None)


@caught_by("tests/rpc/test_http.py::test_slow_reader_is_dropped")
def slow_reader_kept(patch: pytest.MonkeyPatch) -> None:
    """A peer that does not read its answer keeps it in memory for ever."""
    rewrite(patch, HttpServer._serve, "asyncio.timeout(ANSWER_S_MAX)", "asyncio.timeout(None)")


@caught_by("tests/rpc/test_http.py::test_too_many_requests_at_once_are_told_so")
def requests_without_a_limit(patch: pytest.MonkeyPatch) -> None:
    """As many answers are made at a time as peers ask for."""
    patch.setattr(Connections, "_check", lambda *_: None)


@caught_by("tests/rpc/test_http.py::test_bad_request_gets_a_clear_answer")
def answer_taken_back(patch: pytest.MonkeyPatch) -> None:
    """A connection is closed with bytes unread: the kernel drops the answer that is on its way."""
    rewrite(patch, HttpServer._linger, "left_bytes = _LINGER_BYTES_MAX", "left_bytes = 0")


@caught_by("tests/monitoring/test_pages.py::test_readyz_says_why_not")
def ready_whatever_the_check_finds(patch: pytest.MonkeyPatch) -> None:
    """A daemon whose workers fail is taken for ready."""
    rewrite(patch, DaemonPages._readyz, "isinstance(report, wire.HealthReport) and report.ok", "True")


@caught_by("tests/monitoring/test_pages.py::test_checks_are_shared")
def check_for_each_probe(patch: pytest.MonkeyPatch) -> None:
    """Each probe takes slots and work of every worker, however many there are."""
    rewrite(patch, Shared.get, "self._task is None or", "True or")


@caught_by("tests/monitoring/test_pages.py::test_checks_are_shared")
def impatient_probe_ends_the_check(patch: pytest.MonkeyPatch) -> None:
    """A probe that hangs up takes the result from all who wait for the same check."""
    patch.setattr(asyncio, "shield", lambda task: task)


@caught_by("tests/monitoring/test_pages.py::test_engines_get_a_turn_while_metrics_are_written")
def metrics_in_one_turn(patch: pytest.MonkeyPatch) -> None:
    """Requests of engines wait until the whole page is written."""
    rewrite(patch, DaemonPages._render, "await asyncio.sleep(0)", "pass")


@caught_by("tests/monitoring/test_pages.py::test_metrics_are_what_the_parsers_of_both_formats_read")
def family_begun_twice(patch: pytest.MonkeyPatch) -> None:
    """A family that is written in pieces has its type twice, which scrapers refuse."""
    patch.setattr(pages, "_without_comments", lambda text: text)


@caught_by("tests/monitoring/test_families.py::test_counters_are_0_from_the_start")
def counter_missing_until_it_counts(patch: pytest.MonkeyPatch) -> None:
    """A counter appears with its first event, which no rate sees."""
    rewrite(
        patch,
        Total.metric,
        "family.add_metric(values, totals.get(source, 0))",
        "source in totals and family.add_metric(values, totals[source])",
    )


@caught_by("tests/monitoring/test_families.py::test_namespaces_of_one_name_are_one_sample")
def sample_twice(patch: pytest.MonkeyPatch) -> None:
    """Two cleared namespaces make two samples with the same labels, which scrapers refuse."""
    serial = iter(range(1000))
    patch.setattr(families, "_names", lambda host, _: (f"{host.namespace}{next(serial)}", host.label))


@caught_by("tests/monitoring/test_timing.py::test_late_reply_is_timed_when_it_is_sent")
def late_reply_not_timed(patch: pytest.MonkeyPatch) -> None:
    """What waits is missing in the latencies, so that they look better than they are."""
    patch.setattr(RequestTimes, "timed", lambda _, respond, *__: respond)


@caught_by("tests/monitoring/test_families.py::test_work_moves_the_metrics")
def request_not_timed(patch: pytest.MonkeyPatch) -> None:
    """The daemon's latencies stay at 0."""
    rewrite(patch, Service.submit, "self.request_times.by_verb[verb].note(perf_counter_ns() - began_ns)", "pass")


@caught_by("tests/monitoring/test_timing.py::test_copies_of_an_engine_end_with_its_session")
def copy_of_a_dead_engine_under_way_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Copies of engines that have died are counted as under way until the daemon ends."""
    patch.setattr(CopyTimes, "session_over", lambda *_: None)


@caught_by("tests/rpc/test_http.py::test_port_is_served_under_its_own_names_alone")
def pages_for_websites(patch: pytest.MonkeyPatch) -> None:
    """A website whose name points to this machine reads the pages in a visitor's browser."""
    patch.setattr(http, "_is_this_machine", lambda _: True)


@caught_by("tests/monitoring/test_status_page.py::test_page_is_served_with_a_strict_policy")
def status_page_without_a_policy(patch: pytest.MonkeyPatch) -> None:
    """A browser runs whatever a mistake in the status page puts into it."""
    patch.setattr(assets, "_HEADERS", (("content-security-policy", "default-src *"),))


@caught_by("tests/monitoring/test_status_page.py::test_tree_shows_no_key")
def keys_in_the_tree(patch: pytest.MonkeyPatch) -> None:
    """Whoever reads the status page can acquire the blocks that it shows."""
    rewrite(patch, tree._run, "reports.shown.name_of(run.key).hex()", "run.key.hex()")


@caught_by("tests/service/test_picture.py::test_runs_that_are_looked_at_are_bounded")
def picture_of_everything(patch: pytest.MonkeyPatch) -> None:
    """A picture of the index looks at every run, however many there are."""
    patch.setattr(picture, "_shares", lambda trees, _: {each: each.run_count for each in trees})


@caught_by("tests/service/test_picture.py::test_index_may_change_between_steps")
def picture_of_what_has_gone(patch: pytest.MonkeyPatch) -> None:
    """The picture shows runs that have left the index since they were looked at."""
    rewrite(patch, picture._show, " or (at.parent.children or {}).get(at.first_key) is not at", "")
