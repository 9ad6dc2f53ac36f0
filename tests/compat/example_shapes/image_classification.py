"""The shape of run_image_classification.py: random changes as pictures are read, by set_transform."""

import parts
import torch
from pictures import PictureArguments, flipped_at_random, make_pictures, pixels, vision_sizes
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification


def collate(examples):
    stacked = torch.stack([example["pixel_values"] for example in examples])
    return {"pixel_values": stacked, "labels": torch.tensor([example["label"] for example in examples])}


def main():
    _, data_args, training_args, checkpoint = parts.begin(parts.ModelArguments, PictureArguments, TrainingArguments)
    data = make_pictures(data_args.train_samples, data_args.train_val_split)
    labels = ["north-west", "north-east", "south-west", "south-east"]
    config = ViTConfig(**vision_sizes(), num_labels=4)
    config.label2id, config.id2label = {n: i for i, n in enumerate(labels)}, dict(enumerate(labels))

    def changing(change):
        return lambda rows: {**rows, "pixel_values": [change(image) for image in rows["image"]]}

    data["train"].set_transform(changing(flipped_at_random))
    data["validation"].set_transform(changing(pixels))
    trainer = Trainer(
        model=ViTForImageClassification(config),
        args=training_args,
        **parts.splits(data),
        compute_metrics=parts.accuracy,
        data_collator=collate,
    )
    parts.finish(trainer, checkpoint, "image-classification", tags=["image-classification", "vision"])


if __name__ == "__main__":
    main()
