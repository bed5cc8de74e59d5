"""SGLang's arguments as `kvcached doctor` reads them: what would not work with kvcached, and how to say it instead."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvcached.doctor.arguments import read_arguments
from kvcached.doctor.model_config import read_config, text_config
from kvcached_client.blocks.layout import STATE_SPACE_FIELDS
from kvcached_client.doctor.checks import Finding
from kvcached_client.protocol.engine import OffloadInfo
from kvcached_client.sglang.host_pages import SERVED_LAYOUTS
from kvcached_client.sglang.settings import EXTRA_CONFIG, OPTION, REFUSED_SETTINGS, read_settings

_CHECK: Final = "sglang flags"
_MODEL: Final = "model"
_EXTRA: Final = OPTION.removeprefix("--")
_WHOLE: Final = f"{OPTION} '{json.dumps(dict(EXTRA_CONFIG))}'"
#: Other names that SGLang gives its options.
_ALIASES: Final = {
    "enable-hicache": "enable-hierarchical-cache",
    "model": "model-path",
    "tensor-parallel-size": "tp-size",
    "tp": "tp-size",
    "pipeline-parallel-size": "pp-size",
    "pp": "pp-size",
    "data-parallel-size": "dp-size",
    "dp": "dp-size",
    "attention-data-parallel-size": "attn-dp-size",
    "decode-context-parallel-size": "dcp-size",
    "attention-context-parallel-size": "attn-cp-size",
}
#: Fields of the extra configuration that SGLang takes for itself: name, and what it takes.
_NUMBERS: Final = (
    ("prefetch_threshold", int, "a whole number"),
    ("prefetch_timeout_base", (int, float), "a number"),
    ("prefetch_timeout_per_ki_token", (int, float), "a number"),
)
#: Layers of other kinds have a pool of their own in SGLang, or none.
_FULL_ATTENTION: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
#: Of models whose attention is sparse, by an indexer with keys of its own.
_INDEXER_FIELD: Final = "index_topk"
#: Of models with latent attention, whose tensor-parallel ranks all hold the same.
_LATENT_FIELD: Final = "kv_lora_rank"


@dataclass(frozen=True, slots=True)
class SglangFlags:
    """SGLang's command line, as far as it matters here.

    Attributes:
        options: values by SGLang's first name of the option, without the dashes before it; "" for one without a value.
        words: what belongs to no option: "serve", the model.
    """

    options: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)

    @property
    def model(self) -> str:
        """Name or path of the model; "" where none is named."""
        words = self.words[1:] if self.words[:1] == ["serve"] else self.words
        return self.options.get("model-path") or (words[0] if words else "")

    @property
    def ranks(self) -> int:
        """How many processes hold a part of the model each."""
        return self._number("tp-size") * self.stages

    @property
    def stages(self) -> int:
        """How many parts the layers are in."""
        return self._number("pp-size")

    @property
    def attention_ranks(self) -> int:
        """How many ranks of a stage serve a request: all, unless attention is data-parallel."""
        groups = self._number("attn-dp-size")
        if groups == 1 and "enable-dp-attention" in self.options:  # as this was said before SGLang 0.5.23
            groups = self._number("dp-size")
        return max(self._number("tp-size") // groups, 1)

    @property
    def context_ranks(self) -> int:
        """How many of these compute other tokens of a prompt, not other heads."""
        return self._number("attn-cp-size")

    @property
    def head_ranks(self) -> int:
        """How many parts the heads of a layer are in."""
        return max(self.attention_ranks // self.context_ranks, 1)

    @property
    def decode_context_ranks(self) -> int:
        """How many ranks share the tokens of a prompt where it is decoded."""
        return self._number("dcp-size")

    def _number(self, option: str) -> int:
        """Value of an option; 1 where it is no number."""
        size = self.options.get(option, "1")
        return int(size) if size.isdecimal() and int(size) else 1


def parse(arguments: Sequence[str]) -> SglangFlags:
    """Read SGLang's arguments. Those that do not matter here are taken as they come."""
    options, words = read_arguments(arguments, {})
    return SglangFlags({_ALIASES.get(name, name): value for name, value in options.items()}, words)


