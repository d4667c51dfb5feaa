"""From overrides to a config: precedence, options of groups, the launcher's world size."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from sweeps import compose_sweep

from gptexp.command.hydra_main import register_from_init
from gptexp.config.compose import compose, composition, hydra_engine, is_multirun, is_sweep
from gptexp.config.overrides import as_value
from gptexp.config.paths import conf_dir, packaged_conf
from gptexp.config.schedule import resolve_schedule
from gptexp.config.schema import Config, ModelConfig, ScheduleConfig, WorldConfig, fields_of, result_deciding
from gptexp.config.spelling import MAY_BE_NULL, NULL, as_typed, canonical
from gptexp.process.errors import ConfigError
from gptexp.sweep.cells import cell_name


def test_a_length_on_the_command_line_takes_precedence_over_a_file() -> None:
    """schedule=gpt3 sets warmup_tokens, which takes precedence over a ratio. The command line overrides both."""
    long = ["schedule=gpt3", "batch=gpt3_3m", "model=gpt3_125m", "train.max_tokens=300_000_000_000"]
    assert compose(long).schedule.warmup_tokens == 375_000_000
    typed = compose([*long, "schedule.warmup_ratio=0.01"]).schedule
    assert (typed.warmup_tokens, typed.warmup_ratio, typed.decay_tokens) == (None, 0.01, 260_000_000_000)
    both = compose([*long, "schedule.warmup_ratio=0.01", "schedule.warmup_steps=50"]).schedule
    assert both.warmup_steps == 50


def test_the_launcher_sets_the_world_size_if_the_config_does_not() -> None:
    assert compose([]).world.size == 1
    assert compose(["model=nano"], launcher_world_size=4).world.size == 4
    assert compose(["model=nano", "world=ddp4"], launcher_world_size=4).world.size == 4


def test_a_wrong_world_size_is_reported_together_with_other_problems() -> None:
    with pytest.raises(ConfigError) as error:
        compose(["model=nano", "world=single", "optim.lr=1e-3", "model.n_head=3"], launcher_world_size=4)
    assert len(error.value.problems) == 2
    assert "the launcher started 4 ranks" in error.value.problems[0]
    assert "model.n_head=3" in error.value.problems[1]


def test_composing_reads_no_variable_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert compose([]).world.size == 1


@pytest.mark.parametrize(
    ("overrides", "lr"),
    [
        (["model=gpt2"], 6e-4),
        (["model=gpt2_medium"], 3e-4),
        (["model=gpt3_175b", "batch=gpt3_3m"], 0.6e-4),
        (["experiment=gpt2_124m", "data=stdlib"], 6e-4),
        (["model=gpt2", "optim.lr=1e-3"], 1e-3),
        (["optim.lr=1e-3", "model=gpt2"], 1e-3),
    ],
)
def test_the_command_line_overrides_the_learning_rate_of_a_model(overrides: list[str], lr: float) -> None:
    assert compose(overrides).optim.lr == lr


@pytest.mark.e2e
@pytest.mark.parametrize("text", ["1e6", "1.0E6", "1_000e3", "1000000.0", ".1e7", "+1e6"])
def test_a_whole_number_may_be_written_as_a_float(text: str, corpus: Path, tmp_path: Path) -> None:
    small = ["data=text", f"data.path={corpus}"]  # a cell's name contains the hash of the text, here not of all Python
    written, plain = (compose([*small, f"train.max_tokens={value}", "world.size=1"]) for value in (text, "1000000"))
    assert written.train.max_tokens == 1_000_000
    assert isinstance(written.train.max_tokens, int)
    assert written == plain
    assert cell_name(written, {}, tmp_path) == cell_name(plain, {}, tmp_path)
    assert compose([f"schedule.warmup_tokens={text}", "train.max_tokens=1e9"]).schedule.warmup_tokens == 1_000_000


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("value", "sizes"),
    [
        ("2e3,4e3", [2000, 4000]),
        ("choice(2e3,4000.0)", [2000, 4000]),
        ("range(2e3,6.1e3,2e3)", [2000, 4000, 6000]),
    ],
)
def test_a_sweep_of_whole_numbers_may_be_written_as_floats(value: str, sizes: list[int]) -> None:
    overrides = ["model.block_size=1e1", "batch.micro_batch_size=1e1", "data.val_tokens=1e2"]
    grid = compose_sweep(["hydra.mode=MULTIRUN", *overrides, f"++batch.total_batch_size={value}"])
    assert [d.config.batch.total_batch_size for d in grid.drafts if d.config] == sizes
    assert [d.values for d in grid.drafts] == [{"batch.total_batch_size": str(size)} for size in sizes]


@pytest.mark.e2e
@pytest.mark.parametrize(
    "text", ["7e10243", "2e55555", "2026_11_26", "1e3", "0x10", "1_0", "inf", "nan", "true", "007", ".5", "5.", "None"]
)
def test_a_key_with_text_takes_what_was_typed(text: str) -> None:
    """Hydra reads numbers: two names of sweeps, commits of git, became `inf`."""
    assert compose([f"log.note={text}", f"log.wandb.project={text}"]).log.wandb.project == text
    assert compose([f"log.note={text}"]).log.note == (None if text == "None" else text)
    assert compose([f"log.note='{text}'"]).log.note == text
    assert compose(["log.note=null"]).log.note is None


@pytest.mark.e2e
def test_a_group_without_a_file_may_be_null() -> None:
    """It wins over an experiment's choice of that group. Groups with a default file have no null."""
    defaults = yaml.safe_load((conf_dir() / "config.yaml").read_text())["defaults"]
    empty = {key for entry in defaults if isinstance(entry, dict) for key in entry if not entry[key]}
    assert {*MAY_BE_NULL} == {key for key in empty if "_keys@" not in key}
    nothing = compose([])
    for text in (NULL, "None"):
        assert compose([f"{group}={text}" for group in MAY_BE_NULL]) == nothing
    assert compose([f"~{group}" for group in MAY_BE_NULL]) == nothing
    assert compose(["batch=gpt2", "~batch", "model=nano"]) == compose(["batch=null", "model=nano"])
    chosen, without = (compose(["experiment=gpt3_125m", "data=stdlib", *more]) for more in ([], ["schedule=null"]))
    assert chosen.schedule != ScheduleConfig()
    assert without == replace(chosen, schedule=ScheduleConfig())
    assert not is_multirun(["sweep=null"])
    assert is_multirun(["sweep=lr"])
    grid = compose_sweep(["hydra.mode=MULTIRUN", "schedule=null,wsd"])
    assert [draft.values for draft in grid.drafts] == [{"schedule": NULL}, {"schedule": "wsd"}]
    assert next(draft.config for draft in grid.drafts if draft.config).schedule == nothing.schedule
    for group in ("log", "optim", "model"):
        with pytest.raises(ConfigError) as error:
            compose([f"{group}=null"])
        assert error.value.problems[0].code == "no-such-option"


