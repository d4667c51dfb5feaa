"""The cells of a sweep: composing, checking and naming them, and the sweep's record, sweep.json.

A cell's directory name ends in a hash. It covers every value that determines the cell's result, and every other swept
key. So the same command finds its cells again, a wider grid finds the cells that it shares with an earlier one, and a
command that fixes a key which was swept before finds the cell with that value.
"""

import copy
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, open_dict

from gptexp.config.branching import Parent, first_tokens
from gptexp.config.compose import job_of, take_choices, to_config
from gptexp.config.paths import config_flags
from gptexp.config.rules import confounds_of
from gptexp.config.schema import Config, fields_of, hashed, result_deciding
from gptexp.config.search_flags import FLAGS, PLAIN, PREFIX, SWEEPER, SWITCHES
from gptexp.config.spelling import as_typed
from gptexp.config.vocabulary import NAMES, with_vocab_size
from gptexp.data.epoch import count_epoch
from gptexp.data.prepare import count_ids, data_hash, prepare
from gptexp.distributed.ranks import launcher_world_size
from gptexp.process.errors import ConfigError, Problem, UserError
from gptexp.process.fields import AUTO
from gptexp.reporting.listings.records import AXES
from gptexp.storage import branch, run_dir, sweep_record
from gptexp.storage.continuation import check_same
from gptexp.storage.init_from import choose_vocab_size, with_step
from gptexp.storage.inventory import link_in_outputs
from gptexp.storage.removal import CELL
from gptexp.storage.sweep_record import PlannedCell, SweepRecord
from gptexp.sweep.space import swept_keys, with_arguments

PLUGINS = "hydra_plugins.gptexp"  # the module in which Hydra looks up gptexp's sweepers and launchers
TEXT_KEYS = ("path", "format", "subset", "split", "mix", "text_column", "encoding", "separator", "val_path")
HASH_CHARS = 8
READABLE_CHARS = 80  # largest length of a directory name, without the hash


@dataclass(frozen=True)
class Draft:
    """A combination of swept values, composed and checked."""

    compose: Callable[[], DictConfig]  # a composition has a hundred times the size of its values
    values: dict[str, str]  # swept key -> its value as typed
    config: Config | None  # None if the combination is illegal
    problems: list[Problem]

    @property
    def title(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items())


@dataclass(frozen=True)
class Cell:
    """One run of a sweep, and its directory, which may not exist yet."""

    compose: Callable[[], DictConfig]
    config: Config
    directory: Path  # absolute
    values: dict[str, str]

    def compose_named(self) -> DictConfig:
        """A new composition that has the cell's directory, for Hydra."""
        composition = self.compose()
        with open_dict(composition):
            composition.hydra.sweep.subdir = self.name
        return composition

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def world_size(self) -> int:
        return self.config.world.size or 1


class Compositions:
    """Composes cells as Hydra's `load_sweep_config` does, with one composition for all that differ only in single keys.

    Hydra takes a tenth of a second for each composition, because it reads every file again.
    """

    def __init__(self, loader: ConfigLoader, sweep: DictConfig) -> None:
        self.loader, self.sweep = loader, sweep
        self.parser = OverridesParser.create()
        self.shared: dict[tuple[str, ...], DictConfig] = {}  # overrides that are not values -> their composition
        self.passing: dict[tuple[str, ...], DictConfig] = {}  # the same with the keys of the values -> a copy

    def cell(self, overrides: Sequence[str], is_passing: bool = False) -> DictConfig:
        """The composition of a cell. Raises Hydra's errors for overrides that cannot be composed.

        A passing one may change with the next call, and takes a twentieth of the time.
        """
        parsed = dict(zip(overrides, self.parser.parse_overrides(list(overrides)), strict=True))
        others = tuple(text for text, override in parsed.items() if not _is_value(override))
        if others not in self.shared:
            self.shared[others] = self.loader.load_sweep_config(self.sweep, list(others))
        values = [override for override in parsed.values() if _is_value(override)]
        merges = any(isinstance(override.value(), dict) for override in values)  # with the mapping of an earlier cell
        if is_passing and not merges:
            keys = (*others, *(override.key_or_group for override in values))
            if keys not in self.passing:
                self.passing[keys] = copy.deepcopy(self.shared[others])
            composition = self.passing[keys]
        else:
            composition = copy.deepcopy(self.shared[others])
        ConfigLoaderImpl._apply_overrides_to_config(values, composition)
        task = {text: override for text, override in parsed.items() if not override.is_hydra_override()}
        composition.hydra.overrides.task = [*task]
        job = composition.hydra.job
        named = job.config.override_dirname
        job.override_dirname = get_overrides_dirname([*task.values()], named.exclude_keys, named.item_sep, named.kv_sep)
        return composition


