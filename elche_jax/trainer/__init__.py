"""`Trainer` and its callbacks, evaluation, results and background runs."""
