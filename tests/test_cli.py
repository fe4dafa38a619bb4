"""The command line: what it accepts, what it prints, and one line for each thing it refuses."""

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from memlab.cli import main
from memlab.cli.batch import batch_shape
from memlab.cli.doctor import BROKEN, NOTE, OK
from memlab.cli.show import amount, heading, saving
from memlab.cli.switches import parse_switches
from memlab.data.lengths import lengths
from memlab.errors import MemlabError
from memlab.experiments import Comparison, Recipe, training
from memlab.experiments.recipe import CHOICES
from memlab.experiments.row import ROW_TYPE, Row
from memlab.experiments.rules import IN_PAIRS, ONLINE, TRAINERS, WITH_PROMPTS
from memlab.instruments.amounts import GB, MB, unit_of
from memlab.instruments.measurement import CATEGORIES, Measurement, Sample

# By name: `memlab.cli.compare` holds a function `compare` too.
compare = importlib.import_module("memlab.cli.compare")
doctor = importlib.import_module("memlab.cli.doctor")
estimate = importlib.import_module("memlab.cli.estimate")
run = importlib.import_module("memlab.cli.run")


def measurement(recipe: Recipe) -> Measurement:
    """A made-up one: logits weigh 6 GB unless the loss is chunked."""
    sizes = (1_000_000_000, 0, 2_000_000_000, 3_000_000_000, 6_000_000_000, 0, 0)
    if recipe.loss_type == "chunked_nll":
        sizes = (*sizes[:4], 1_000_000_000, 0, 0)
    total = sum(sizes)
    return Measurement(
        metered_peak_bytes=total,
        peak_allocated_bytes=total + 67_108_864,
        peak_reserved_bytes=total + 500_000_000,
        by_category=dict(zip(CATEGORIES, sizes, strict=True)),
        by_op={"aten::mm": total},
        timeline=(Sample(1, "backward", sizes),),
        host_peak_bytes=0,
        step_ms=None,
        device="simulated GPU",
        simulated=True,
        versions={"torch": "2.13.0"},
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Recipe, str]]:
    """Measurements are made up; returns the recipes and devices that were asked for."""
    asked: list[tuple[Recipe, str]] = []

    def fake_measure(recipe: Recipe, *, device: str) -> Measurement:
        asked.append((recipe, device))
        return measurement(recipe)

    def fake_compare(before: Recipe, after: Recipe, *, device: str) -> Comparison:
        sides = (fake_measure(recipe, device=device) for recipe in (before, after))
        return Comparison(before, after, *sides)

    monkeypatch.setattr(compare, "compare", fake_compare)
    monkeypatch.setattr(estimate, "measure", fake_measure)
    return asked


COMPARE = "compare --model Qwen/Qwen3-1.7B --batch-size 2 --max-length 2048".split()