def _is_value(override: Override) -> bool:
    """Whether an override sets a single key, and so decides nothing about which files are composed."""
    plain = override.type == OverrideType.CHANGE and override.package is None and not override.is_hydra_override()
    return plain and "." in override.key_or_group


def draft_cells(
    compositions: Compositions, combinations: Sequence[Sequence[str]], total: int, first: int = 0
) -> list[Draft]:
    """Compose and check each combination of overrides.

    `total` is the number of cells in the sweep, `first` the number of the first combination in it. Raises
    `ConfigError` if `combinations` is empty, or has a ramp and several batch sizes; an illegal combination is returned
    with its problems.
    """
    if not combinations:
        raise ConfigError("the sweep has no cells; give at least one value of each swept key", "no-cells")
    config = compositions.sweep

    def compose(
        overrides: Sequence[str], number: int, parent: Parent | None = None, is_passing: bool = False
    ) -> DictConfig:
        composition = compositions.cell(overrides, is_passing)
        with open_dict(composition):
            composition.hydra.job.id = f"{number}"
            composition.hydra.job.num = number
            composition.hydra.sweep.dir = config.hydra.sweep.dir
            composition.sweep.name = config.sweep.name
            composition.sweep.cells = total
        take_choices(composition, overrides, parent)
        return composition

    swept, drafts = swept_keys(config), []
    for number, overrides in enumerate(combinations, first):
        composition = compose(overrides, number, is_passing=True)
        pairs = (text.lstrip("+").partition("=") for text in as_typed(overrides))
        values = {key: value for key, _, value in pairs if key in swept}
        parent, checked, problems = None, None, list[Problem]()
        try:
            parent = branch.find(composition)
            checked = with_step(to_config(composition, overrides, launcher_world_size(), parent, count_epoch))
        except ConfigError as error:
            problems = error.problems
        drafts.append(Draft(partial(compose, overrides, number, parent), values, checked, problems))
    configs = [draft.config for draft in drafts if draft.config is not None]
    _refuse_ramp_over_batch_sizes(configs)
    _refuse_early_stops(configs)
    return drafts


def _refuse_early_stops(configs: Sequence[Config]) -> None:
    """Raise `ConfigError` if runs that are compared may stop early, at a length of their own."""
    compared = {(config.optim.lr, config.batch.total_batch_size) for config in configs}
    for key in ("stop_at_loss", "patience_tokens"):
        if len(compared) > 1 and any(getattr(config.train, key) is not None for config in configs):
            rule = "runs of different lengths do not show which learning rate or batch size is better"
            raise ConfigError(f"train.{key}: {rule}; leave it out of a sweep", "early-stop-in-sweep")


def _refuse_ramp_over_batch_sizes(configs: Sequence[Config]) -> None:
    """Raise `ConfigError` if a sweep compares batch sizes and one of its runs has a ramp, so no single batch size."""
    sizes = sorted({config.batch.total_batch_size for config in configs})
    ramp = next((config.batch.ramp_tokens for config in configs if config.batch.ramp_tokens is not None), None)
    if ramp is not None and len(sizes) > 1:
        raise ConfigError(
            f"batch.ramp_tokens={ramp}: a sweep over batch sizes (here batch.total_batch_size="
            f"{', '.join(map(str, sizes))}) needs runs with steps of one size; leave out the ramp, or sweep at one "
            "size",
            "ramp-over-batch-sizes",
        )


def settle(drafts: Sequence[Draft], directory: Path) -> list[Cell]:
    """Turn drafts into cells with directories below `directory`. Tokenises a corpus whose hash is not known yet.

    Drafts that spell the same values differently become one cell. Raises one `ConfigError` for all illegal drafts.
    """
    refuse_illegal(drafts)
    cells: dict[str, Cell] = {}
    names = CellNames(directory)
    for draft in drafts:
        assert draft.config is not None
        name = names.name(draft.config, draft.values)
        check_same(directory / name, draft.config)
        cell = Cell(draft.compose, draft.config, (directory / name).absolute(), draft.values)
        cells.setdefault(name, cell)
    return list(cells.values())


def refuse_illegal(drafts: Sequence[Draft]) -> None:
    """Raise `ConfigError` if any cell has problems: one line for each distinct problem."""
    titles: dict[Problem, list[str]] = {}  # problem -> the cells that have it
    for draft in drafts:
        for problem in draft.problems:
            titles.setdefault(problem, []).append(draft.title)
    if titles:
        raise ConfigError([_with_cells(problem, titles[problem], len(drafts)) for problem in titles])


def _with_cells(problem: Problem, titles: list[str], total: int) -> Problem:
    """Append the cells that have the problem to its line."""
    if len(titles) == total == 1:
        return problem
    more = f" and {len(titles) - 1} more" if len(titles) > 1 else ""
    which = f"all {total} cells" if len(titles) == total else f"cell {titles[0]}{more}"
    return Problem(problem.code, f"{problem} ({which})")


