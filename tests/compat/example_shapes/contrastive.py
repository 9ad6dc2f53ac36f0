"""The shape of run_clip.py: pictures and captions in one model, which is asked for its loss by the batch."""

from dataclasses import dataclass, field

import parts
import torch
from pictures import PictureArguments, make_pictures, pixels, vision_sizes
from transformers import CLIPConfig, CLIPModel, Trainer, TrainingArguments


@dataclass
class FreezeArguments(parts.ModelArguments):
    freeze_vision_model: bool = field(default=False, metadata={"help": "Train the text model and the projections."})
    freeze_text_model: bool = field(default=False, metadata={"help": "Train the vision model and the projections."})


def collate(examples):
    tensors = {name: torch.tensor([row[name] for row in examples]) for name in ("input_ids", "attention_mask")}
    return tensors | {"pixel_values": torch.stack([row["pixel_values"] for row in examples]), "return_loss": True}


def main():
    model_args, data_args, training_args, checkpoint = parts.begin(FreezeArguments, PictureArguments, TrainingArguments)
    tokenizer = parts.word_tokenizer()
    config = CLIPConfig(
        text_config=parts.encoder_sizes(tokenizer) | {"eos_token_id": tokenizer.sep_token_id, "bos_token_id": 2},
        vision_config=vision_sizes(),
        projection_dim=8,
    )
    model = CLIPModel(config)
    frozen = [model.vision_model] * model_args.freeze_vision_model + [model.text_model] * model_args.freeze_text_model
    for part in frozen:
        for parameter in part.parameters():
            parameter.requires_grad = False

    def tokenize(rows):
        captions = [parts.sentence(place[0] * 16 + place[1], 4) for place in rows["place"]]
        encoded = tokenizer(captions, max_length=8, padding="max_length", truncation=True)
        return {"input_ids": encoded.input_ids, "attention_mask": encoded.attention_mask}

    def transform(rows):
        rows["pixel_values"] = [pixels(image) for image in rows["image"]]
        return rows

    data = make_pictures(data_args.train_samples, data_args.train_val_split)
    data = data.map(tokenize, batched=True, remove_columns=["place", "label"])
    for split in data.values():
        split.set_transform(transform)
    trainer = Trainer(
        model=model,
        args=training_args,
        **parts.splits(data),
        data_collator=collate,
    )
    parts.finish(trainer, checkpoint, "contrastive-image-text-modeling")


if __name__ == "__main__":
    main()
