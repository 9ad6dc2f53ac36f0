"""Uploads and downloads in two ranks."""

from hftrainer.errors import HubError
from tests.support.checkpoints import AtStep
from tests.support.hub_runs import make_uploading


def find_all(folder):
    """Whether this rank committed; weights of an undisturbed run and of one resumed from the Hub; a refusal."""
    undisturbed = make_uploading(f"{folder}/undisturbed", push_to_hub=False)
    undisturbed.train()
    stopped = make_uploading(f"{folder}/run", hub_strategy="checkpoint", hub_always_push=True)
    stopped.add_callback(AtStep(4, lambda: setattr(stopped.control, "should_training_stop", True)))
    stopped.train()
    committed = stopped.push_to_hub() is not None
    resumed = make_uploading(f"{folder}/resumed", push_to_hub=False)
    resumed.train(resume_from_checkpoint="hub:me/run")
    weights = [trainer.accelerator.get_state_dict(trainer.model) for trainer in (undisturbed, resumed)]
    try:
        make_uploading(f"{folder}/refused", hub_token="hf_wrong")
    except HubError as error:
        return committed, weights, str(error)