def cell_name(config: Config, swept: dict[str, str], directory: Path) -> str:
    """Return the name of a cell's directory: readable swept values, then the hash.

    Returns the existing name if a directory below `directory` already ends in this hash. The hash covers composed
    values, so 6e-4 and 0.0006 are one cell. In place of the paths of corpus and tokenizer it covers the hash of the
    tokens, and in place of `branch_from` the hash of the checkpoint.
    """
    return CellNames(directory).name(config, swept)


class CellNames:
    """Names the cells below `directory` as `cell_name` does, and looks at the directory and at each text once."""

    def __init__(self, directory: Path) -> None:
        names = sorted((path.name for path in directory.glob("*")), reverse=True)
        self._names = {name[-HASH_CHARS:]: name for name in names if CELL.fullmatch(name)}  # the first for each hash
        self._texts: dict[str, str] = {}  # section `data` of a config -> what identifies its tokens

    def name(self, config: Config, swept: dict[str, str]) -> str:
        config = _with_known_vocab_size(config)
        composed, deciding = {key: value for key, _, value in fields_of(config)}, result_deciding(config)
        # Groups and paths stay as typed: a composed group is no single value, and a composed path is absolute.
        as_typed = ("data.path", "data.val_path", "data.mix", "data.tokenizer")
        values = {key: text if key in as_typed else composed.get(key, text) for key, text in swept.items()}
        others = {key: value for key, value in values.items() if key not in deciding}
        if config.data.tokenizer not in NAMES:
            deciding["data.tokenizer"] = "a file"
        if (parent := branch.find(config)) is not None:
            deciding["branch_from"] = parent.identity
            for key in {"branch_from", "continue_from"} & values.keys():
                others.pop(key, None)
                values[key] = parent.short_name
        text = repr(config.data)
        if text not in self._texts:
            self._texts[text] = _data_identity(config)
        identity = {**hashed(deciding), "data": self._texts[text], "swept": others}
        serialised = json.dumps(identity, sort_keys=True, default=str)
        digest = hashlib.sha256(serialised.encode()).hexdigest()[:HASH_CHARS]
        if digest in self._names:
            return self._names[digest]
        last = {key: number for number, key in enumerate(AXES, 1)}  # so that all cells have the keys in one order
        ordered = sorted(values.items(), key=lambda item: (last.get(item[0], 0), item[0]))
        readable = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in ordered)
        name = f"{readable[:READABLE_CHARS]}-{digest}" if readable else digest
        return re.sub(r"[^A-Za-z0-9._=,-]", "_", name)


def _with_known_vocab_size(config: Config) -> Config:
    """Replace `auto` by the size of the vocabulary. It may depend on the corpus; `auto` stays if that is unreadable."""
    if config.model.vocab_size != AUTO:
        return config
    try:
        n_vocab = count_ids(config.data)
        if n_vocab is None:
            prepare(config.data)
            n_vocab = count_ids(config.data)
    except UserError:  # the cell's own run reports that error
        return config
    assert n_vocab is not None
    return with_vocab_size(config, choose_vocab_size(config, n_vocab)[0])


def _data_identity(config: Config) -> str:
    """Return the hash of the tokens, or the paths if the text cannot be read: the cell's own run reports that error."""
    try:
        return data_hash(config.data)
    except UserError:
        return f"{_text_as_given(config.data)}"


def _text_as_given(data: Any) -> list[Any]:
    """The keys that say which text is read, without reading it."""
    return [data[key] if isinstance(data, DictConfig) else getattr(data, key) for key in TEXT_KEYS]


def decisions(sweep: Path) -> list[dict[str, Any]]:
    """Return the resolved `auto` values of each cell in a sweep's directory that has any. Damaged files are skipped."""
    values = []
    for path in sorted(sweep.glob(f"*/{run_dir.EFFECTIVE}")):
        with suppress(ConfigError):  # the cell's own run reports it
            values.append(run_dir.read_json(path))
    return [auto_values for auto_values in values if auto_values]


def confounds(configs: Sequence[Config]) -> list[str]:
    """If batch sizes vary, return a line for each key that confounds their comparison, such as a length in steps."""
    if len({config.batch.total_batch_size for config in configs}) < 2:
        return []
    return sorted({line for config in configs for line in confounds_of(result_deciding(config))})


