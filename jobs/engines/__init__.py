"""How one optimizer step is executed: one file an engine."""
