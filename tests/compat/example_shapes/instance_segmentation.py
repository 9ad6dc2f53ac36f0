"""The shape of run_instance_segmentation.py: a metric that is updated batch by batch, with arguments set afterwards."""

import parts
import torch
from pictures import SIZE, PictureArguments, make_pictures, mask_of, pixels
from transformers import MaskFormerConfig, MaskFormerForInstanceSegmentation, SwinConfig, Trainer, TrainingArguments


def to_batch(rows):
    masks = [mask_of(place) for place in rows["place"]]
    return {
        "pixel_values": [pixels(image) for image in rows["image"]],
        "mask_labels": [torch.stack([mask, 1 - mask]).float() for mask in masks],
        "class_labels": [torch.tensor([label, 4]) for label in rows["label"]],
    }


def collate(examples):
    lists = {name: [example[name] for example in examples] for name in ("mask_labels", "class_labels")}
    return {"pixel_values": torch.stack([example["pixel_values"] for example in examples]), **lists}


class Evaluator:
    """Adds up the share of pixels that the best query's mask gets right, until it is asked for the result."""

    def __init__(self):
        self.right = []

    @torch.no_grad()
    def __call__(self, results, compute_result=False):
        classes, masks = results.predictions[0].cpu(), results.predictions[1].cpu()
        for place, (wanted, labels) in enumerate(zip(*results.label_ids, strict=True)):
            query = int(classes[place, :, int(labels[0])].argmax())
            large = torch.nn.functional.interpolate(masks[None, None, place, query], size=(SIZE, SIZE), mode="bilinear")
            self.right.append(float(((large[0, 0] > 0) == (wanted[0] > 0)).float().mean()))
        if not compute_result:
            return None
        result = {"pixels": sum(self.right) / len(self.right), "pictures": len(self.right)}
        self.right.clear()
        return result


def main():
    _, data_args, training_args, checkpoint = parts.begin(parts.ModelArguments, PictureArguments, TrainingArguments)
    training_args.eval_do_concat_batches = False
    training_args.batch_eval_metrics = True
    training_args.remove_unused_columns = False
    data = make_pictures(data_args.train_samples, data_args.train_val_split).with_transform(to_batch)
    config = MaskFormerConfig(
        backbone_config=SwinConfig(
            image_size=SIZE, patch_size=2, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=2,
            out_features=["stage1", "stage2", "stage3", "stage4"],
        ),
        fpn_feature_size=32,
        mask_feature_size=32,
        num_labels=5,
    )  # fmt: skip
    config.decoder_config.update(
        {"d_model": 8, "num_queries": 4, "decoder_layers": 1, "decoder_ffn_dim": 16, "decoder_attention_heads": 2}
    )
    trainer = Trainer(
        model=MaskFormerForInstanceSegmentation(config),
        args=training_args,
        **parts.splits(data),
        data_collator=collate,
        compute_metrics=Evaluator(),
    )
    parts.train(trainer, checkpoint)
    if training_args.do_eval:
        metrics = trainer.evaluate(eval_dataset=data["validation"], metric_key_prefix="test")
        parts.report(trainer, "test", metrics, len(data["validation"]))
    parts.describe(trainer, "image-segmentation")


if __name__ == "__main__":
    main()
