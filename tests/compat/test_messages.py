"""Info lines are logged as by transformers, and shown by the same switches."""

import io
import logging
import os
import re
import textwrap

import pytest
import transformers

import hftrainer

SCRIPT = """
import logging, os, sys
{before}
import importlib
library = importlib.import_module({library!r})
from tests.support.small_models import make_bert, make_plain, plain_data, text_data
{after}

def make(**settings):
    given = dict(max_steps=1, save_strategy="no", per_device_train_batch_size=4, disable_tqdm=True, use_cpu=True)
    given |= {{"report_to": "none"}}
    data = {model}_data()
    args = library.TrainingArguments({folder!r}, **{{**given, **settings}})
    return library.Trainer(make_{kind}(), args, train_dataset=data, eval_dataset=data[:9])

{run}
"""


def program(
    folder, library="hftrainer", before="", after="", run="make({settings}).train()", settings="", model="plain"
):
    given = {"library": library, "folder": str(folder), "before": before, "after": after, "model": model}
    given["run"] = textwrap.dedent(run).replace("{settings}", settings)
    return SCRIPT.format(**given, kind={"plain": "plain", "text": "bert"}[model])


@pytest.fixture(scope="module")
def output_of(processes):
    def run(text, fresh=False, **variables):
        inherited = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
        done = processes.run("-c", text, env={**processes.environment(inherited), **variables}, fresh=fresh)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, done.stderr

    return run


#: What both must say of a run and of one that resumes, besides the numbers at the beginning: name → pattern of theirs,
#: pattern of ours.
FACTS = {
    "max_steps": (r"max_steps is given", r"max_steps=6 is given"),
    "evaluation": (r"Running Evaluation", r"Running Evaluation"),
    "its examples": (r"Num examples = 9\b", r"Number of examples: 9\b"),
    "its batch": (r"Batch size = 8\b", r"Batch size: 8\b"),
    "prediction": (r"Running Prediction", r"Running Prediction"),
    "saving": (r"Saving model checkpoint to \S*out/checkpoint-4\b", r"Saving the model to \S*out/checkpoint-4\."),
    "saving a model": (r"Saving model checkpoint to \S*out/final\b", r"Saving the model to \S*out/final\."),
    "the end": (r"Training completed", r"Training is complete"),
    "loading": (r"Loading model from \S*checkpoint-6", r"Loading the model from \S*checkpoint-6"),
    "steps done": (r"global step 6\b", r"Optimizer steps done: 6\b"),
    "epochs done": (r"epoch 1\b", r"Epochs done: 1\b"),
    "batches done": (r"1 epochs and\D* 2 batches|first 1 epochs then the first 2 b", r"that are skipped: 2\b"),
}
BOTH = """
settings = dict(
    log_level="info", max_steps=6, gradient_accumulation_steps=2, save_strategy="steps", save_steps=2,
    save_total_limit=1, eval_strategy="steps", eval_steps=3,
)
trainer = make(**settings)
trainer.train()
trainer.predict(text_data()[:5])
trainer.save_model(trainer.args.output_dir + "/final")
make(**{**settings, "max_steps": 8}).train(resume_from_checkpoint=True)
"""


@pytest.fixture(scope="module")
def outputs_of_both(tmp_path_factory, output_of):
    folder = tmp_path_factory.mktemp("both")
    found = []
    for library in ("transformers", "hftrainer"):
        text = program(folder / library / "out", library, run=BOTH, model="text")
        found.append("".join(output_of(text)))
    return found


@pytest.mark.parametrize("fact", FACTS)
def test_fact_is_logged_by_both_libraries(outputs_of_both, fact):
    for text, pattern in zip(outputs_of_both, FACTS[fact], strict=True):
        assert re.search(pattern, text), pattern


