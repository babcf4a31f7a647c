"""Where a run runs: the command line, Ray, worker shells and rank processes. The only floor that imports Ray."""
