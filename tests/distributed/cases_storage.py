"""An output folder at a URL, in ranks: each node has the disk `folder`."""

from tests.support.checkpoints import make_trainer, train_to_end, weights_of


def train(folder, url, steps, resume, settings):
    """The weights after so many steps, and what was resumed from."""
    settings = {"lr_scheduler_type": "constant", "max_steps": steps, **settings}
    trainer = train_to_end(make_trainer(folder, storage_url=url, **settings), resume)
    resumed = trainer._hftrainer.run.resume_folder
    with trainer._hftrainer.strategy.summon_full_parameters():
        weights = trainer.accelerator.get_state_dict(trainer.model)
    return {name: tensor.clone() for name, tensor in (weights or weights_of(trainer)).items()}, resumed
