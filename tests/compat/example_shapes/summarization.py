"""The shape of run_summarization.py: T5 with a prefix, generated summaries, lengths and beams from the arguments."""

import parts
from generation import PairArguments, make_t5, make_trainer, predict, prepare_pairs
from transformers import Seq2SeqTrainingArguments


def main():
    model_args, data_args, training_args, checkpoint = parts.begin(
        parts.ModelArguments, PairArguments, Seq2SeqTrainingArguments
    )
    tokenizer = parts.word_tokenizer("summarize")
    model = make_t5(tokenizer, model_args.hidden_size)
    if training_args.label_smoothing_factor > 0:
        assert hasattr(model, "prepare_decoder_input_ids_from_labels")
    data = prepare_pairs(tokenizer, data_args, training_args)
    trainer = make_trainer(model, tokenizer, data_args, training_args, data, "rouge1")
    parts.train(trainer, checkpoint)
    parts.evaluate(trainer)
    if training_args.do_predict:
        predict(trainer, tokenizer, data["test"])
    parts.describe(trainer, "summarization")


if __name__ == "__main__":
    main()
