"""The shape of run_speech_recognition_ctc.py: a vocabulary made from the texts, letters by CTC."""

import parts
import torch
from letters import LetterCollator, make_metric, prepare
from sounds import SoundArguments, speech_sizes
from transformers import Trainer, TrainingArguments, Wav2Vec2Config, Wav2Vec2ForCTC


def best_letters(logits, labels):
    return torch.argmax(logits, dim=-1), labels


def main():
    _, data_args, training_args, checkpoint = parts.begin(parts.ModelArguments, SoundArguments, TrainingArguments)
    processor, data = prepare(data_args, training_args)
    config = Wav2Vec2Config(
        **speech_sizes(mask_time_prob=0.1, mask_feature_prob=0.1, mask_feature_length=4, layerdrop=0.1),
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
        pad_token_id=processor.tokenizer.pad_token_id,
        vocab_size=len(processor.tokenizer),
    )
    config.save_pretrained(training_args.output_dir)
    model = Wav2Vec2ForCTC(config)
    model.freeze_feature_encoder()
    metric = make_metric(processor, data_args.eval_metrics)

    def compute_metrics(prediction):
        prediction.predictions = prediction.predictions[0]
        return metric(prediction)

    trainer = Trainer(
        model=model,
        data_collator=LetterCollator(processor),
        args=training_args,
        compute_metrics=compute_metrics,
        **parts.splits(data),
        processing_class=processor,
        preprocess_logits_for_metrics=best_letters,
    )
    parts.finish(
        trainer, checkpoint, "automatic-speech-recognition", tags=["automatic-speech-recognition", "generated"]
    )


if __name__ == "__main__":
    main()
