"""The shape of run_speech_recognition_ctc_adapter.py: all but the adapters frozen, which are saved by themselves."""

import os

import parts
from letters import LetterCollator, make_metric, prepare
from safetensors.torch import save_file
from sounds import SoundArguments, speech_sizes
from transformers import Trainer, TrainingArguments, Wav2Vec2Config, Wav2Vec2ForCTC


def main():
    _, data_args, training_args, checkpoint = parts.begin(parts.ModelArguments, SoundArguments, TrainingArguments)
    processor, data = prepare(data_args, training_args)
    config = Wav2Vec2Config(
        **speech_sizes(adapter_attn_dim=4, do_stable_layer_norm=True),
        ctc_zero_infinity=True,
        pad_token_id=processor.tokenizer.pad_token_id,
        vocab_size=len(processor.tokenizer),
    )
    config.save_pretrained(training_args.output_dir)
    model = Wav2Vec2ForCTC(config)
    model.init_adapter_layers()
    model.freeze_base_model()
    for weight in model._get_adapters().values():
        weight.requires_grad = True
    trainer = Trainer(
        model=model,
        data_collator=LetterCollator(processor=processor),
        args=training_args,
        compute_metrics=make_metric(processor, data_args.eval_metrics),
        **parts.splits(data),
        processing_class=processor,
    )
    parts.train(trainer, checkpoint)
    parts.evaluate(trainer)
    adapter = os.path.join(training_args.output_dir, f"adapter.{data_args.target_language}.safetensors")
    save_file(model._get_adapters(), adapter, metadata={"format": "pt"})
    parts.describe(trainer, "automatic-speech-recognition", tags=["automatic-speech-recognition", "mms"])


if __name__ == "__main__":
    main()
