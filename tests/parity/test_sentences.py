"""Our messages contain the words of transformers that libraries and its own tests look for."""

import importlib
import logging

import pytest
import torch

from tests.support.parity import LIBRARIES, build, seq2seq
from tests.support.small_models import Plain, Stream, make_bert, make_t5, plain_data, t5_data


def make(model="plain", **settings):
    return lambda name, folder: build(name, model, folder, **{"max_steps": 1, **settings})[0]


def train(resume=None, model="plain", **settings):
    return lambda name, folder: make(model, **settings)(name, folder).train(resume_from_checkpoint=resume)


def load(name, folder):
    trainer, model = make("bert")(name, folder), make_bert()
    folder.mkdir(exist_ok=True)
    torch.save({f"{key}.other": value for key, value in model.state_dict().items()}, folder / "pytorch_model.bin")
    trainer._load_from_checkpoint(str(folder))


def empty_folder(name, folder):
    folder.mkdir()
    make()(name, folder).train(resume_from_checkpoint=True)


def smooth_several_labels(name, folder):
    model = make_bert(num_labels=3)
    model.config.problem_type = "multi_label_classification"
    trainer = make("bert", label_smoothing_factor=0.1, trainer={"model": model})(name, folder)
    assert trainer.label_smoother is None


def no_padding_known(name, folder):
    model = Plain()
    model.main_input_name = "x"
    train(include_num_input_tokens_seen="non_padding", trainer={"model": model})(name, folder)


def data_that_ends(name, folder):
    class Once(Stream):
        def __iter__(self):
            return self.rows

    data = Once(8)
    data.rows = iter(plain_data(8))
    train(accelerator_config={"dispatch_batches": False}, trainer={"train_dataset": data}, max_steps=4)(name, folder)


def wrong_generation(name, folder):
    config = importlib.import_module("transformers").GenerationConfig(do_sample=False, temperature=0.3)
    build(name, (make_t5, t5_data), folder, trainer_class=seq2seq, generation_config=config)


STOPS = {"callback": lambda library: library.EarlyStoppingCallback()}
#: Words → what provokes them in an error, a warning or a log line.
SENTENCES = {
    "missing keys": load,
    "unexpected keys": load,
    "Can't find a valid checkpoint at": train(resume="/nowhere"),
    "No valid checkpoint found in output directory": empty_folder,
    "Running training": train(),
    "Running Evaluation": lambda name, folder: make()(name, folder).evaluate(),
    "Fix these issues to train your model": wrong_generation,
    "Label smoothing is not compatible with multi-label classification": smooth_several_labels,
    "`args.metric_for_best_model` must be provided": train(save_strategy="best", eval_strategy="steps"),
    "Could not determine method to count non-padding tokens": no_padding_known,
    "The `AcceleratorConfig`'s `num_steps` is set but": make(
        accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 3}}, gradient_accumulation_steps=2
    ),
    "EarlyStoppingCallback requires metric_for_best_model": train(**STOPS),
    "requires IntervalStrategy of steps or epoch": train(**STOPS, metric_for_best_model="loss"),
    "early stopping required metric_for_best_model": train(
        **STOPS, eval_strategy="steps", eval_steps=1, metric_for_best_model="other"
    ),
    "stopping training at step 2!": data_that_ends,
}


@pytest.mark.parametrize("words", SENTENCES)
def test_message_has_the_words_of_transformers(tmp_path, words, recwarn):
    """Our messages also reach handlers of transformers' loggers, which its tests install."""
    for name in LIBRARIES:
        loggers, lines = [logging.getLogger(f"transformers.{module}") for module in ("trainer", "trainer_callback")], []
        handler, level = logging.Handler(), logging.getLogger("transformers").level
        handler.emit = lambda record, lines=lines: lines.append(record.getMessage())
        for logger in loggers:
            logger.addHandler(handler)
        logging.getLogger("transformers").setLevel(logging.INFO)
        recwarn.clear()
        try:
            SENTENCES[words](name, tmp_path / name)
        except Exception as error:  # which sentence it has, is the question
            lines.append(str(error))
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
            logging.getLogger("transformers").setLevel(level)
        assert words in "\n".join([*lines, *(str(warning.message) for warning in recwarn)]), (name, lines)
