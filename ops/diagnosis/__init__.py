"""From evidence to a named incident."""