@pytest.mark.parametrize(
    "typed",
    ["sweep.name=7e10243", "schedule=null", "schedule=null,wsd", "log.note=1,2e5,x", "optim.lr=1e-3", "log.note='a,1'",
     "data.path=['1','2','3']", "data.path='1'", "log.note='null'", "log.note=###", "log.note=a b", "~x"],
)  # fmt: skip
def test_a_command_that_is_printed_has_what_was_typed(typed: str) -> None:
    assert as_typed(canonical([typed])) == [typed]


def test_a_value_is_written_in_hydras_grammar() -> None:
    texts = ['${x} "q" \\ é', "\\", "a,b", "a b", "'", "null", "None", "Nan", "True", "7", "1e3", ".5", "x=1", "{a}",
             "a:b", "/a/b-c.txt", "muon", "gpt2_xl"]  # fmt: skip
    read = compose(["model=nano", f"log.tags={as_value(texts)}", f"log.note={as_value(texts[0])}"])
    assert (read.log.tags, read.log.note) == (texts, texts[0])
    assert list(map(as_value, texts[-3:])) == texts[-3:]  # as one would type them
    mix = {"/a b/(x).txt": 1.5, "/c:d=,{e}.txt": 2}
    for value in (mix, list(range(200)), True, None, 1e-3, "", "f(x)", *texts[1:]):
        found = OverridesParser.create().parse_override(f"x={as_value(value)}").value()
        assert (found.text if isinstance(found, QuotedString) else found) == value