def record(directory: Path, config: DictConfig, cells: Sequence[Cell], to_choose: int) -> None:
    """Write sweep.json: `cells`, the cells that earlier commands started, and the overrides that all cells share.

    `to_choose` is the number of further cells that the sweeper has yet to choose.
    """
    run_dir.refuse_links(directory)
    link_in_outputs(directory, config.paths.outputs)
    earlier = sweep_record.load(directory)
    recorded = earlier.cells if earlier is not None else {}
    recorded = {name: cell for name, cell in recorded.items() if run_dir.is_run(directory / name)}
    for cell in cells:
        batch, (steps, _) = cell.config.batch, cell.config.run_length
        tokens, before = batch.step_sizes.tokens_after(steps), first_tokens(cell.config)
        recorded[cell.name] = PlannedCell(cell.values, batch.total_batch_size, tokens, before)
    newest = command(config)
    commands = [given for given in (earlier.commands if earlier is not None else []) if given != newest]
    directory.mkdir(parents=True, exist_ok=True)
    shared = fixed_arguments(config)
    objective = config.sweep.objective
    sweep_record.save(
        directory, SweepRecord(config.sweep.name, shared, to_choose, recorded, [*commands, newest], objective)
    )


def command(config: DictConfig) -> list[str]:
    """The arguments of gptexp that start or continue the sweep of `config`; of a search those of `gptexp tune`."""
    given = [text for text in config.hydra.overrides.hydra if text != "hydra.mode=MULTIRUN"]
    is_search = SWEEPER in given
    flags = {text: _as_flag(text) if is_search else [] for text in given}
    begin = ["tune", *itertools.chain(*flags.values())] if is_search else ["train", "-m"]
    others = [text for text in given if not flags[text] and not (is_search and text == SWEEPER)]
    return [*begin, *config_flags(config.hydra), *others, *as_typed(config.hydra.overrides.task)]


def _as_flag(override: str) -> list[str]:
    """The flag of `gptexp tune` for an override, with its value; empty if there is none."""
    flag, _, value = override.removeprefix(PREFIX).partition("=")
    if not override.startswith(PREFIX) or not PLAIN.fullmatch(value):  # quotes and blanks stay as typed
        return []
    if flag in SWITCHES and value == "true":
        return [f"--{flag}"]
    return [f"--{flag}", value] if flag in FLAGS and not value.startswith("-") else []


def fixed_arguments(config: DictConfig) -> list[str]:
    """Return the command-line arguments that all cells share: a command for further cells starts with them."""
    swept = {*swept_keys(config), "sweep.name", "hydra.mode"}
    given = [*as_typed(config.hydra.overrides.task), *config.hydra.overrides.hydra]
    keys = {text: text.lstrip("+~").partition("=")[0] for text in given}
    kept = [k for k in keys if keys[k] not in swept and not keys[k].startswith(("hydra/sweeper", "hydra.sweeper"))]
    return [*config_flags(config.hydra), *kept]


def _runs_branched_from(config: DictConfig) -> list[str]:
    """The runs that the values of a swept `branch_from` or `continue_from` name, without their steps."""
    merged = with_arguments(config.hydra.sweeper.get("params"), config.hydra.overrides.task)
    overrides = [part[key] for part in merged for key in ("branch_from", "continue_from") if key in part]
    values = [str(v) for o in overrides for v in (o.sweep_iterator() if o.is_sweep_override() else [o.value()])]
    return sorted({os.path.abspath(run_dir.run_and_checkpoint(value)[0]) for value in values})  # noqa: PTH100  Path.absolute keeps `..`


def name_sweep(config: DictConfig) -> None:
    """Set `sweep.name` if it is not given, so that the same grid, or a wider one, gets the same name again.

    The name is a hash of the swept keys without their values, and of the value of every other key that determines
    results. Raises `ConfigError` for a sweeper or launcher that is not gptexp's.
    """
    choices = config.hydra.runtime.choices
    for part in ("launcher", "sweeper"):
        if not config.hydra[part]._target_.startswith(f"{PLUGINS}."):
            raise ConfigError(f"hydra/{part}={choices[f'hydra/{part}']}: not supported; leave it out", "not-supported")
    if config.sweep.name is not None:
        return
    swept = sorted(swept_keys(config))
    if choices["hydra/sweeper"] == SWEEPER.partition("=")[2]:
        swept = sorted({*swept, "batch.total_batch_size"})  # a search goes on with other batch sizes
    deciding = hashed(result_deciding(job_of(config)))
    fixed = {key: value for key, value in deciding.items() if not {key, key.split(".")[0]} & {*swept}}
    if "model" in swept:
        fixed.pop("optim.lr", None)  # each model file sets its own
    for key in ("branch_from", "continue_from"):
        if key in swept or (key == "continue_from" and config[key] is not None):
            fixed[key] = _runs_branched_from(config)
    identity = json.dumps({**fixed, "swept": swept, "data": _text_as_given(config.data)}, default=str)
    with open_dict(config):
        config.sweep.name = f"sweep-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
