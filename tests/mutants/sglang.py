"""Mistakes of SGLang's storage."""

from __future__ import annotations

import pytest

from kvcached_client.engines.one_process import OneProcessEngine, OneProcessSession
from kvcached_client.sglang import computation, hooks, host_pages, identity
from kvcached_client.sglang.identity import ModelDescription
from kvcached_client.sglang.loaded_weights import LoadedWeights
from kvcached_client.sglang.page_store import PageStore
from tests.mutants.mutant import caught_by, rewrite

_TESTS = "tests/sglang/test_storage.py"
_SIDE_POOLS = "tests/sglang/test_side_pools.py"
_WEIGHTS = "tests/sglang/test_loaded_weights.py"
_IDENTITY = "tests/sglang/test_identity.py"
_PAGES = "tests/sglang/test_page_store.py"


@caught_by(f"{_TESTS}::test_sglang_asks_with_whole_prefixes")
def sglang_asks_with_a_gap(patch: pytest.MonkeyPatch) -> None:
    """Of prompts that begin alike, SGLang finds only the first after a restart."""
    rewrite(patch, hooks.prefix_of, ", *tree.get_hash_values(node)]", "]")


@caught_by(f"{_TESTS}::test_ranks_share_nothing_unless_they_hold_the_same")
def sglang_ranks_share_pages(patch: pytest.MonkeyPatch) -> None:
    """A rank loads the heads of another rank."""
    rewrite(patch, ModelDescription.keyspace, '"part": part,', "")


@caught_by(f"{_TESTS}::test_damaged_page_ends_what_is_loaded")
def sglang_uses_damaged_pages(patch: pytest.MonkeyPatch) -> None:
    """SGLang computes with pages whose bytes have changed."""
    rewrite(patch, PageStore.load, "return min(bad, default=count)", "return count")


@caught_by(f"{_SIDE_POOLS}::test_windows_come_back_whole_or_not")
def sglang_uses_parts_of_windows(patch: pytest.MonkeyPatch) -> None:
    """SGLang computes with a window of which only the last page was stored."""
    rewrite(patch, PageStore.ends, "range(max(end - window, 0), end)", "range(end - 1, end)")


@caught_by(f"{_SIDE_POOLS}::test_states_are_each_ranks_own")
def sglang_ranks_share_states(patch: pytest.MonkeyPatch) -> None:
    """A rank loads the state of another rank."""
    rewrite(patch, identity.pool_keyspace, "name, rank]", "name]")


@caught_by(f"{_TESTS}::test_refused_request_keeps_the_session")
def refused_request_ends_the_session(patch: pytest.MonkeyPatch) -> None:
    """After each refusal, which says nothing of the daemon's health, nothing is stored for five seconds."""
    rewrite(
        patch,
        OneProcessEngine.guarded,
        "isinstance(error, RequestError) and not isinstance(error, (Stale, DaemonFailure))",
        "False",
    )


@caught_by(f"{_WEIGHTS}::test_every_way_to_replace_weights_counts")
def sglang_overlooks_weights_from_outside(patch: pytest.MonkeyPatch) -> None:
    """Weights that a trainer writes into SGLang's memory leave the pages of the former ones."""
    patch.setattr(hooks, "_WEIGHTS", tuple(each for each in hooks._WEIGHTS if "_weight_update" not in each))


@caught_by(f"{_WEIGHTS}::test_every_way_to_replace_weights_counts")
def sglang_overlooks_failed_updates(patch: pytest.MonkeyPatch) -> None:
    """Weights that were loaded until an update failed leave the pages of the former ones."""
    rewrite(
        patch,
        hooks.install,
        'finally:\nloaded.replaced("weights were replaced in memory")',
        'except KeyError:\n    loaded.replaced("weights were replaced in memory")',
    )


@caught_by(f"{_WEIGHTS}::test_storage_that_is_attached_again_shares_nothing_after_new_weights")
def sglang_forgets_new_weights_with_its_storage(patch: pytest.MonkeyPatch) -> None:
    """A storage that is attached again finds pages of the weight files, which are no longer in memory."""
    rewrite(patch, hooks.install, "return _loaded[0]", "_loaded.clear()")


@caught_by(f"{_WEIGHTS}::test_storage_that_is_attached_late_shares_nothing")
def sglang_trusts_weights_of_before_its_storage(patch: pytest.MonkeyPatch) -> None:
    """Weights that were replaced before kvcached was attached count as those of the files."""
    rewrite(patch, hooks.install, "if is_attached_late:", "if False:")


