"""A search of three trials that a test kills and starts again: `python -m tests.adapters.ray.killed FOLDER`."""

import json
import os
import sys

import ray

from tests.adapters.ray.searches import QUIETLY, Diary, make_trainer, rates

folder = sys.argv[1]
ray.init(num_cpus=1, object_store_memory=10**8, include_dashboard=False, log_to_driver=False)
trainer = make_trainer(
    os.path.join(folder, "out"), {"callbacks": [Diary(os.path.join(folder, "diary"), seconds=0.2)]}, max_steps=10
)
best = trainer.hyperparameter_search(
    rates(1e-3, 2e-3, 3e-3),
    **QUIETLY,
    name="search",
    storage_path=os.path.join(folder, "results"),
    resume="AUTO",
)
print()
print(json.dumps([(trial.trial_id, trial.status, trial.config["learning_rate"]) for trial in best.run_summary.trials]))
