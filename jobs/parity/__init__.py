"""One layout against one process: the same loss, gradients and steps, or a table of what differs."""
