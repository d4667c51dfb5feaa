"""`gptexp evaluate --tasks`: HellaSwag against transformers' own loss, and the tasks of lm_eval."""

import hashlib
import json
import random
import shutil
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import BLOCKS
from conftest import e2e_then_slow, events, summary, wait_for

import gptexp as package
from gptexp.config.transformers_json import read_config_json
from gptexp.data.characters import ByteTokenizer
from gptexp.data.downloads import downloaded
from gptexp.data.hellaswag import VALIDATION, Example, read_examples
from gptexp.data.tokenizer_json import gpt2_vocabulary, transformers_files
from gptexp.distributed.ranks import Rank
from gptexp.model.gpt import GPT
from gptexp.process.errors import DataError
from gptexp.training import hellaswag
from gptexp.training.hellaswag import score

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

BLOCK = 48
CPU = torch.device("cpu")


def theirs() -> Any:
    """A GPT-2 of transformers whose weights are far from zero, so that its losses differ."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_positions=BLOCK, n_layer=2, n_head=4, n_embd=32, vocab_size=257)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.2)
    return model


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers saves, with the tokenizer of bytes. All tests share it: read it, never write to it."""
    directory = tmp_path_factory.mktemp("tasks") / "model"
    theirs().save_pretrained(directory)
    for name, content in transformers_files(ByteTokenizer(), BLOCK).items():
        (directory / name).write_text(content)
    return directory