@caught_by(f"{_WEIGHTS}::test_files_that_changed_since_the_start_are_not_trusted")
def sglang_trusts_new_files(patch: pytest.MonkeyPatch) -> None:
    """Files that have changed since they were loaded count as what is in memory."""
    rewrite(patch, LoadedWeights.content, "file.state.changed >= self._began_ns", "False")


@caught_by(f"{_WEIGHTS}::test_storage_that_is_attached_again_knows_the_files_that_were_loaded")
def sglang_reads_files_again(patch: pytest.MonkeyPatch) -> None:
    """A storage that is attached again takes other files for those in memory."""
    rewrite(patch, LoadedWeights.content, "if asked not in self._content:", "if True:")


@caught_by(f"{_WEIGHTS}::test_old_pages_that_are_stored_before_sglang_drops_them_are_not_found")
def sglang_finds_old_pages_after_a_flush(patch: pytest.MonkeyPatch) -> None:
    """Pages of former weights, stored before SGLang dropped its own, are found afterwards."""
    rewrite(patch, LoadedWeights.dropped_pages, "if self._has_old_pages:", "if False:")


@caught_by(f"{_SIDE_POOLS}::test_states_of_other_numbers_are_not_found")
def sglang_mistakes_numbers_of_states(patch: pytest.MonkeyPatch) -> None:
    """States in float16 are read as bfloat16."""
    patch.setattr(host_pages, "_DESCRIBED", tuple(each for each in host_pages._DESCRIBED if "temporal" not in each))


@caught_by(f"{_IDENTITY}::test_content_of_further_files_counts")
def sglang_trusts_names_of_further_files(patch: pytest.MonkeyPatch) -> None:
    """Pages with other scales, or of other experts, are found under the same file names."""
    patch.setattr(identity, "_FURTHER_FILES", ())


@caught_by(f"{_IDENTITY}::test_weights_from_elsewhere_need_a_version")
def sglang_trusts_files_that_are_not_loaded(patch: pytest.MonkeyPatch) -> None:
    """Weights of another process count as those of the files of the model's path."""
    rewrite(patch, ModelDescription._elsewhere, "if load_format in _FROM_ELSEWHERE:", "if False:")


@caught_by(f"{_IDENTITY}::test_code_that_is_in_no_file_needs_a_version")
def sglang_trusts_hooks_of_modules(patch: pytest.MonkeyPatch) -> None:
    """Pages of modules whose output other code bends are found by engines without it."""
    rewrite(patch, ModelDescription._check_code, "if self.settings.get(name):", "if False:")


@caught_by(f"{_IDENTITY}::test_how_attention_and_sums_are_computed_makes_another_model")
def sglang_mistakes_attention(patch: pytest.MonkeyPatch) -> None:
    """Pages of an attention backend that leaves out the model's cap are found by engines that apply it."""
    patch.setattr(computation, "_BACKENDS", ())


@caught_by(f"{_IDENTITY}::test_what_the_model_sees_of_a_picture_makes_another_model")
def sglang_mistakes_pictures(patch: pytest.MonkeyPatch) -> None:
    """Pages of a picture that was made small are found by engines that see all of it, under the name in a request."""
    patch.setattr(computation, "_MEDIA", ())


@caught_by(f"{_TESTS}::test_layouts_on_the_device_share_nothing")
def sglang_mistakes_layouts_on_the_device(patch: pytest.MonkeyPatch) -> None:
    """Heads and tokens of a page change places between engines whose pools on the device differ in layout."""
    rewrite(patch, host_pages._device_layouts, "return sorted(layouts - {_DEVICE_LAYOUT})", "return []")


@caught_by(f"{_PAGES}::test_scan_for_ends_ends_in_time")
def sglang_looks_for_every_end(patch: pytest.MonkeyPatch) -> None:
    """One look-up keeps a thread of SGLang busy beyond the ten seconds after which SGLang ends itself."""
    rewrite(patch, PageStore.ends, "if time.monotonic() > until_s:", "if False:")


@caught_by(f"{_TESTS}::test_decoding_sglang_is_promised_nothing")
def sglang_promises_pages(patch: pytest.MonkeyPatch) -> None:
    """SGLang promises the one that prefills pages that may be gone when it loads them, and ends the request then."""
    patch.setattr(hooks, "is_scheduler_asking", lambda: False)


@caught_by(f"{_PAGES}::test_one_call_waits_for_storage_once")
def sglang_waits_for_each_page_of_a_window(patch: pytest.MonkeyPatch) -> None:
    """One look-up keeps a thread of SGLang busy for as long as storage takes for all pages one after the other."""
    rewrite(patch, OneProcessSession.fetch, "deadline_ms=wait_ms", "deadline_ms=FETCH_MS")