@pytest.mark.parametrize("text", ["1e5 ", " 1e5", "###", "=====", "日本", "a;b&c", "<a> <b>"])
def test_a_text_needs_no_quotes_of_hydra(text: str) -> None:
    """As in Hydra, blanks around it are not part of it."""
    assert compose([f"log.note={text}"]).log.note == text.strip()


def test_values_of_a_sweep_over_texts_are_shown_as_typed() -> None:
    grid = compose_sweep(["hydra.mode=MULTIRUN", "log.note=1,2e5,x"])
    assert [draft.values for draft in grid.drafts] == [{"log.note": "1"}, {"log.note": "2e5"}, {"log.note": "x"}]
    assert compose(["log.note='x,None,y'"]).log.note == "x,None,y"


def test_null_may_be_written_as_python_and_wandb_do() -> None:
    config = compose(["optim.beta2_half_life_tokens=None", "log.wandb.entity=None", "train.max_steps=None"])
    assert (config.optim.beta2_half_life_tokens, config.log.wandb.entity, config.train.max_steps) == (None, None, None)


def test_how_text_is_read_may_be_set_for_a_validation_text_alone(corpus: Path) -> None:
    """A separator is given without quotes of Hydra's."""
    keys = {"text_column": "body", "encoding": "gbk", "separator": "<|endoftext|>"}
    config = compose([f"data.val_path={corpus}", *(f"data.{key}={value}" for key, value in keys.items())])
    assert config.data.name == "stdlib"
    assert {key: getattr(config.data, key) for key in keys} == keys


def test_two_plus_signs_set_an_existing_key() -> None:
    assert compose(["++optim.lr=2e-3"]).optim.lr == 2e-3
    typed = ["schedule=gpt3", "train.max_tokens=300e9", "++schedule.warmup_ratio=0.01"]
    assert compose(typed).schedule.warmup_tokens is None  # as without the plus signs


def test_the_model_of_init_from_takes_every_key_that_decides_the_weights() -> None:
    own = yaml.safe_load((packaged_conf() / "model/from_init.yaml").read_text())["model"]
    assert own == {f.name: f"${{from_init:{f.name},${{init_from}}}}" for f in fields(ModelConfig)
                   if f.name not in ("vocab_size", "dropout")}  # fmt: skip


def test_a_model_option_sets_only_the_model_and_the_learning_rate() -> None:
    """Also in place of the default, whose file sets a tokenizer, a batch, a schedule and a length of its own."""
    assert compose(["model=gpt2", "optim.lr=6e-4"]) == Config(world=WorldConfig(size=1))
    before, after = ({k: v for k, _, v in fields_of(compose([f"model={name}"]))} for name in ("gpt2", "nano"))
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"model.n_layer", "model.n_head", "model.n_embd", "model.block_size", "optim.lr"}


@pytest.mark.parametrize(
    ("override", "section", "wanted"),
    [
        ("batch=gpt2", "batch", {"total_batch_size": 524_288, "micro_batch_size": 16}),
        ("data=shakespeare_char", "data", {"name": "shakespeare", "tokenizer": "chars"}),
        ("data.tokenizer=gpt2", "data", {"tokenizer": "gpt2"}),
        ("train.max_tokens=4096000", "train", {"max_tokens": 4_096_000}),
    ],
)
def test_the_default_models_own_settings_can_be_replaced(
    override: str, section: str, wanted: dict[str, object]
) -> None:
    config = getattr(compose([override]), section)
    assert {key: getattr(config, key) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        (["model=nano", "batch.total_batch_size=1k"], 4),  # 4 sequences of 256
        (["model=nano", "batch.total_batch_size=12288"], 8),
        (["model=nano", "batch.total_batch_size=3072"], 6),
        (["model=nano", "batch.total_batch_size=1280"], 5),
        (["model=nano", "batch.total_batch_size=4k", "world.size=4"], 4),
        (["batch=gpt2", "model=nano", "batch.total_batch_size=2k"], 8),  # the file's is 16
        (["model=nano", "batch.total_batch_size=2k", "batch.micro_batch_size=4"], 4),
    ],
)
def test_a_step_on_the_command_line_reduces_the_micro_batch_of_a_file(overrides: list[str], size: int) -> None:
    assert compose(overrides).batch.micro_batch_size == size