@pytest.fixture(scope="session")
def twenty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty examples in HellaSwag's format; of a few, the text is longer than the model's context."""
    draw, words = random.Random(1), ["she", "puts", "on", "the", "red", "hat", "and", "sits", "down", "in", "a", "room"]
    path = tmp_path_factory.mktemp("hellaswag") / "twenty.jsonl"
    lines = []
    for number in range(20):
        context = " ".join(draw.choices(words, k=draw.randint(1, 9)))
        endings = [" ".join(draw.choices(words, k=draw.randint(1, 6))) for _ in range(4)]
        lines.append(json.dumps({"ind": number, "ctx": context, "endings": endings, "label": draw.randrange(4)}))
    path.write_text("\n".join(lines) + "\n")
    return path


def by_transformers(path: Path) -> tuple[float, float, float]:
    """acc, acc_norm and the share of cut examples, one ending at a time, by the loss that the model itself returns."""
    model, right, right_norm, cut = theirs(), 0, 0, 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for example in lines:
        sums, means, was_cut = [], [], False
        for ending in example["endings"]:
            context, added = list(example["ctx"].encode()), list(f" {ending}".encode())
            ids = torch.tensor([[*context, *added]])
            labels = torch.tensor([[*(-100 for _ in context), *added]])
            was_cut |= ids.shape[1] > BLOCK + 1
            ids, labels = ids[:, -BLOCK - 1 :], labels[:, -BLOCK - 1 :]
            with torch.no_grad():
                logits = model(ids[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits[0], labels[0, 1:], reduction="sum")
            sums.append(float(loss))
            means.append(float(loss) / len(added))
        right += sums.index(min(sums)) == example["label"]
        right_norm += means.index(min(means)) == example["label"]
        cut += was_cut
    return right / len(lines), right_norm / len(lines), cut / len(lines)


def test_twenty_examples_are_scored_as_transformers_scores_them(saved: Path, twenty: Path, gptexp: Gptexp) -> None:
    done = gptexp("evaluate", str(saved), "--tasks", "hellaswag", "--hellaswag", str(twenty))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["hellaswag"]
    acc, acc_norm, cut = by_transformers(twenty)
    assert (found["acc"], found["acc_norm"], found["cut"]) == pytest.approx((acc, acc_norm, cut))
    assert found["examples"] == 20
    assert 0 < cut < 1
    assert acc != acc_norm, "the examples tell the two scores apart"


def test_the_scores_depend_neither_on_the_batches_nor_on_the_ranks(
    twenty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    model = GPT(read_config_json({"n_positions": BLOCK, "n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 257}))
    examples = read_examples(twenty, ByteTokenizer())
    whole = score(model, examples, Rank(), CPU, nullcontext)
    assert model.training
    monkeypatch.setattr(hellaswag, "BATCH_TOKENS", 1)
    assert score(model, examples, Rank(), CPU, nullcontext) == whole
    parts = [score(model, examples, Rank(rank, 3), CPU, nullcontext) for rank in range(3)]
    for name in whole:
        assert sum(part[name] for part in parts) == pytest.approx(whole[name])


def test_a_right_ending_is_one_that_the_model_expects() -> None:
    """A model that repeats the last token: the ending that does so is its answer."""

    class Repeats(GPT):
        def hidden(self, x: torch.Tensor, _: Any = None) -> torch.Tensor:
            return torch.nn.functional.one_hot(x, 257).float() * 9

    model = Repeats(read_config_json({"n_positions": 8, "n_layer": 1, "n_head": 1, "n_embd": 257, "vocab_size": 257}))
    torch.nn.init.eye_(model.lm_head.weight)
    examples = [Example([7], [[7, 7, 7], [7, 8, 7], [9]], 0), Example([7], [[9, 9], [7]], 1)]
    found = score(model, examples, Rank(), CPU, nullcontext)
    assert (found["hellaswag/acc"], found["hellaswag/acc_norm"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"ctx": "a", "endings": ["b", "c"]}', '{"ctx": "a", "endings": ["b", "c"], "label": 2}',
     '{"ctx": "", "endings": ["b", "c"], "label": 0}', '{"ctx": "a", "endings": [1, 2], "label": 0}',
     '{"ctx": "a", "endings": ["b"], "label": 0}', '{"ctx": "a", "endings": "xyz", "label": 0}',
     '{"ctx": "a", "endings": ["b", ""], "label": 0}', '{"ctx": "a", "endings": ["b", "c"], "label": true}',
     '{"ctx": "a", "endings": ["b", "c"], "label": -1}', "[" * 100_000],
)  # fmt: skip
def test_a_damaged_example_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"ctx": "a", "endings": ["b", "c"], "label": 1}\n' + line + "\n")
    with pytest.raises(DataError, match=r"some.jsonl:2: no example of HellaSwag"):
        read_examples(file, ByteTokenizer())


def test_a_string_may_hold_other_line_ends(tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text('{"ctx": "a\u2028b\x85", "endings": ["b", "c"], "label": 1}\n')
    [example] = read_examples(tmp_path / "some.jsonl", ByteTokenizer())
    assert bytes(example.context).decode() == "a\u2028b\x85"


@pytest.mark.e2e
def test_a_character_without_an_id_is_refused_for_a_run_and_for_its_export(
    gptexp: Gptexp, tiny: list[str], twenty: Path, tmp_path: Path
) -> None:
    assert gptexp("train", *tiny, "data.tokenizer=chars", "hydra.run.dir=run").returncode == 0
    assert gptexp("export", "run", "out").returncode == 0
    for directory in ("run", "out"):
        refused = gptexp("evaluate", directory, "--tasks", "hellaswag", "--hellaswag", str(twenty))
        assert refused.returncode == 3
        assert refused.stderr.startswith(f"gptexp: {twenty}:1: character 'p': not among the 24 characters of the voc")


def test_a_directory_without_its_tokenizer_is_refused(saved: Path, gptexp: Gptexp, tmp_path: Path) -> None:
    """transformers would make an empty one, and every score would be perfect."""
    shutil.copytree(saved, tmp_path / "bare")
    (tmp_path / "bare/tokenizer.json").unlink()
    refused = gptexp("evaluate", "bare", "--tasks", "lambada_openai")
    assert refused.returncode == 2
    assert refused.stderr.startswith(
        "gptexp: config error: bare: has no tokenizer.json, and no vocab.json of GPT-2; give a directory in which"
    )
    (tmp_path / "bare/vocab.json").write_text("{}")
    assert gptexp("evaluate", "bare", "--tasks", "hellaswag").stderr == refused.stderr


def test_a_tokenizer_with_more_ids_than_the_weights_is_refused(saved: Path, gptexp: Gptexp, tmp_path: Path) -> None:
    """GPT-2's vocab.json counts as such also if another program has written it."""
    shutil.copytree(saved, tmp_path / "copy")
    vocabulary = dict(reversed(gpt2_vocabulary().items()))
    (tmp_path / "copy/vocab.json").write_text(json.dumps(vocabulary, indent=3))
    refused = gptexp("evaluate", "copy", "--tasks", "hellaswag")
    assert refused.returncode == 2
    assert "copy: its tokenizer has 50,257 ids, and its weights are for 257; give a directory" in refused.stderr


def test_a_directory_comes_before_a_model_of_the_hub(saved: Path, gptexp: Gptexp, twenty: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "gpt2")
    done = gptexp("evaluate", "gpt2", "--tasks", " hellaswag ", "--hellaswag", str(twenty))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["hellaswag"]["examples"] == 20


