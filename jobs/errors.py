"""The errors that a user is shown, one root: what, where, both numbers, what to do."""


class PacktrainError(Exception):
    """Root of all errors whose text is meant for the user. Picklable: built from its message only."""


class SpecError(PacktrainError, ValueError):
    """The spec, or something that it names, is wrong. Never retried."""


class DataError(PacktrainError, ValueError):
    """The data cannot be trained on: empty, too short, ids outside the vocabulary. Never retried."""


class NumericError(PacktrainError, ArithmeticError):
    """Loss or gradients were not finite, more often than resilience.on_bad_loss lets pass."""


class NumericEchoError(NumericError):
    """The same on a rank whose own loss was finite while that of another, which has the cause, was not."""


class CheckpointError(PacktrainError):
    """A checkpoint is missing, torn, corrupt, or of another model."""
