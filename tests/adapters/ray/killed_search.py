"""A search of three trials, killed once and then resumed: `python -m tests.adapters.ray.killed_search FOLDER`."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import ray
from ray import tune

from tests.adapters.ray.searches import Diary, RayBackend, Waits, make_saving


class Killed(tune.Callback):
    """Kills this process once Ray's state of the search has the third report of the second trial."""

    def on_step_end(self, iteration, trials, **info):
        trials[0].storage.syncer.wait()  # until the state is whole
        for state in (folder / "results" / "search").glob("experiment_state-*.json"):
            if set(re.findall(r"checkpoint_\d+", state.read_text())) == {"checkpoint_000004", "checkpoint_000002"}:
                os.kill(os.getpid(), signal.SIGKILL)  # these are the checkpoints of the last report of each trial


folder = Path(sys.argv[1])
is_first = not (folder / "results").exists()
ray.init(num_cpus=1, object_store_memory=10**8, include_dashboard=False, log_to_driver=False)
logs = {"report_to": "csv", "logging_steps": 1}
trainer = make_saving(
    folder / "out", {"callbacks": [Diary(folder / "diary"), *([Waits()] if is_first else [])]}, max_steps=10, **logs
)
backend = RayBackend()
rates, killed = backend.grid(learning_rate=[1e-3, 2e-3, 3e-3]), [Killed()] if is_first else []
best = backend.search(trainer, **rates, name="search", resume="AUTO", callbacks=killed)
print()
print(json.dumps([(trial.trial_id, trial.status, trial.config["learning_rate"]) for trial in best.run_summary.trials]))