@pytest.mark.parametrize(
    ("argv", "code", "line"),
    [
        (["--tasks", ","], 2, "--tasks: names no task"),
        (["--tasks", "hellaswag", "--limit", "0"], 2, "--limit=0: must be 1 or above"),
        (["--tasks", "hellaswag", "--val-tokens", "5"], 2, "--val-tokens=5: only the validation loss reads it"),
        (["--limit", "5"], 2, "--limit=5: only --tasks reads it"),
        (["--tasks", "x", "--include", "nowhere"], 2, "--include=nowhere: no such folder"),
        (["--tasks", "hellaswag", "--hellaswag", "nowhere"], 3, "nowhere: cannot be read"),
        (["--tasks", "x", "--hellaswag", "nowhere"], 2, "--hellaswag=nowhere: only --tasks hellaswag reads it"),
    ],
)
def test_wrong_arguments_are_one_line(saved: Path, gptexp: Gptexp, argv: list[str], code: int, line: str) -> None:
    refused = gptexp("evaluate", str(saved), *argv)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (code, 1), refused.stderr
    assert line in refused.stderr


def test_the_published_file_is_checked_by_its_hash(saved: Path, gptexp: Gptexp, tmp_path: Path) -> None:
    (tmp_path / "cache/downloads").mkdir(parents=True)
    (tmp_path / "cache/downloads" / VALIDATION.name).write_text("{}\n")
    env = {"GPTEXP_CACHE": str(tmp_path / "cache")}
    refused = gptexp("evaluate", str(saved), "--tasks", "hellaswag", env=env)
    assert refused.returncode == 3
    assert "hellaswag_val.jsonl: not HellaSwag's validation part (sha256 differs); delete it" in refused.stderr


def test_a_body_that_was_cut_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "served").write_bytes(b"half")
    file = replace(VALIDATION, url=(tmp_path / "served").as_uri(), sha256=hashlib.sha256(b"whole").hexdigest())
    with pytest.raises(DataError, match=r"served: 4 bytes came, which are not HellaSwag's validation part"):
        downloaded(file, tmp_path / "downloads")
    assert not (tmp_path / "downloads" / file.name).exists()
    (tmp_path / "served").write_bytes(b"whole")
    path = downloaded(file, tmp_path / "downloads")
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match=r"hellaswag_val.jsonl: Is a directory; put HellaSwag's validation part there"):
        downloaded(file, tmp_path / "downloads")


@pytest.mark.e2e
def test_a_run_scores_itself_at_its_cadence_and_at_its_end(
    start: Start, gptexp: Gptexp, tiny: list[str], twenty: Path, sabotage: Callable[[str, str], dict[str, str]],
    tmp_path: Path,
) -> None:  # fmt: skip
    """On two ranks, each with half of the examples. `gptexp evaluate` finds the same at the end."""
    mine = f"""
    import dataclasses
    m.VALIDATION = dataclasses.replace(
        m.VALIDATION, url={twenty.as_uri()!r}, sha256={hashlib.sha256(twenty.read_bytes()).hexdigest()!r}
    )
    """
    wanted = ["train.eval_tasks=[hellaswag]", "train.eval_tasks_every_tokens=256", "train.eval_every_tokens=0"]
    run = [*tiny, *wanted, "optim.lr=1e-1", "data.tokenizer=bytes", "world.size=2", "hydra.run.dir=run"]
    training = start("train", *run, f"data.cache_dir={tmp_path / 'cache'}", env=sabotage("gptexp.data.hellaswag", mine))
    _, err = training.communicate(timeout=120)
    assert training.returncode == 0, err
    found = events(tmp_path / "run", "eval")
    assert [event["tokens"] for event in found] == [256, 512]
    done = gptexp("evaluate", "run", "--tasks", "hellaswag", "--hellaswag", str(twenty))
    after = json.loads(done.stdout)["hellaswag"]
    assert {name: found[-1][f"hellaswag/{name}"] for name in ("acc", "acc_norm", "cut")} == {
        name: after[name] for name in ("acc", "acc_norm", "cut")
    }


