"""`python -m hftrainer explain` says what becomes of each argument."""

import inspect
import json
import re
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest

from hftrainer import Seq2SeqTrainingArguments, TrainingArguments
from hftrainer.__main__ import main
from hftrainer.arguments.fields.argument import arguments_of
from hftrainer.arguments.lightning_plan import make_plan
from hftrainer.arguments.resolved import ResolvedArguments
from tests.support.arguments import CASES


@pytest.fixture
def explain(capsys):
    def run_explain(*words: str) -> SimpleNamespace:
        with pytest.raises(SystemExit) as ended:
            main(["explain", *words])
        shown = capsys.readouterr()
        return SimpleNamespace(returncode=ended.value.code or 0, stdout=shown.out, stderr=shown.err)

    return run_explain


@pytest.fixture
def explain_script(processes, tmp_path):
    return lambda *words: processes.run("-m", "hftrainer", "explain", *words, cwd=tmp_path, fresh=True)


@pytest.mark.filterwarnings("default::FutureWarning")
def test_arguments_of_a_command_line_are_explained(tmp_path, explain):
    done = explain("--gradient_accumulation_steps", "4", "--do_train", "--learning_rate", "3e-4", "--no_cuda")
    assert (done.returncode, done.stderr) == (0, "note: Old names of training arguments: no_cuda is now use_cpu\n")
    text = done.stdout
    assert "  gradient_accumulation_steps=4: accumulate_grad_batches" in text
    assert "  do_train=True: a switch for your script" in text
    assert "which eval_strategy sets" in " ".join(explain("--do_eval").stdout.split())
    assert "accumulate_grad_batches=4" in text.split("Lightning's Trainer gets")[1]
    assert max(map(len, text.splitlines())) <= 80
    assert not list(tmp_path.iterdir())


def test_refused_arguments_exit_with_status_1(explain):
    done = explain("--fp16", "--fp16_opt_level", "O2", "--mp_parameters", "a=b")
    assert done.returncode == 1
    assert "  fp16_opt_level='O2': " in done.stdout
    assert "on a CPU too, where transformers trains in\n      float32" in done.stdout
    refused = "A Trainer refuses (fp16_opt_level, mp_parameters|mp_parameters, fp16_opt_level), for"
    assert re.search(refused, done.stdout)
    assert "by hand" not in done.stdout


def test_wrong_values_are_refused_once(explain):
    done = explain("--learning_rate=-1", "--max_steps", "3", "--mp_parameters", "a=b")
    assert done.returncode == 1
    handled, refused = done.stdout.split("Refused\n")
    assert handled.startswith("Handled by hftrainer\n  max_steps=3: ") and "learning_rate" not in handled
    assert refused.startswith("  learning_rate=-1.0: use a number of at least 0.\n  mp_parameters=")
    assert "A Trainer refuses learning_rate, mp_parameters, for" in refused
    assert "no backend is called 'glooo'; did you mean 'gloo'?" in explain("--ddp_backend", "glooo").stdout
    assert "no such argument" in explain("--lightning_config", '{"max_epochz": 3}').stderr


@pytest.mark.parametrize("words", [("--json", "--max_steps", "3"), ("--max_steps", "3", "--json")])
def test_json_has_argument_value_kind_and_detail(words, explain):
    done = explain(*words)
    detail = "Optimizer steps of training; a value above 0 overrides `num_train_epochs`."
    assert json.loads(done.stdout)["arguments"] == [
        {"argument": "max_steps", "value": 3, "kind": "handled", "detail": detail}
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learning_rat", "3"], "--learning_rat; did you mean '--learning_rate'"),
        (["--logging_steps", "0"], "logging_steps=0"),
        (["--eval_strategy", "sometimes"], "--eval_strategy: 'sometimes' is not one of no, steps, epoch"),
        (["--optim", "adamw_torc"], "error: --optim: 'adamw_torc' is not allowed; did you mean 'adamw_torch'?"),
        (["optim=adamw_torc"], "error: optim: 'adamw_torc' is not allowed; did you mean 'adamw_torch'?"),
        (["learning_rate=x"], "error: learning_rate: 'x' is not a number"),
        (["lerning_rate"], "unknown argument lerning_rate; did you mean 'learning_rate'?"),
        (["lr=3"], "unknown argument lr=3; did you mean 'learning_rate'?"),
        (["--jsn"], "--jsn; did you mean '--json'?"),
        (["trian.py"], "the script 'trian.py' does not exist"),
        (["--max_steps", "3", "train.py"], "a script must come first: explain train.py --fp16"),
        (["-m"], "-m needs the name of a module"),
        (["--report_to", "wandbb"], "report_to='wandbb' is not a tracker; did you mean 'wandb'?"),
        (["--eval_memmap_dir", "/nope"], "eval_memmap_dir='/nope' is not a folder"),
        (["--torch_compile_mode", "x"], "error: Unrecognized mode=x, should be one of: default"),
        (["--optim", "sgd", "--optim_args", "momentun=1"], "optim_args of optim='sgd': unknown momentun"),
        (["--lr_scheduler_kwargs", '{"num_cycle": 2}'], "lr_scheduler_kwargs of 'linear': unknown ['num_cycle']"),
    ],
)
def test_wrong_argument_says_what_to_type(words, message, explain):
    done = explain(*words)
    # An example is for words that cannot be read, not for values that a Trainer refuses.
    assert done.returncode == (2 if "example: " in done.stderr or ".py" in words[0] else 1)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_name_of_an_argument_alone_shows_its_help(explain):
    for name, handled in {"learning_rate": "Handled by hftrainer", "bf16": "Settings of Lightning: precision:"}.items():
        shown = explain(name).stdout
        assert shown.startswith(f"--{name} ") and shown.splitlines()[-1].startswith(handled)
    text = " ".join(explain("optim").stdout.split())
    assert "galore" in text and "'adamw_torch' until v4.53. (default: adamw_torch_fused)" in text
    shown = json.loads(explain("optim", "--json").stdout)
    found = [shown[part] for part in ("argument", "default", "handling")]
    assert found == ["optim", "adamw_torch_fused", "Handled by hftrainer"]
    assert "sgd" in shown["choices"] and "always AdamW" in shown["help"]
    assert explain("--help").stdout.count("\n") < 24 and explain("--help-all").stdout.count("\n") > 500