def test_numbers_logged_at_the_beginning_are_those_of_transformers(outputs_of_both):
    """In the same order; steps per epoch since v5.4."""
    theirs, ours = outputs_of_both
    block = theirs[theirs.index("Running training") :].splitlines()[1:]
    numbers = [row.rpartition("= ")[2] for row in block[: block.index(next(x for x in block if "trainable" in x)) + 1]]
    mine = [line.rpartition(": ")[2] for line in ours[ours.index("Running training") :].splitlines()[1:9]]
    assert numbers == (mine if len(numbers) == 8 else [*mine[:2], *mine[3:]])


LINE = "Number of examples: 38"
THEIR_LINE = "Num examples = 38"
VERBOSE = "import transformers; transformers.utils.logging.set_verbosity_info(); switches = transformers.utils.logging"
NO_HANDLER = VERBOSE + "; switches.disable_default_handler()"
TO_STDOUT = "logging.basicConfig(stream=sys.stdout)"
INFO = "log_level='info'"
LOWERED = "trainer = make(log_level='warning')\nswitches.set_verbosity_info()\ntrainer.train()"
#: Name → what the script does, and how often a line at info is seen on stdout and on stderr.
SWITCHES = {
    "nothing": ({}, (0, 0)),
    "log_level": ({"settings": INFO}, (0, 1)),
    "log_level warning": ({"settings": "log_level='warning'", "after": VERBOSE}, (0, 0)),
    "set_verbosity_info": ({"after": VERBOSE}, (0, 1)),
    "set_verbosity_info before": ({"before": VERBOSE}, (0, 1)),
    "basicConfig": ({"before": "logging.basicConfig(level=logging.INFO)"}, (0, 0)),
    "basicConfig and log_level": ({"before": TO_STDOUT, "settings": INFO}, (1, 0)),
    "basicConfig to a file": ({"before": "logging.basicConfig(filename=os.devnull)", "settings": INFO}, (0, 1)),
    "a root handler of errors": (
        {"before": "h = logging.StreamHandler(); h.setLevel(40); logging.getLogger().addHandler(h)", "settings": INFO},
        (0, 1),
    ),
    "scripts of transformers": (
        {
            "before": "logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)])",
            "after": VERBOSE + "; switches.enable_default_handler(); switches.enable_explicit_format()",
            "settings": INFO,
        },
        (1, 0),
    ),
    "disable_default_handler": ({"after": NO_HANDLER}, (0, 0)),
    "disable_default_handler and basicConfig": ({"before": TO_STDOUT, "after": NO_HANDLER}, (0, 0)),
    "enable_propagation": ({"before": TO_STDOUT, "after": NO_HANDLER + "; switches.enable_propagation()"}, (1, 0)),
    "add_handler": ({"after": NO_HANDLER + "; switches.add_handler(logging.StreamHandler(sys.stdout))"}, (1, 0)),
    "switched off again": (
        {"run": "trainer = make()\nswitches.set_verbosity_error()\ntrainer.train()", "after": VERBOSE},
        (0, 0),
    ),
    "a higher level later": (
        {"run": "trainer = make(log_level='info')\nswitches.set_verbosity_error()\ntrainer.train()", "after": VERBOSE},
        (0, 0),
    ),
    "a lower level later": ({"run": LOWERED, "after": VERBOSE}, (0, 1)),
    "enable_explicit_format": ({"after": VERBOSE + "; switches.enable_explicit_format()"}, (0, 1)),
    "a warning": (
        {
            "run": "saved = dict(save_strategy='steps', save_steps=2)\nmake(max_steps=2, **saved).train()\n"
            "make(max_steps=8, **saved).train(resume_from_checkpoint=True)"
        },
        (0, 0),
    ),
    "Python's own": ({"after": "logging.getLogger('hftrainer').setLevel(logging.INFO)"}, (0, 1)),
}


@pytest.fixture(scope="module")
def outputs_of_switches(tmp_path_factory, output_of):
    folder = tmp_path_factory.mktemp("switches")
    return {switch: output_of(program(folder / str(n), **how)) for n, (switch, (how, _)) in enumerate(SWITCHES.items())}