def write_tasks(folder: Path, text: str) -> None:
    """A task of lm_eval, `my_text`: bits per byte on `text`. A tag of it alone, and a group with a `hellaswag` too."""
    folder.mkdir()
    (folder / "text.jsonl").write_text(json.dumps({"text": text}))
    (folder / "group.yaml").write_text("group: my_group\ntask: [my_text, hellaswag]\n")
    for name, tag in (("my_text", "my_tag"), ("hellaswag", "other_tag")):
        content = f"""
        task: {name}
        tag: [{tag}]
        dataset_path: json
        dataset_kwargs: {{data_files: {{test: {folder / "text.jsonl"}}}}}
        output_type: loglikelihood_rolling
        test_split: test
        doc_to_text: ""
        doc_to_target: "{{{{text}}}}"
        metric_list: [{{metric: bits_per_byte}}]
        """
        (folder / f"{name}.yaml").write_text(textwrap.dedent(content))


@pytest.mark.e2e
@pytest.mark.parametrize("block", [[], BLOCKS["qwen3"]])
def test_lm_eval_finds_the_loss_that_evaluate_finds(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, block: list[str]
) -> None:
    """Of a text of whole windows. `evaluate` also has a window before it, at whose end the text begins.

    lm_eval reads the exported model with transformers, `evaluate` the run with gptexp.
    """
    pytest.importorskip("lm_eval", reason="no lm_eval; pip install 'gptexp[eval]'")
    # Padding has probability until a model is trained.
    unpadded = ["model.vocab_size=257", "optim.lr=1e-2", *block]
    assert gptexp("train", *tiny, "data.tokenizer=bytes", *unpadded, "hydra.run.dir=run").returncode == 0
    before, text = "0123456789abcdef", "Nobody sees bread. My friend likes fish."[:32]  # 16 tokens are a window
    rows = [json.dumps({"text": row}) for row in (before, text)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    write_tasks(tmp_path / "mine", text)
    # A tag and a group give the figures of their tasks.
    done = gptexp("evaluate", "run", "--tasks", "my_tag", "--include", "mine", env={"HF_HOME": str(tmp_path / "home")})
    assert (done.returncode, done.stderr) == (0, "")
    again = gptexp(
        "evaluate", "run", "--tasks", "my_group", "--include", "mine", env={"HF_HOME": str(tmp_path / "home")}
    )
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["my_text"] == json.loads(done.stdout)["my_text"]
    assert "lm_eval/hellaswag" in json.loads(again.stdout), "not the name of the score in llm.c's style"
    assert "hellaswag" not in json.loads(again.stdout)
    nats = json.loads(done.stdout)["my_text"]["bits_per_byte"] * torch.log(torch.tensor(2.0)).item() * len(text)

    whole = json.loads(gptexp("evaluate", "run", "--data", "rows.jsonl", "--val-tokens", "48").stdout)
    model, tokenizer, _ = package.load_run(tmp_path / "run")
    first = torch.tensor([[*tokenizer.encode_ordinary(before), tokenizer.eot_token]])
    with torch.no_grad():
        of_before = float(model(first[:, :-1], first[:, 1:])) * 16
    assert whole["tokens"] == 48
    assert whole["val/loss"] * 48 - of_before == pytest.approx(nats, rel=1e-4)


@pytest.mark.e2e
def test_a_task_that_fails_costs_the_others_nothing(saved: Path, gptexp: Gptexp, tmp_path: Path) -> None:
    """Here an answer that is longer than the model's context. Its length and the context are named."""
    pytest.importorskip("lm_eval", reason="no lm_eval; pip install 'gptexp[eval]'")
    (tmp_path / "mine").mkdir()
    for name, long in (("short", "no"), ("long", "n" * (BLOCK + 1))):
        row = {"question": "is it?", "answers": ["yes", long], "label": 0}
        (tmp_path / f"mine/{name}.jsonl").write_text(json.dumps(row) + "\n")
        (tmp_path / f"mine/{name}.yaml").write_text(
            textwrap.dedent(f"""
                task: {name}
                dataset_path: json
                dataset_kwargs: {{data_files: {{test: {tmp_path}/mine/{name}.jsonl}}}}
                test_split: test
                output_type: multiple_choice
                doc_to_text: "{{{{question}}}}"
                doc_to_choice: "{{{{answers}}}}"
                doc_to_target: label
                metric_list: [{{metric: acc}}]
                """)
        )
    done = gptexp(
        "evaluate", str(saved), "--tasks", "short,long", "--include", "mine", env={"HF_HOME": str(tmp_path / "home")}
    )
    assert done.returncode == 3
    assert json.loads(done.stdout)["short"]["acc"] in (0.0, 1.0)
    assert "long" not in json.loads(done.stdout)
    [line] = done.stderr.splitlines()
    assert f"--tasks long: an answer has {BLOCK + 2} tokens, and model.block_size is {BLOCK}" in line


@pytest.mark.slow
def test_a_task_whose_data_cannot_be_had_is_one_line(saved: Path, gptexp: Gptexp, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="no lm_eval; pip install 'gptexp[eval]'")
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    refused = gptexp("evaluate", str(saved), "--tasks", "lambada_openai", env=nobody)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (3, 1), refused.stderr
    assert refused.stderr.startswith("gptexp: --tasks lambada_openai: lm_eval failed (")
    assert "without a network it needs the data sets" in refused.stderr


@pytest.mark.slow
def test_an_unknown_task_is_refused(saved: Path, gptexp: Gptexp) -> None:
    pytest.importorskip("lm_eval", reason="no lm_eval; pip install 'gptexp[eval]'")
    refused = gptexp("evaluate", str(saved), "--tasks", "no_such_task")
    assert (refused.returncode, "lm_eval has no such task" in refused.stderr) == (2, True)


@pytest.fixture
def my_text(tmp_path: Path, sabotage: Callable[[str, str], dict[str, str]]) -> Callable[[str], dict[str, str]]:
    """An environment in which lm_eval has the task `my_text`, and in which the process that scores runs some code."""
    pytest.importorskip("lm_eval", reason="no lm_eval; pip install 'gptexp[eval]'")
    write_tasks(tmp_path / "mine", "Nobody sees bread.")

    def environment(code: str = "") -> dict[str, str]:
        (tmp_path / "first.py").write_text(textwrap.dedent(code))
        mine = f"""
        import sys
        class WithMine(m.TaskManager):
            def __init__(self, include_path):
                super().__init__(include_path={str(tmp_path / "mine")!r})
        m.TaskManager = WithMine
        if len(sys.argv) == 4:
            exec(open({str(tmp_path / "first.py")!r}).read())
        """
        return {**sabotage("lm_eval.tasks", mine), "HF_HOME": str(tmp_path / "home")}

    return environment


def problems(stderr: str) -> list[str]:
    """The lines of stderr, without that of a corpus that no other test has tokenised."""
    return [line for line in stderr.splitlines() if not line.startswith("tokenised ")]


SCORES = ["data.tokenizer=bytes", "train.eval_tasks=[my_text]", "hydra.run.dir=run"]


@pytest.mark.slow
def test_two_ranks_score_tasks_of_lm_eval_and_train_as_without_them(
    start: Start, gptexp: Gptexp, tiny: list[str], my_text: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    """The last scores are those that `evaluate` finds. With dropout, the model must stay in training mode."""
    both = [*tiny, "data.tokenizer=bytes", "world.size=2", "optim.lr=1e-2", "model.dropout=0.1"]
    wanted = ["train.eval_tasks=[my_text]", "train.eval_tasks_every_tokens=256", "train.eval_every_tokens=0"]
    scoring = start("train", *both, *wanted, "hydra.run.dir=run", env=my_text("import time; time.sleep(3)"))
    _, err = scoring.communicate(timeout=240)
    assert (scoring.returncode, problems(err)) == (0, [])
    found = events(tmp_path / "run", "eval")
    assert [event["tokens"] for event in found] == [256, 512]
    first, last = (event["my_text/bits_per_byte"] for event in found)
    assert first != last
    env = {"HF_HOME": str(tmp_path / "home")}
    done = gptexp("evaluate", "run", "--tasks", "my_text", "--include", "mine", env=env)
    assert json.loads(done.stdout)["my_text"]["bits_per_byte"] == pytest.approx(last)

    assert gptexp("train", *both, "hydra.run.dir=bare").returncode == 0
    weights = [tmp_path / name / "checkpoints/step-00000004/model.safetensors" for name in ("run", "bare")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    kept = ("tokens", "train/loss", "optim/grad_norm", "data/fingerprint")
    steps = [[[event[name] for name in kept] for event in events(tmp_path / run, "step")] for run in ("run", "bare")]
    assert steps[0] == steps[1]
    assert summary(tmp_path / "run")["train_s"] < 3, "the time of scoring is not that of training"


@pytest.mark.parametrize(
    ("code", "line"),
    [
        pytest.param(
            "raise RuntimeError('no luck')",
            "train.eval_tasks=my_text: lm_eval failed (RuntimeError: no luck)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import os; os.kill(os.getpid(), 9)",
            "train.eval_tasks=my_text: lm_eval was killed by SIGKILL",
            marks=pytest.mark.e2e,
        ),
        pytest.param(
            "print('x'); raise SystemExit(0)",
            "train.eval_tasks: JSONDecodeError: Expecting value",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import os; os.remove(sys.argv[2] + '/config.json')",
            "train.eval_tasks=my_text: lm_eval failed (",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            """
            import atexit, os
            atexit.register(lambda: print("a package warns at exit", file=sys.stderr))
            os.remove(sys.argv[2] + "/config.json")
            """,
            "train.eval_tasks=my_text: lm_eval failed (ValueError: Unrecognized model",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["raises", "killed", "says nonsense", "no data", "warns after its error"],
)
def test_a_failure_of_lm_eval_is_a_line_and_training_goes_on(
    gptexp: Gptexp, tiny: list[str], my_text: Callable[[str], dict[str, str]], code: str, line: str, tmp_path: Path
) -> None:
    done = gptexp("train", *tiny, *SCORES, env=my_text(code))
    assert done.returncode == 0
    [problem] = problems(done.stderr)
    assert problem.startswith(f"gptexp: {line}")
    assert problem.endswith("; training continues")
    [final] = events(tmp_path / "run", "eval")[-1:]
    assert "val/loss" in final
    assert not any(name.startswith("my_text") for name in final)
    assert summary(tmp_path / "run")["status"] == "completed"


@pytest.mark.e2e
def test_a_model_whose_validation_loss_is_not_finite_is_not_scored(
    start: Start, tiny: list[str], sabotage: Callable[[str, str], dict[str, str]], tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval", reason="no lm_eval; pip install 'gptexp[eval]'")
    nan = sabotage("gptexp.run.evaluations", "m.validation_loss = lambda *_: float('nan')")
    wanted = ["data.tokenizer=bytes", "train.eval_tasks=[lambada_openai]", "train.eval_every=0", "hydra.run.dir=run"]
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    training = start("train", *tiny, *wanted, env={**nan, **nobody})
    _, err = training.communicate(timeout=240)
    assert training.returncode == 5, err
    assert "validation loss nan: the run diverged" in err
    assert "lm_eval" not in err


@pytest.mark.parametrize("number", e2e_then_slow([signal.SIGTERM, signal.SIGKILL]))
def test_a_run_that_is_stopped_while_it_scores_leaves_no_process(
    start: Start, tiny: list[str], my_text: Callable[[str], dict[str, str]], number: signal.Signals, tmp_path: Path
) -> None:
    """After SIGTERM it saves a checkpoint at once."""
    hangs = f"import os, time; open({str(tmp_path / 'process')!r}, 'x').write(str(os.getpid())); time.sleep(600)"
    cadence = ["train.eval_tasks_every_tokens=256", "train.save_every=100", f"hydra.run.dir={tmp_path / 'run'}"]
    run = start("train", *tiny, *SCORES[:2], *cadence, env={**my_text(hangs), "TMPDIR": str(tmp_path)})
    process = tmp_path / "process"
    wait_for(lambda: process.is_file() and process.read_text(), run)
    [exported] = tmp_path.glob("gptexp-*")
    assert (exported / "model.safetensors").is_file()
    run.send_signal(number)
    _, err = run.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{process.read_text()}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if number == signal.SIGTERM:
        assert run.returncode == 143
        assert "train.eval_tasks=my_text: not scored, because the run stops" in err
        assert not exported.exists()
        assert (tmp_path / "run/checkpoints").is_dir()


@pytest.mark.e2e
def test_tasks_that_cannot_be_scored_are_refused_before_anything_is_made(
    gptexp: Gptexp, tiny: list[str], sabotage: Callable[[str, str], dict[str, str]], tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval", reason="no lm_eval; pip install 'gptexp[eval]'")
    unknown = [
        *tiny,
        "train.eval_tasks=[hellaswag,wikitext,no_such_task]",
        "hydra.sweep.dir=sweep",
        "hydra.run.dir=run",
    ]
    for argv in (unknown, ["-m", *unknown, "optim.lr=1e-3,1e-4"]):
        refused = gptexp("train", *argv)
        assert refused.returncode == 2
        [line] = problems(refused.stderr)
        assert line.startswith("gptexp: config error: train.eval_tasks=no_such_task: lm_eval has no such task; ")
    gone = sabotage("gptexp.process.errors", "import sys; sys.modules['lm_eval'] = None")
    refused = gptexp("train", *tiny, *SCORES, env=gone)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1), refused.stderr
    assert "train.eval_tasks=my_text: needs the package lm_eval; run: pip install 'gptexp[eval]'" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["sabotage"]
