"""One symptom a file: each monitor reads one kind of thing and tells it as signals. None decides."""