def test_compare_starts_from_everything_off(
    measured: list[tuple[Recipe, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMPARE, "--set", "loss_type=chunked_nll", "--device", "simulated"]) == 0
    off = Recipe.off(model="Qwen/Qwen3-1.7B", per_device_train_batch_size=2, max_length=2048)
    assert measured == [(off, "simulated"), (off.replace(loss_type="chunked_nll"), "simulated")]
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert "peak allocated 12.07 7.07 5.00 (41 %)".split() in lines
    assert "peak reserved 12.50 7.50 5.00 (40 %)".split() in lines
    assert "logits 6.00 1.00 5.00".split() in lines
    assert "loss_type: nll -> chunked_nll".split() in lines


def test_compare_from_the_defaults(measured: list[tuple[Recipe, str]]) -> None:
    assert main([*COMPARE, "--before", "defaults", "--set", "gradient_checkpointing=false"]) == 0
    (before, _), (after, _) = measured
    assert before.gradient_checkpointing
    assert not after.gradient_checkpointing
    assert after.loss_type == "chunked_nll"


def test_compare_without_switches_is_off_against_defaults(
    measured: list[tuple[Recipe, str]],
) -> None:
    assert main(COMPARE) == 0
    sizes = {"model": "Qwen/Qwen3-1.7B", "per_device_train_batch_size": 2, "max_length": 2048}
    assert [recipe for recipe, _ in measured] == [Recipe.off(**sizes), Recipe.defaults(**sizes)]


def test_compare_speaks_json(
    measured: list[tuple[Recipe, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMPARE, "--json", "--set", "loss_type=chunked_nll"]) == 0
    told = json.loads(capsys.readouterr().out)
    (before, _), (after, _) = measured
    assert told["saved_bytes"] == 5_000_000_000
    assert told["changed"] == {"loss_type": ["nll", "chunked_nll"]}
    assert told["before"]["recipe"] == dataclasses.asdict(before)
    assert told["after"]["by_category"] == measurement(after).by_category


def test_estimate_tells_the_cards_that_fit(
    measured: list[tuple[Recipe, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "--json"]) == 0
    assert measured == [(Recipe.defaults(), "auto")]
    fits = json.loads(capsys.readouterr().out)["fits"]
    assert fits["8 GB"] == "yes"  # 7.07 allocated, 7.50 reserved
    peaks = dataclasses.replace(
        measurement(Recipe()), peak_allocated_bytes=8 * 10**9, peak_reserved_bytes=24 * 10**9
    )
    assert list(estimate.fits(peaks).values())[:3] == ["tight", "tight", "yes"]
    over = dataclasses.replace(peaks, peak_allocated_bytes=8 * 10**9 + 1, peak_reserved_bytes=None)
    assert list(estimate.fits(over).values())[:2] == ["no", "yes"]


def test_estimate_prints_shares(
    measured: list[tuple[Recipe, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "--base", "off", "--set", "seed=1"]) == 0
    assert measured[0][0] == Recipe.off(seed=1)
    out = capsys.readouterr().out
    assert "50 %" in out  # the logits, 6 of 12 GB
    assert "141 GB" in out


UNEQUAL = "--model memlab/tiny --dataset docstrings --device simulated".split()


def test_estimate_names_the_batch_that_it_measured(
    measured: list[tuple[Recipe, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = set()
    for seed in range(3):
        switches = ["--max-length", "512", "--set", f"seed={seed}"]
        assert main(["estimate", *UNEQUAL, *switches, "--json"]) == 0
        rows, slots = json.loads(capsys.readouterr().out)["batch_shape"]
        assert main(["estimate", *UNEQUAL, *switches]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert f"tiny, {rows} x {slots} slots (docstrings, max_length 512, seed {seed})" in told
        assert "this batch fits a card of" in told
        assert f"as seed {seed} draws it: another may take more" in told
        assert "--dataset full --max-length 512" in told
        shapes.add((rows, slots))
    assert max(shapes) <= (4, 512)
    assert len(shapes) > 1
    assert main(["estimate", "--batch-size", "2", "--max-length", "64"]) == 0
    told = capsys.readouterr().out
    assert "2 x 64 tokens" in told
    assert "batch fits" not in told
    assert "another" not in told


def test_the_shape_is_that_of_the_step_that_is_measured() -> None:
    recipe = Recipe.off(model="memlab/tiny", dataset="docstrings", gradient_accumulation_steps=3)
    first, last = [], []
    for seed in range(4):
        recipe = recipe.replace(seed=seed)
        steps = training.prepare(recipe, "gpu").steps
        shapes = [[tuple(batch["labels"].shape) for batch in step] for step in steps]
        assert batch_shape(recipe) == max(shapes[-1])
        first.append(max(shapes[0]))
        last.append(max(shapes[-1]))
    assert any(one > other for one, other in zip(first, last, strict=True))
    assert batch_shape(recipe.replace(padding_free=True, max_length=None))[0] == 1


def test_max_length_none_cuts_nothing(
    measured: list[tuple[Recipe, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", *UNEQUAL, "--max-length", "none"]) == 0
    assert measured[0][0].max_length is None
    told = " ".join(capsys.readouterr().out.split())
    assert "slots (docstrings, nothing cut, seed 0)" in told
    assert f"--dataset full --max-length {max(lengths('docstrings'))}" in told


def test_compare_gives_both_sides_the_data_set(
    measured: list[tuple[Recipe, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *UNEQUAL, "--set", "padding_free=true"]) == 0
    (before, _), (after, _) = measured
    assert before.dataset == after.dataset == "docstrings"
    padded, flat = batch_shape(before), batch_shape(after)
    assert flat[0] == 1
    told = capsys.readouterr().out
    assert f"batch: {padded[0]} x {padded[1]} slots -> 1 x {flat[1]} slots" in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--trainer dpo", "memlab/tiny, DPO of 4 pairs, 8 x 1024 tokens"),
        ("--trainer reward --batch-size 2", "memlab/tiny, Reward of 2 pairs, 4 x 1024 tokens"),
        ("--trainer kto", "memlab/tiny, KTO, 4 x 1024 tokens"),
        ("--set trainer=grpo", "memlab/tiny, GRPO of 4 completions, 4 x 1024 tokens"),
        ("--trainer online_dpo", "memlab/tiny, Online DPO of 4 prompts, 8 x 1024 tokens"),
        ("--trainer dpo --dataset chat", "slots (chat, max_length 1024, seed 0)"),
        ("--trainer rloo --dataset chat", "slots (chat, prompts whole, seed 0)"),
    ],
)
def test_estimate_names_the_trainer_and_its_batch(
    arguments: str,
    says: str,
    measured: list[tuple[Recipe, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["estimate", "--model", "memlab/tiny", *arguments.split()]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert says in told
    recipe = measured[0][0]
    assert f"{recipe.trainer}" in arguments
    if recipe.dataset == "full":
        rows, slots = batch_shape(recipe)
        assert f"{rows} x {slots} tokens" in says
    else:
        most = int(told.rpartition("--max-length ")[2])
        assert most >= batch_shape(recipe)[1]
        assert batch_shape(recipe.replace(dataset="full", max_length=most))[1] == most


@pytest.mark.parametrize("trainer", TRAINERS)
def test_estimate_runs_each_trainer(trainer: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--model memlab/tiny --max-length 32 --device simulated --json".split()
    completions = ["--set", "max_completion_length=8"] if trainer in ONLINE else []
    assert main(["estimate", "--trainer", trainer, *sizes, *completions]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["recipe"]["trainer"] == trainer
    assert told["batch_shape"] == [8 if trainer in IN_PAIRS else 4, 32]
    assert told["metered_peak_bytes"] > 1_000_000


@pytest.mark.parametrize(
    ("switches", "says"),
    [
        ("--set packing=true", "nothing is left for packing to do"),
        ("--set padding_free=true", "such as --dataset docstrings"),
        ("--set padding_free=true --set dataset=chat", "--dataset chat gives both the same"),
        ("--dataset docstrings --set max_length=64", "from docstrings; other batches differ"),
        ("--set dataset=chat", "4 x 1024 tokens -> "),
        ("--set trainer=dpo", "batch: 4 x 1024 tokens -> 8 x 1024 tokens"),
        ("--set trainer=kto --set loss_type=chunked_nll", "--trainer kto gives both the same"),
        ("--trainer dpo --set padding_free=true", "such as --dataset chat"),
        ("--trainer reward --set loss_type=chunked_nll", "changes nothing with trainer='reward': "),
        ("--trainer kto --dataset chat --set max_length=64", "from chat; other batches differ"),
    ],
)
def test_compare_says_what_the_data_mean(
    switches: str,
    says: str,
    measured: list[tuple[Recipe, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["compare", *switches.split()]) == 0
    (note,) = capsys.readouterr().out.partition("on: simulated GPU")[2].split("\n")[1:-1]
    assert says in note


def test_compare_has_no_note_where_rows_are_full(
    measured: list[tuple[Recipe, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--set", "max_length=64", "--set", "loss_type=chunked_nll"]) == 0
    assert capsys.readouterr().out.partition("on: simulated GPU")[2].strip() == ""


def test_help_names_every_data_set_and_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    told = capsys.readouterr().out
    assert all(name in told for name in CHOICES["dataset"] + CHOICES["trainer"])
    for_all, _, of_sft = " ".join(told.split()).partition("the rows: ")[2].partition("with sft")
    assert [name for name in CHOICES["dataset"] if name in for_all] == list(WITH_PROMPTS)
    assert "also docstrings and chat_like" in of_sft


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line(
    measured: list[tuple[Recipe, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*UNEQUAL, "--set", "packing=true", "--set", "packing_strategy=bfd-requeue"]
    assert main(["estimate", *arguments]) == 0
    assert measured[0][0].packing_strategy == "bfd_split"
    told = capsys.readouterr().err
    assert told.startswith("memlab: packing_strategy='bfd-requeue' is the old name of 'bfd_split'")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        ("estimate --device cpu", True),
        ("estimate --device cpu --model memlab/tiny-llama", False),
        ("estimate --device simulated", False),
        ("compare --device cpu", True),
        ("run 00 --device cpu", True),
        ("run 00 --device simulated", False),
    ],
)
def test_a_cpu_that_computes_is_warned_of(
    arguments: str,
    warned: bool,
    measured: list[tuple[Recipe, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "run_lesson", lambda *_, **__: iter(()))
    monkeypatch.setattr(run, "write_report", lambda *_: tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 0
    assert ("--device simulated takes seconds" in capsys.readouterr().err) is warned


@pytest.mark.parametrize(
    ("texts", "switches"),
    [
        (["max_length=8"], {"max_length": 8}),
        (["gradient_checkpointing=True"], {"gradient_checkpointing": True}),
        (["expandable_segments=off"], {"expandable_segments": False}),
        (["attn_implementation=none"], {"attn_implementation": None}),
        (["attn_implementation=eager"], {"attn_implementation": "eager"}),
        (["model=a=b", "seed=-1"], {"model": "a=b", "seed": -1}),
    ],
)
def test_switches_are_read_by_their_types(texts: list[str], switches: dict[str, Any]) -> None:
    assert parse_switches(texts) == switches


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("compare --set los_type=nll", "loss_type"),
        ("compare --set loss_type=hinge", "chunked_nll"),
        ("compare --set loss_type", "SWITCH=VALUE"),
        ("compare --set max_length=long", "give a whole number"),
        ("compare --set gradient_checkpointing=2", "give true or false"),
        ("compare --set seed=1 --set seed=2", "given twice"),
        ("compare --set max_length=1024", "--before off: give a switch that does, such as --set "),
        ("compare --set loss_type=nll", "such as --set loss_type=chunked_nll"),
        ("compare --before defaults", "such as --set loss_type=nll, or --before off"),
        ("compare --max-length long", "max_length='long': give a whole number or none"),
        ("compare --max-length none", "'docstrings'"),
        ("compare --dataset chats", "'chat_like'"),
        ("estimate --trainer ppo", "'online_dpo'"),
        ("estimate --trainer dpo --dataset docstrings", "give 'full' or 'prompt_completion'"),
        ("estimate --trainer dpo --set loss_type=sigmoid", "memlab.trainers.dpo.train"),
        ("estimate --trainer kto --batch-size 1", "give 2 rows or more a step"),
        ("estimate --trainer grpo --batch-size 1", "give 2 completions"),
        ("estimate --trainer grpo --max-length 512", "give a max_length above 512"),
        ("estimate --set num_generations=4", "only 'grpo', 'rloo' have it"),
        ("compare --trainer rloo --set use_liger_kernel=true", "liger-kernel has no loss for it"),
        (
            "estimate --trainer grpo --dataset chat --model memlab/tiny "
            "--set max_completion_length=4000",
            "max_completion_length=4000 after the prompts of dataset='chat': rows of 4301 tokens",
        ),
        ("compare --max-length 0", "give 2 or more"),
        ("compare --batch-size -1", "give 1 or more"),
        ("estimate --model no/such-model", "Qwen/Qwen3-0.6B"),
        (
            "estimate --model memlab/tiny --trainer gkd --set teacher_model=no/such-model",
            "memlab: teacher_model: unknown model 'no/such-model'",
        ),
        ("run 99", "the lessons are"),
        ("run 00 --device cuda", "give --device simulated"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("memlab: ")
    assert told.err.count("\n") == 1
    assert says in told.err


@pytest.mark.parametrize("error", [MemlabError("two\nlines"), TypeError("two\nlines")])
def test_errors_of_a_measurement_are_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(estimate, "measure", fail)
    assert main(["estimate"]) == 2
    assert capsys.readouterr().err == "memlab: two lines\n"


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(estimate, "measure", fail)
    with pytest.raises(KeyError):
        main(["estimate"])


def test_a_folder_that_is_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["lab", str(tmp_path / "file"), "--copy-only"]) == 2
    assert "choose another folder" in capsys.readouterr().err


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_no_permission_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    assert main(["lab", str(tmp_path / "folder"), "--copy-only"]) == 2
    assert "choose another folder" in capsys.readouterr().err


def test_permission_errors_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert main(["lab", str(tmp_path / "folder"), "--copy-only"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"{tmp_path / 'folder'} (Permission denied): choose another folder" in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("compare --models x", "did you mean --model? (memlab compare --help tells more)"),
        ("run --ouput x", "did you mean --output? (memlab run --help tells more)"),
        ("comprae", "did you mean compare? (memlab COMMAND --help tells more)"),
        ("", "COMMAND"),
        ("compare --batch-size many", "invalid int value: 'many' (memlab compare --help"),
        ("compare --device gpu", "'simulated'"),
    ],
)
def test_what_the_parser_refuses_is_one_line(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("memlab: ")
    assert told.count("\n") == 1
    assert says in told


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (FileNotFoundError(2, "No such file or directory", "/proc/x"), "/proc/x (No such file"),
        (IsADirectoryError(21, "Is a directory", "/x/06.ipynb"), "/x/06.ipynb (Is a directory)"),
        (OSError(28, "No space left on device"), "No space left on device: free space"),
        (OverflowError("int too big to convert"), "int too big to convert"),
    ],
)
def test_trouble_with_files_and_numbers_is_one_line(
    error: Exception,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(estimate, "measure", fail)
    assert main(["estimate"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert says in told


INTERRUPTED = """
import os, signal, sys
from importlib import import_module
from memlab.cli import main

def measure(*_, **__):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.abort()  # as autograd's C++ frames do, once an exception goes through them

import_module("memlab.cli.estimate").measure = measure
sys.exit(main(["estimate"]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to send there")
def test_ctrl_c_unwinds_no_frame_of_a_measurement() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "memlab: stopped\n")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes end otherwise there")
def test_a_closed_pipe_ends_quietly() -> None:
    code = (
        "import os, sys; r, w = os.pipe(); os.dup2(w, 1); os.close(w); os.close(r)\n"
        "from importlib import import_module; from memlab.cli import main\n"
        "import_module('memlab.cli.lab').main = lambda _: print('x') or 0\n"
        "sys.exit(main(['lab']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("command", ["", "compare", "estimate", "doctor", "run", "lab"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    assert "usage: memlab" in capsys.readouterr().out


def test_help_and_import_load_nothing_heavy() -> None:
    code = (
        "import sys, memlab, memlab.cli\n"
        "try: memlab.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'rich', 'papermill'} & {*sys.modules}))"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert time.perf_counter() - started < 3  # 0.04 s on an idle machine


def test_lazy_names_resolve() -> None:
    import memlab

    assert all(hasattr(memlab, name) for name in memlab.__all__)
    assert {*memlab.__all__} <= {*dir(memlab)}
    with pytest.raises(AttributeError, match="nothing_like_it"):
        memlab.nothing_like_it  # noqa: B018


def findings(part: Any) -> dict[str, tuple[str, str]]:
    return {finding.subject: (finding.state, finding.says) for finding in part}


def test_doctor_warns_of_the_new_allocator_variable_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    state, says = findings(doctor.allocator_settings())["PYTORCH_CUDA_ALLOC_CONF"]
    assert state == NOTE
    assert "sleep mode" in says
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert findings(doctor.allocator_settings())["PYTORCH_CUDA_ALLOC_CONF"][0] == OK


def test_doctor_checks_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "requires", lambda _: ["rich<1", "no-such>=2", "x; extra == 'y'"])
    found = findings(doctor.packages())
    assert found["rich"][0] == BROKEN
    assert "pip install 'rich<1'" in found["rich"][1]
    assert found["no-such"] == (BROKEN, "missing: pip install 'no-such>=2'")
    assert "x" not in found


def test_doctor_reports_a_torch_without_the_hook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from memlab.instruments import device

    monkeypatch.setattr(device, "HOOK", "no_such_hook")
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    state, says = findings(doctor.devices())["simulated GPU"]
    assert state == BROKEN
    assert "install torch" in says
    monkeypatch.setattr(doctor, "hub", lambda: doctor.Finding("hub", OK, ""))
    assert main(["doctor"]) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    assert "install torch" in told.err
    assert "state" in told.out  # the whole table is still there


def test_doctor_honours_offline_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.SimpleNamespace(HF_HUB_OFFLINE=True, ENDPOINT="unused:")
    monkeypatch.setattr("huggingface_hub.constants", fake)
    assert doctor.hub().state == NOTE
    assert "HF_HUB_OFFLINE" in doctor.hub().says


def test_doctor_reports_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert doctor.folder("cache", tmp_path / "file").state == BROKEN
    assert doctor.folder("cache", tmp_path / "new").state == OK


def test_doctor_names_the_variable_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = tmp_path / "file" / "memlab"
    assert "set XDG_CACHE_HOME" in doctor.folder("cache", path, "XDG_CACHE_HOME").says
    monkeypatch.setattr(doctor, "user_cache_dir", lambda _: str(path))
    monkeypatch.setattr(doctor, "hub", lambda: doctor.Finding("hub", OK, ""))
    assert "set XDG_CACHE_HOME" in findings(doctor.examine())["cache"][1]
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert "set HOME" in doctor.folder("cache", path, "XDG_CACHE_HOME").says


def test_a_tiny_model_is_counted_in_megabytes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--model memlab/tiny --max-length 32 --device simulated".split()
    for command in ("compare", "estimate"):
        assert main([command, *sizes]) == 0
        told = capsys.readouterr().out
        assert "MB (1e6 bytes)" in told
        assert "peak allocated" in told
        assert not re.search(r"(peak|parameters|logits) .* 0.00 │ *0.00", told)


def test_sizes_in_words() -> None:
    assert [amount(19_790_000_000), amount(-1), amount(None)] == ["19.79", "0.00", "—"]
    assert [amount(4_215_000, MB), heading(MB)] == ["4.21", "MB (1e6 bytes)"]
    assert unit_of(10**8, None) == unit_of(1, -5, 10**8) == GB
    assert unit_of(10**8 - 1, 5) == MB
    assert saving(10 * 10**9, 4 * 10**9) == "6.00 (60 %)"
    assert saving(10 * 10**9, 11 * 10**9) == "costs 1.00 (10 %)"
    assert saving(10**10, 10**10 + 1) == saving(10**10, 10**10) == "0.00 (0 %)"
    assert saving(None, 1) == "—"


def test_rows_are_made_of_comparisons() -> None:
    off, after = Recipe.off(), Recipe.off(loss_type="chunked_nll")
    comparison = Comparison(off, after, measurement(off), measurement(after))
    row = Row.of("chunked loss", comparison)
    assert str(row) == "chunked loss: 12.00 -> 7.00 GB over everything off; price not timed"
    both = Row.of("x", comparison, comparison, price="+8 % (H200, recorded)")
    assert both.defaults_bytes == both.off_bytes == 12 * 10**9
    assert both.after_defaults_bytes == 7 * 10**9
    assert str(both).endswith("7.00 GB over TRL's defaults; price +8 % (H200, recorded)")
    shown = both._repr_mimebundle_()
    assert Row(**shown[ROW_TYPE]) == both
    assert shown["text/plain"] == str(both)
    assert (both.setting, both.growth) == ("full, 4 x 1024", None)


@pytest.mark.parametrize(
    ("before", "switches", "setting", "growth"),
    [
        (
            {"trainer": "sft"},
            {"trainer": "dpo"},
            "full, 4 x 1024",
            "4,096 -> 8,192 useful tokens a step (both rows of each pair) and a reference "
            "model beside the trained one",
        ),
        (
            {"max_length": 512, "model": "memlab/tiny"},
            {"pad_to_multiple_of": 1024},
            "memlab/tiny, full, 4 x 512",
            "2,048 -> 4,096 slots a step for the same tokens",
        ),
        (
            {},
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
            "full, 4 x 1024",
            "gradients kept from one micro-batch to the next",
        ),
        ({"max_length": None, "dataset": "chat"}, {"seed": 1}, "chat, 4 x uncut", None),
    ],
)
def test_a_row_says_why_it_costs(
    before: dict[str, Any], switches: dict[str, Any], setting: str, growth: str | None
) -> None:
    off = Recipe.off(**before)
    after = off.replace(**switches)
    small, large = (measurement(off.replace(loss_type=t)) for t in ("chunked_nll", "nll"))
    row = Row.of("x", Comparison(off, after, small, large))
    assert row.setting == setting
    if growth:
        assert row.growth == growth
    assert Row.of("x", Comparison(off, after, large, small)).growth is None  # it saves


def test_packing_costs_for_more_useful_tokens() -> None:
    off = Recipe.off(dataset="docstrings")
    after = off.replace(packing=True)
    small, large = (measurement(off.replace(loss_type=t)) for t in ("chunked_nll", "nll"))
    growth = Row.of("packing", Comparison(off, after, small, large)).growth
    assert growth
    found = re.fullmatch(r"([\d,]+) -> ([\d,]+) useful tokens a step", growth)
    assert found
    few, many = (int(n.replace(",", "")) for n in found.groups())
    assert few < 2048 < many <= 4096  # rows of docstrings, then rows of up to 1024 tokens, full