def check_flags(flags: SglangFlags, run_dir: Path) -> Iterator[Finding]:
    """What of SGLang's arguments does not fit; `run_dir` is that of the daemon that is meant."""
    found = [*_config_file(flags), *_hierarchy(flags), *_extra_config(flags, run_dir), *_refused(flags)]
    yield from found
    if not any(finding.level == "fail" for finding in found):
        yield Finding(_CHECK, "ok", "nothing in SGLang's arguments keeps it from using kvcached")


def _config_file(flags: SglangFlags) -> Iterator[Finding]:
    if "config" in flags.options:
        text = f"--config {flags.options['config']} is not read here: options in it count as missing"
        yield Finding(_CHECK, "warn", text, "for this check, give the options of hierarchical cache as arguments")


def _hierarchy(flags: SglangFlags) -> Iterator[Finding]:
    if "enable-hierarchical-cache" not in flags.options:
        text = "--enable-hierarchical-cache is missing: SGLang would use no storage"
        yield Finding(_CHECK, "fail", text, "add --enable-hierarchical-cache")
    if "disable-radix-cache" in flags.options:
        text = "--disable-radix-cache: SGLang does not start with it and a hierarchical cache"
        yield Finding(_CHECK, "fail", text, "leave out --disable-radix-cache")
    if "disaggregation-decode-enable-radix-cache" in flags.options:
        text = "--disaggregation-decode-enable-radix-cache: this SGLang stores pages in kvcached, and finds none there"
        yield Finding(
            _CHECK, "warn", text, "keep it if that is meant: what it lacks comes from the SGLang that prefills"
        )
    backend = flags.options.get("hicache-storage-backend")
    if backend != "dynamic":
        said = "is missing" if backend is None else f"is {backend}"
        fix = "write --hicache-storage-backend dynamic"
        yield Finding(_CHECK, "fail", f"--hicache-storage-backend {said}: SGLang would not use kvcached", fix)
    layout = flags.options.get("hicache-mem-layout", "page_first")
    if layout not in SERVED_LAYOUTS:
        fix = f"--hicache-mem-layout with one of {', '.join(sorted(SERVED_LAYOUTS))}"
        yield Finding(_CHECK, "fail", f"--hicache-mem-layout {layout} is not served", fix)


def _extra_config(flags: SglangFlags, run_dir: Path) -> Iterator[Finding]:
    text = flags.options.get(_EXTRA)
    if text is None:
        yield Finding(_CHECK, "fail", f"{OPTION} is missing: SGLang would not find kvcached", f"add {_WHOLE}")
        return
    try:
        config = _read_extra(text)
    except OSError as error:
        yield Finding(_CHECK, "fail", f"{OPTION} {text}: {error.strerror}", "name a file that is there")
        return
    except (ValueError, RecursionError) as error:
        yield Finding(_CHECK, "fail", f"{OPTION} is no JSON object: {error}", f"write {_WHOLE}")
        return
    if config is None:
        text = f"{OPTION} {text} is not read here: only JSON and TOML are"
        yield Finding(_CHECK, "warn", text, "for this check, give its content as JSON")
        return
    for name, wanted in EXTRA_CONFIG.items():
        yield from _field(name, wanted, config)
    yield from _numbers(config)
    if config.get("tp_lcm_size"):
        text = f"{OPTION}: tp_lcm_size has no effect: pages are found by as many ranks as have stored them"
        yield Finding(_CHECK, "warn", text, "leave out tp_lcm_size")
    try:
        settings = read_settings(config)
    except ValueError as error:
        yield Finding(_CHECK, "fail", str(error), "correct the table kvcached in it; docs/sglang.md lists its keys")
        return
    if settings.run_dir is not None and Path(settings.run_dir).resolve() != run_dir.resolve():
        text = f"SGLang is told to use the daemon in {settings.run_dir}, not the one in {run_dir}"
        yield Finding(_CHECK, "fail", text, "give both the same run_dir")


def _read_extra(text: str) -> dict[str, Any] | None:
    """The object that the option is, or whose file it names; None for a file of another kind.

    Raises:
        OSError: the file cannot be read.
        ValueError, RecursionError: it is no object, or nested too deeply.
    """
    path = Path(text.removeprefix("@"))
    if not text.startswith("@"):
        config = json.loads(text)
    elif path.suffix == ".json":
        config = json.loads(path.read_text(encoding="utf-8"))
    elif path.suffix == ".toml":
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    else:
        return None
    if not isinstance(config, dict):
        raise ValueError(f"it is {config!r}")  # noqa: TRY004 - as for text that is no JSON
    return config


