"""What a reader of records must know; without PyTorch, for reading them is quick."""

# Of the record's keys; raised when one changes its meaning.
RECORD_FORMAT = 3

# What of a configuration has no influence on the result, and may therefore be another after a
# resume. Data may have moved; whether it is still the same is asked of its content.
INDIFFERENT = frozenset(("checkpoint_seconds", "data_dir", "tensorboard", "workers"))
