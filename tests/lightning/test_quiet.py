"""A user who has not configured logging sees none of Lightning's tips, advertisements and announcements."""

import os
import re
import textwrap

import pytest

NOISE = re.compile(
    r"litmodels|litlogger|lightning\.ai|litdata|\btips?\b|💡|(GPU|TPU|MPS|HPU) available|using: \d+ TPU|"
    r"Trainer was signaled|max_(steps|epochs)=.* reached|LOCAL_RANK|Missing logger|"
    r"num_workers|does not have many workers|sanity|Experiment logs directory|LightningDeprecation|UserWarning",
    re.IGNORECASE,
)
SCRIPT = """
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar, Timer
    from hftrainer import Trainer, TrainingArguments
    from tests.support.small_models import make_plain, plain_data

    def make(*callbacks, **settings):
        args = TrainingArguments({folder!r}, max_steps=4, logging_steps=2, use_cpu=True, report_to="none", **settings)
        data = plain_data()
        return Trainer(make_plain(), args, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))
"""
RUNS = {
    "train": """
        trainer = make(ModelCheckpoint({folder!r} + "/lightning", monitor="eval_loss"), Timer(),
            EarlyStopping("eval_loss", patience=1, min_delta=9.0), eval_strategy="steps", eval_steps=1, save_steps=2)
        trainer.train()
        trainer.train(resume_from_checkpoint=True)
    """,
    "bar": "make(RichProgressBar(), disable_tqdm=True).train()",
    "evaluate": "make().evaluate()",
    "test": "make().evaluate(metric_key_prefix='test')",
    "predict": "make().predict(plain_data())",
    "config": "make(lightning_config={{'limit_val_batches': 2, 'detect_anomaly': True}}).evaluate()",
}


@pytest.mark.parametrize("run", RUNS)
def test_run_prints_no_tips_or_announcements_of_lightning(tmp_path, processes, run):
    text = textwrap.dedent(SCRIPT) + textwrap.dedent(RUNS[run])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHONWARNINGS")}
    script = text.format(folder=str(tmp_path / "out"))
    done = processes.run("-c", script, cwd=tmp_path, env=processes.environment(inherited), fresh=True)
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    assert not NOISE.findall(shown), shown