def test_token_files_of_others_are_of_gpt2s_tokenizer(corpus: Path) -> None:
    """With the default model too, whose own tokenizer is bytes."""
    assert compose(["data=tokens", f"data.path={corpus}"]).data.tokenizer == "gpt2"


@pytest.mark.e2e
@pytest.mark.parametrize("name", sorted(path.stem for path in (conf_dir() / "schedule").iterdir()))
def test_a_schedule_is_the_same_with_every_model(name: str) -> None:
    """Also with the default model, whose file sets a shape, a warm-up and an end of its own."""
    long = [f"schedule={name}", "train.max_tokens=300e9"]
    ours, others = (resolve_schedule(compose([*long, f"model={model}"]), 10**9) for model in ("bytes", "gpt2"))
    for tokens in range(0, 10**9, 10**8):
        assert ours.lr_factor(tokens, 1024) == others.lr_factor(tokens, 1024)
    if name == "cosine":
        assert compose([*long, "model=bytes"]).schedule == ScheduleConfig()


def test_shakespeare_char_is_nanogpts() -> None:
    """config/train_shakespeare_char.py with the changes that nanoGPT's README gives for a CPU; dropout is 0 there."""
    config = compose(["experiment=shakespeare_char"])
    m, o, b, d = config.model, config.optim, config.batch, config.data
    assert (m.n_layer, m.n_head, m.n_embd, m.block_size, m.vocab_size) == (4, 4, 128, 64, 65)
    assert (m.bias, m.dropout) == (False, 0.0)
    assert (d.name, d.tokenizer, d.val_split, d.val_ratio) == ("shakespeare", "chars", "tail", 0.1)
    assert (o.lr, o.beta1, o.beta2, o.weight_decay, o.grad_clip) == (1e-3, 0.9, 0.99, 0.1, 1.0)
    assert (b.micro_batch_size, b.total_batch_size) == (12, 12 * 64)
    assert config.run_length == (2000, 2000 * 12 * 64)
    schedule = resolve_schedule(config, config.run_length[1])
    assert schedule.warmup_tokens == 100 * 12 * 64
    assert schedule.lr_factor(2000 * 12 * 64, 12 * 64) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("overrides", "n_layer"),
    [
        (["sweep=lr"], 2),
        (["sweep=lr", "model=gpt2"], 12),
        (["sweep=seeds", "experiment=tutorial"], 1),
        (["sweep=seeds", "experiment=gpt3_125m", "data.path=x"], 12),
    ],
)
def test_a_named_grid_is_for_nano_unless_a_recipe_or_the_command_line_chooses(
    overrides: list[str], n_layer: int
) -> None:
    with hydra_engine() as engine:
        assert composition(engine, overrides, None, multirun=True).model.n_layer == n_layer


# Each option file of the groups under conf/. A sweep file is left out, because it describes several runs. The default
# tier has one option of each group.
GROUPS = {
    path.name: [f"{path.name}={file.stem}" for file in sorted(path.glob("*.yaml"))]
    for path in sorted(packaged_conf().iterdir())
    if path.is_dir() and path.name not in ("base", "hydra", "sweep")
}
CHOICES = [
    pytest.param(choice, marks=pytest.mark.e2e if number else ())
    for choices in GROUPS.values()
    for number, choice in enumerate(choices)
]