#: The cases of the other two have their defaults, which are not explained.
EXPLAINED = [name for name in CASES if name not in ("use_cpu", "disable_tqdm")]


@pytest.mark.parametrize("content", [None, b"", b"\xb0", b"[1]", b"a: [1", b"3"])
def test_invalid_lightning_config_file_is_refused(tmp_path, explain, content):
    path = tmp_path / "settings.yaml"
    if content is not None:
        path.write_bytes(content)
    done = explain("--lightning_config", str(path))
    assert done.returncode == 1 and "explain: error: lightning_config" in done.stderr


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.usefixtures("deepspeed_installed")
@pytest.mark.parametrize("name", EXPLAINED)
def test_every_argument_is_explained(name):
    """An old name is explained by its new one."""
    case = CASES[name]
    explained = Seq2SeqTrainingArguments(**case.settings, **{name: case.value}).explain()
    lines = {line.argument: line for line in explained.lines}
    argument = case.new or name
    kind = arguments_of(Seq2SeqTrainingArguments)[argument].kind
    assert lines[argument].kind == ("refused" if case.refusal else kind)
    assert argument == name or name not in lines


def test_defaults_are_summed_up_and_tokens_hidden():
    assert "All arguments have their defaults." in str(TrainingArguments().explain())
    assert "secret" not in str(TrainingArguments(hub_token="secret").explain())
    args = TrainingArguments(use_cpu=True, load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch")
    args.report_to.append("wandb")
    names = {"eval_strategy", "load_best_model_at_end", "save_strategy", "use_cpu", "report_to"}
    assert {line.argument for line in args.explain().lines} == names


def test_explained_keywords_are_accepted_by_lightnings_trainer():
    keywords = make_plan(ResolvedArguments(TrainingArguments("x", bf16=True, use_cpu=True))).trainer_keywords()
    assert keywords.keys() <= inspect.signature(pl.Trainer.__init__).parameters.keys()
    trainer = pl.Trainer(**keywords, logger=False, enable_progress_bar=False, enable_model_summary=False)
    assert trainer.precision == "bf16-mixed"


SCRIPT = """
import os, sys
from {library} import HfArgumentParser, Trainer, TrainingArguments

class Prepares(Trainer):
    def __init__(self, model, args):
        open("prepared", "w")
        super().__init__(model, args)

print("of the script", sys.argv[1:], os.environ["HF_HUB_OFFLINE"])
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
args.max_steps = 7
{ending}
open("went-on", "w")
"""
ENDINGS = {
    "Trainer": "Prepares(None, args)",
    "caught": "try:\n    Trainer(args=args)\nexcept Exception:\n    pass",
    "default": "Trainer()",
    "none": "",
    "fails": "raise OSError('not cached.')",
}


@pytest.fixture
def write_script(tmp_path):
    def write(ending: str, library: str = "hftrainer") -> str:
        path = tmp_path / "train.py"
        path.write_text(SCRIPT.format(ending=ENDINGS[ending], library=library))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("ending", "status", "steps", "message"),
    [
        ("Trainer", 0, 7, ""),
        ("caught", 0, 7, ""),
        ("default", 0, None, ""),
        ("none", 0, 7, ""),
        ("fails", 1, 7, " ended before its Trainer with OSError: not cached. These are the arguments that it "),
    ],
)
def test_script_is_explained_up_to_its_trainer(write_script, explain_script, tmp_path, ending, status, steps, message):
    done = explain_script("--json", write_script(ending), "--bf16", "--learning_rate", "3e-4")
    assert done.returncode == status, done.stderr
    arguments = {line["argument"]: line["value"] for line in json.loads(done.stdout)["arguments"]}
    assert arguments.get("max_steps") == steps
    assert arguments.get("learning_rate") == (None if steps is None else 3e-4)
    assert message in done.stderr
    assert "of the script ['--bf16', '--learning_rate', '3e-4'] 1" in done.stderr
    written = {"went-on"} if ending == "none" else set()
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", *written}


def test_script_run_as_a_module_is_explained(write_script, explain_script):
    write_script("Trainer", "transformers")
    done = explain_script("-m", "train", "--bf16")
    assert done.returncode == 0, done.stderr
    assert "  max_steps=7" in done.stdout and "bf16-mixed" in done.stdout
    missing = explain_script("-m", "nomod")
    assert (missing.returncode, missing.stderr) == (2, "python -m hftrainer explain: error: no module named 'nomod'\n")


def test_script_without_training_arguments_is_named(tmp_path, explain_script):
    (tmp_path / "train.py").write_text("raise OSError('not cached.')")
    done = explain_script("train.py")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "train.py:1 ended before its Trainer with OSError: not cached, and created no" in done.stderr
    assert "python -m hftrainer run train.py shows where the script ends" in done.stderr
    (tmp_path / "train.py").write_text("pass")
    assert "train.py ended, and created no TrainingArguments" in explain_script("train.py").stderr
    assert explain_script("absent.py").stderr.endswith("pass the path of a file, or -m and a module\n")