def _field(name: str, wanted: object, config: Mapping[str, Any]) -> Iterator[Finding]:
    """What is wrong with a field that has to be there. SGLang takes any `backend_name`, and some numbers as truths."""
    value = config.get(name)
    if name == "backend_name":
        is_right = value is not None
    elif isinstance(wanted, str):
        is_right = value == wanted
    elif isinstance(wanted, bool):
        is_right = value is wanted  # with anything but a truth value, SGLang does not start
    else:
        is_right = bool(value)
    if not is_right:
        said = "missing" if name not in config else repr(value)
        why = ": nothing would be stored" if isinstance(wanted, bool) else ""
        yield Finding(_CHECK, "fail", f"{OPTION}: {name} is {said}{why}", f"write {json.dumps({name: wanted})[1:-1]}")


def _numbers(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Fields that SGLang does not start with, unless they are numbers."""
    for name, kind, words in _NUMBERS:
        if not isinstance(config.get(name, 0), kind):
            text = f"{OPTION}: {name} is {json.dumps(config[name], default=str)}: SGLang does not start with it"
            yield Finding(_CHECK, "fail", text, f"write {words} for {name}, without quotation marks")


def _refused(flags: SglangFlags) -> Iterator[Finding]:
    for setting in REFUSED_SETTINGS:
        if setting.is_meant(flags.options.get(setting.option.removeprefix("--"))):
            yield Finding(_CHECK, "fail", setting.words, f"leave out {setting.option}")
    if flags.decode_context_ranks > 1:
        text = "--dcp-size: with decode context parallelism, SGLang takes no storage but file and mooncake"
        yield Finding(_CHECK, "fail", text, "leave out --dcp-size")


def check_model(model: str) -> Iterator[Finding]:
    """Whether a model has layers that were not tried with SGLang; nothing if its configuration is not here."""
    try:
        text = text_config(read_config(model))
    except (OSError, ValueError):
        return
    others = _other_layers(text) - {_SLIDING}
    fix = (
        "compare outputs with those of SGLang alone; if SGLang gives them a pool that is not served, it does not start"
    )
    if any(name in text for name in STATE_SPACE_FIELDS):
        yield Finding(_MODEL, "warn", "the model has layers with a state, which were not tried", fix)
    elif _INDEXER_FIELD in text:
        said = f"the model has sparse attention with an indexer ({_INDEXER_FIELD}), which was not tried"
        yield Finding(_MODEL, "warn", said, fix)
    elif others:
        words = ", ".join(sorted(others))
        said = f"the model has layers of other kinds than full attention ({words}), which were not tried"
        yield Finding(_MODEL, "warn", said, fix)


def check_namespaces(model: str, flags: SglangFlags, offered: OffloadInfo) -> Iterator[Finding]:
    """Whether every part of the model that a rank holds, and every pool of it, may have its namespace."""
    try:
        text = text_config(read_config(model)) if model else {}
    except (OSError, ValueError):
        text = {}
    count = _namespaces(text, flags)
    if count > offered.namespaces_max:
        said = f"SGLang takes {count} namespaces, for each part of the model and each of its pools"
        fix = f"set namespaces_max in the daemon's [offload] table to {count} or more"
        yield Finding("namespaces", "fail", f"{said}, the daemon takes {offered.namespaces_max}", fix)


def _namespaces(text: Mapping[str, Any], flags: SglangFlags) -> int:
    """How many namespaces the ranks have. With latent attention, those of a stage share all but their states."""
    ranks = flags.attention_ranks * flags.stages
    parts = flags.context_ranks * flags.stages if text.get(_LATENT_FIELD) else ranks
    has_windows, has_indexer = _SLIDING in (text.get("layer_types") or ()), _INDEXER_FIELD in text
    has_states = any(name in text for name in STATE_SPACE_FIELDS) or bool(_other_layers(text) - {_SLIDING})
    return parts * (1 + has_windows + has_indexer) + ranks * has_states


def _other_layers(text: Mapping[str, Any]) -> set[str]:
    """Kinds of layers beside those that attend to all tokens."""
    return set(text.get("layer_types") or ()) - {_FULL_ATTENTION}