def a_model(folder: Path) -> Path:
    """A directory with the sizes of a model, as transformers saves it."""
    (folder / "config.json").write_text('{"model_type": "gpt2", "n_layer": 3}')
    return folder


def needs(choice: str, corpus: Path) -> list[str]:
    """The overrides that an option needs in order to compose: text, a length or a smaller micro-batch."""
    group, _, name = choice.partition("=")
    reads_text = name in ("text", "tokens") or choice.startswith("experiment=gpt")
    extra = [f"data.path={corpus}"] if reads_text else []
    if name == "hf":
        extra = ["data.path=owner/name"]
    if group == "world" and name.startswith("ddp"):
        extra += ["batch.total_batch_size=8192", "batch.micro_batch_size=1"]
    if group == "batch":
        extra += ["train.max_tokens=1_000_000_000"]
    if name in ("from_init", "finetune_gpt2"):
        extra = [f"init_from={a_model(corpus.parent)}"]
    if name in ("gpt3", "gpt3_125m"):
        extra += ["train.max_tokens=300_000_000_000"]
    if group == "model" and name.startswith("gpt"):
        extra += ["batch=gpt3_3m", "train.max_tokens=1_000_000_000"]
    if name in ("llama_1b", "qwen3_0.6b", "smollm2_135m", "olmo2_190m", "nanochat_d12"):  # their contexts are long
        extra += ["batch.micro_batch_size=1"]
    if name == "gpt2_124m":
        extra += ["world=ddp8"]
    return extra


def test_the_groups_and_their_options_are_found() -> None:
    assert len(CHOICES) > 35
    assert {"model", "optim", "schedule", "batch", "world", "data", "log", "experiment"} <= GROUPS.keys()


@pytest.mark.parametrize("choice", CHOICES)
def test_every_option_of_every_group_composes(choice: str, corpus: Path) -> None:
    register_from_init()
    assert isinstance(compose([choice, *needs(choice, corpus)]), Config)


def test_gpt2_composes_for_eight_ranks() -> None:
    config = compose(["model=gpt2", "optim.lr=6e-4", "world=ddp8", "batch=gpt2", "train.max_tokens=10_000_000_000"])
    assert (config.world.size, config.optim.lr, config.batch.total_batch_size) == (8, 6e-4, 524_288)


@pytest.mark.parametrize(("mode", "sweep"), [("RUN", False), ("MULTIRUN", True)])
def test_hydra_mode_alone_selects_a_run_or_a_sweep(mode: str, sweep: bool) -> None:
    overrides = [f"hydra.mode={mode}"]
    with hydra_engine() as engine:
        assert is_sweep(composition(engine, overrides, None, is_multirun(overrides))) is sweep


def test_keys_of_the_users_own_are_free_and_decide_nothing() -> None:
    config = compose(["user.team=red", "+user.number=3", "user.nested={a: [1, 2]}"])
    assert config.user == {"team": "red", "number": 3, "nested": {"a": [1, 2]}}
    assert result_deciding(config) == result_deciding(compose([]))
    assert compose(["user={a: 1}"]).user == {"a": 1}
    grid = compose_sweep(["hydra.mode=MULTIRUN", "user.team=red,blue"])
    assert [draft.config.user for draft in grid.drafts if draft.config] == [{"team": "red"}, {"team": "blue"}]
    assert [draft.values for draft in grid.drafts] == [{"user.team": "red"}, {"user.team": "blue"}]
    with pytest.raises(ConfigError) as error:
        compose(["user.team=red,blue"])
    assert error.value.code == "needs-multirun"


@pytest.mark.parametrize("name", ["project", "id", "nothing"])
def test_wandb_init_takes_only_what_gptexp_does_not_set(name: str) -> None:
    assert compose(["log.wandb.init={save_code: true}"]).log.wandb.init == {"save_code": True}
    with pytest.raises(ConfigError) as error:
        compose([f"log.wandb.init={{{name}: x}}"])
    assert error.value.code == "not-for-wandb"
