"""What the tests of several documents share."""

from hftrainer import HfArgumentParser, TrainingArguments


def quiet(folder, kind=TrainingArguments, **settings):
    """Arguments for a short run on the CPU that logs each step."""
    defaults = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    return kind(str(folder), **{**defaults, "max_steps": 2, **settings})


def parsed(words, use_cpu=True):
    """The arguments of a command line."""
    given = f"--output_dir o --use_cpu {use_cpu} {words}".split()
    return HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(given)[0]


def losses(logs):
    """Of the steps of a run."""
    return [line["loss"] for line in logs if "loss" in line]
