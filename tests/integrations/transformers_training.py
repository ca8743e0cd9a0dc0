"""A small BERT, its data and its training with `Trainer`, which a child process runs too."""

import os
import signal
import sys

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import probmask
from probmask.integrations.transformers import SparsityCallback

METHODS = {
    "tied": lambda: probmask.TiedProbMask(sparsity=0.8),
    "learned": lambda: probmask.ProbMask(sparsity=0.8),
    "penalty": lambda: probmask.methods.Movement(sparsity=0.8, soft=True),
    "rigl": lambda: probmask.methods.RigL(sparsity=0.8),  # zeroes weights when it is attached
}
UPDATES = 12


class Interrupt(TrainerCallback):
    """Call a function when an update begins."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act()


def network(seed=0, dropout=0.1):
    torch.manual_seed(seed)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=40,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=12,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def examples(size=48):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(40, (size, 8), generator=generator)
    return [{"input_ids": row, "labels": row[0] % 2} for row in ids]


def arguments(directory, **settings):
    return TrainingArguments(
        str(directory),
        **{
            "use_cpu": True,
            "max_steps": UPDATES,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "save_steps": 5,
            "logging_steps": 4,
            "report_to": [],
            "disable_tqdm": True,
            **settings,
        },
    )


def trainer(directory, callback, *others, model=None, optimizers=(None, None), **settings):
    return Trainer(
        network() if model is None else model,
        arguments(directory, **settings),
        train_dataset=examples(),
        eval_dataset=examples(16),
        callbacks=[callback, *others],
        optimizers=optimizers,
    )


def die_at_update_7(directory):
    death = Interrupt(7, lambda: os.kill(os.getpid(), signal.SIGKILL))
    trainer(directory, SparsityCallback(METHODS["learned"]()), death).train()


def train_on_two_ranks(directory):
    """Train two methods as one of two processes; save what this rank ends with."""
    final = {}
    for name in ("learned", "penalty"):
        callback = SparsityCallback(METHODS[name]())
        model = network(seed=int(os.environ["RANK"]))  # DDP copies that of the first rank
        run = trainer(f"{directory}/{name}", callback, model=model, ddp_backend="gloo")
        run.train()
        final[name] = (type(run.model_wrapped).__name__, run.model.state_dict())
    torch.save(final, f"{directory}/rank{os.environ['RANK']}.pt")
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # reference.two_ranks.leave explains why; this script is run by its path


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"die": die_at_update_7, "ranks": train_on_two_ranks}[sys.argv[1]](sys.argv[2])
