"""Which parameters are decayed. Knows names and shapes only, so every engine and layout decides alike."""


def is_decayed(shape: tuple[int, ...]) -> bool:
    """Weight decay is for matrices (embeddings among them); norm weights and other vectors are left alone.

    Args:
        shape: the global shape, whatever piece of it a rank holds.
    """
    return len(shape) >= 2
