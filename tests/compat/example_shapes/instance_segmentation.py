"""The shape of run_instance_segmentation.py: a metric that is updated batch by batch, with arguments set afterwards."""

import parts
import torch
from pictures import SIZE, SQUARE, make_pictures, pixels
from transformers import MaskFormerConfig, MaskFormerForInstanceSegmentation, SwinConfig, Trainer


def mask_of(place):
    """1 where the square is, `(SIZE, SIZE)`."""
    mask = torch.zeros(SIZE, SIZE)
    mask[place[0] : place[0] + SQUARE, place[1] : place[1] + SQUARE] = 1
    return mask


def to_batch(rows):
    return {
        "pixel_values": [pixels(image) for image in rows["image"]],
        "mask_labels": [torch.stack([mask_of(place), 1 - mask_of(place)]) for place in rows["place"]],
        "class_labels": [torch.tensor([label, 4]) for label in rows["label"]],
    }


def collate(examples):
    lists = {name: [example[name] for example in examples] for name in ("mask_labels", "class_labels")}
    return {"pixel_values": torch.stack([example["pixel_values"] for example in examples]), **lists}


class Evaluator:
    """Adds up the best query's mask where the square is, until it is asked for the result."""

    def __init__(self):
        self.scores = []

    @torch.no_grad()
    def __call__(self, results, compute_result=False):
        classes, masks = results.predictions[0].cpu(), results.predictions[1].cpu()
        for place, (wanted, labels) in enumerate(zip(*results.label_ids, strict=True)):
            query = int(classes[place, :, int(labels[0])].argmax())
            small = torch.nn.functional.adaptive_avg_pool2d(wanted[None, 0], masks.shape[-2:])[0]
            self.scores.append(float((masks[place, query] * small).sum()))
        if not compute_result:
            return None
        result = {"overlap": sum(self.scores) / len(self.scores), "pictures": len(self.scores)}
        self.scores.clear()
        return result


def main():
    _, data_args, training_args, checkpoint = parts.begin()
    training_args.eval_do_concat_batches = False
    training_args.batch_eval_metrics = True
    training_args.remove_unused_columns = False
    layers = {"embed_dim": 8, "depths": [1] * 4, "num_heads": [1, 1, 2, 2], "window_size": 2}
    backbone = SwinConfig(image_size=SIZE, patch_size=2, **layers, out_features=[f"stage{i}" for i in range(1, 5)])
    config = MaskFormerConfig(backbone_config=backbone, fpn_feature_size=32, mask_feature_size=32, num_labels=5)
    decoder = {"d_model": 8, "num_queries": 4, "decoder_layers": 1, "decoder_ffn_dim": 16, "decoder_attention_heads": 2}
    config.decoder_config.update(decoder)
    trainer = Trainer(
        model=MaskFormerForInstanceSegmentation(config),
        args=training_args,
        **parts.splits(make_pictures(data_args).with_transform(to_batch)),
        data_collator=collate,
        compute_metrics=Evaluator(),
    )
    parts.finish(trainer, checkpoint, "image-segmentation")