@pytest.mark.parametrize("switch", SWITCHES)
def test_logging_switch_shows_info_lines_as_often(tmp_path, output_of, outputs_of_switches, switch):
    how, expected = SWITCHES[switch]
    found = outputs_of_switches[switch]
    assert tuple(text.count(LINE) for text in found) == expected, found
    if "'hftrainer'" not in str(how):  # a line is seen from ours where one is from theirs, if anywhere
        theirs = output_of(program(tmp_path, "transformers", **how))
        assert sum(expected) == "".join(theirs).count(THEIR_LINE)


@pytest.mark.parametrize(("level", "expected"), [("info", 1), ("error", 0)])
def test_verbosity_variable_shows_or_hides_info_lines(tmp_path, output_of, level, expected):
    for library, line in {"hftrainer": LINE, "transformers": THEIR_LINE}.items():
        found = output_of(program(tmp_path / library, library), fresh=True, TRANSFORMERS_VERBOSITY=level)
        assert [text.count(line) for text in found] == [0, expected]


def test_explicit_format_is_used(outputs_of_switches):
    found = outputs_of_switches["enable_explicit_format"][1]
    assert re.search(r"\[INFO\|\w+\.py:\d+\] \d{4}-.* >>   Number of examples: 38", found)


def test_warning_is_shown_once(outputs_of_switches):
    assert "".join(outputs_of_switches["a warning"]).count("Resuming with max_steps=8, was 2") == 1


WITHOUT = """
import importlib.machinery, importlib.metadata

class WithoutTransformers:
    def find_spec(fullname, path=None, target=None):
        hidden = fullname.partition(".")[0] == "transformers"
        return None if hidden else importlib.machinery.PathFinder.find_spec(fullname, path, target)

    def find_distributions(context=importlib.metadata.DistributionFinder.Context()):
        hidden = context.name == "transformers"
        return [] if hidden else importlib.machinery.PathFinder.find_distributions(context)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = WithoutTransformers
"""


@pytest.mark.parametrize(
    ("how", "environment", "expected"),
    [
        ({}, {}, (0, 0)),
        ({"settings": INFO}, {}, (0, 1)),
        ({}, {"TRANSFORMERS_VERBOSITY": "info"}, (0, 1)),
        ({"after": "logging.basicConfig(level=logging.INFO, stream=sys.stdout)"}, {}, (0, 0)),
        ({"after": TO_STDOUT, "settings": INFO}, {}, (1, 0)),
    ],
)
def test_messages_without_transformers_installed(tmp_path, output_of, how, environment, expected):
    found = output_of(program(tmp_path, before=WITHOUT, **how), fresh=True, **environment)
    assert tuple(text.count(LINE) for text in found) == expected, found
    assert "[transformers]" not in "".join(found)


class Bare(logging.Formatter):
    def __init__(self):
        pass

    def format(self, record):
        return f"mine: {record.getMessage()}"


@pytest.mark.parametrize(("formatter", "start"), [(None, "Resuming"), (Bare(), "mine: Resuming")])
def test_handlers_of_a_script_keep_their_format(formatter, start):
    """Those that write to a terminal without a format get ours."""
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(formatter)
    transformers.logging.get_logger("transformers").addHandler(handler)
    try:
        logging.getLogger(f"{hftrainer.__name__}.training").warning("Resuming %s", "words " * 40)
    finally:
        transformers.logging.get_logger("transformers").removeHandler(handler)
    assert handler.stream.getvalue() == start + " " + "words " * 40 + "\n"


def test_root_handler_that_no_script_set_up_does_not_set_our_format(tmp_path, output_of):
    """`logging.warning` adds one, which shows the names of loggers and levels."""
    _, error = output_of(program(tmp_path, before="logging.warning('first')", settings=INFO))
    assert (error.count(f"\n[hftrainer]   {LINE}\n"), error.count("INFO:"), error.count("WARNING:root:first")) == (
        1,
        0,
        1,
    )
