"""The script that the pages of the site start: a tiny model, with any training arguments."""

from hftrainer import HfArgumentParser, Trainer, TrainingArguments
from tests.support.tiny import make_plain, plain_data

if __name__ == "__main__":
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    args.use_cpu = True
    data = plain_data(16)
    Trainer(make_plain(), args, train_dataset=data, eval_dataset=data[:4]).train()
