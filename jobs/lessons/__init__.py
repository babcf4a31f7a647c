"""Each parallelism on a toy, by hand, in one short file: read one, run it, see that it equals one process."""
