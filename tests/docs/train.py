"""The script that the pages of the site start: a tiny model, with any training arguments."""

from hftrainer import HfArgumentParser, Trainer, TrainingArguments
from hftrainer.demo import model, train, valid

if __name__ == "__main__":
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    args.use_cpu = True
    Trainer(model, args, train_dataset=train, eval_dataset=valid).train()
