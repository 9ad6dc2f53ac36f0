"""The shape of run_mae.py: a subclass of the arguments whose learning rate depends on the batch."""

from dataclasses import dataclass, field

import parts
import torch
from pictures import PictureArguments, flipped_at_random, make_pictures, vision_sizes
from transformers import Trainer, TrainingArguments, ViTMAEConfig, ViTMAEForPreTraining


@dataclass
class BaseRateArguments(TrainingArguments):
    base_learning_rate: float = field(default=1e-3, metadata={"help": "The learning rate, times the batch by 256."})


def collate(examples):
    return {"pixel_values": torch.stack([example["pixel_values"] for example in examples])}


def main():
    _, data_args, training_args, checkpoint = parts.begin(parts.ModelArguments, PictureArguments, BaseRateArguments)
    data = make_pictures(data_args.train_samples, data_args.train_val_split)
    decoder = {f"decoder_{name}": value for name, value in vision_sizes().items() if not name.endswith("_size")}
    decoder |= {"decoder_hidden_size": 16, "decoder_intermediate_size": 32}
    config = ViTMAEConfig(**vision_sizes(), **decoder, mask_ratio=data_args.mask_ratio, norm_pix_loss=True)

    def preprocess(rows):
        return {**rows, "pixel_values": [flipped_at_random(image) for image in rows["image"]]}

    for split in data.values():
        split.set_transform(preprocess)
    total = training_args.train_batch_size * training_args.gradient_accumulation_steps * training_args.world_size
    if training_args.base_learning_rate is not None:
        training_args.learning_rate = training_args.base_learning_rate * total / 256
    trainer = Trainer(
        model=ViTMAEForPreTraining(config),
        args=training_args,
        **parts.splits(data),
        data_collator=collate,
    )
    parts.finish(trainer, checkpoint, "masked-auto-encoding", tags=["masked-auto-encoding"])


if __name__ == "__main__":
    main()
